"""A whole training run on a tiny random model, here or in a process of its own."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from alula.train.config import Recipe, Served, TrainConfig
from alula.train.logs import read_log
from alula.train.methods.options import Eagle3Options
from alula.train.run import run
from tests.train.support import conversations

_CHILD = """
import pickle, sys
from pathlib import Path
from alula.cli.errors import guarded
from alula.train.run import run
from alula.train.trainer import Trainer

config, fails_at = pickle.loads(Path(sys.argv[1]).read_bytes())
step = Trainer.train_step

def failing(self):
    if self.progress.step + 1 == fails_at:
        raise RuntimeError("a fault of this process")
    return step(self)

Trainer.train_step = failing
sys.exit(guarded(lambda: run(config) or 0))
"""


def write_data(path: Path, count: int = 40) -> Path:
    lines = [
        {"prompt_ids": c.tokens[: c.learned[0]], "answer_ids": c.tokens[c.learned[0] :]} for c in conversations(count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def tiny_run(folder: Path, model: Path, **changes: Any) -> TrainConfig:
    """A dozen steps, nothing served. Two runs start alike with ``start_from``, the head of `tiny_start`."""
    folder.mkdir(parents=True, exist_ok=True)
    config = TrainConfig(
        output=folder / "run",
        model=str(model),
        data=(write_data(folder / "data.jsonl"),),
        method=Eagle3Options(steps=3, draft_vocab_size=24, intermediate_size=32),
        held_out_one_in=5,
        dtype="float32",
        threads=1,  # as in the process of its own, or last bits differ
        evaluate_minutes=60.0,
        served=Served(held_out=0, prompts=0, tokens=12, nodes=6, depth=3, branch=2, kv_cache_mib=8),
        recipe=Recipe(total_tokens=450, tokens_per_batch=40, warmup_tokens=40, matrix_rate=0.02),
    )
    return replace(config, **changes)


def tiny_start(folder: Path, model: Path) -> Path:
    """A head to start from."""
    config = tiny_run(folder, model, recipe=Recipe(total_tokens=1, matrix_rate=0.0, other_rate=0.0))
    run(config)
    return config.output / "head"


def start(config: TrainConfig, *, rank: int = 0, ranks: int = 1, port: int = 0, fails_at: int = 0) -> Any:
    """The run in a process of its own; with several ranks, as torchrun would start it."""
    file = config.output.parent / f"config{rank}.pickle"
    file.write_bytes(pickle.dumps((config, fails_at)))
    where = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    root = Path(__file__).parents[2]
    environment = {**os.environ, **(where if ranks > 1 else {}), "OMP_NUM_THREADS": "1", "LOCAL_RANK": str(rank)}
    command = [sys.executable, "-c", _CHILD, str(file)]
    return subprocess.Popen(command, env=environment, cwd=root, stderr=subprocess.PIPE, text=True)


def learned(config: TrainConfig) -> list[dict[str, Any]]:
    """What each step of a run found, timings left out."""
    wanted = ("step", "tokens", "loss_0", "loss_1", "loss_2", "gradient_norm", "lr_share")
    entries = read_log(config.output / "log.jsonl")
    return [{name: entry[name] for name in wanted} for entry in entries if "loss_0" in entry]
