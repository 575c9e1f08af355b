"""Training elsewhere than on the CPU: on a made-up device, by checkpoints that travel, and where there is none."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from alula.config import AlulaError
from alula.train.checkpoint import load_state
from alula.train.config import Served
from alula.train.distributed import local_device
from alula.train.logs import read_log
from alula.train.methods.options import Eagle1Options, Eagle3Options, LMOptions, MedusaOptions, MethodOptions
from alula.train.run import run
from tests.engine.tiny import save_tiny_llama
from tests.train.tiny_run import tiny_run

METHODS: tuple[MethodOptions, ...] = (
    Eagle3Options(steps=2, draft_vocab_size=24, intermediate_size=32, candidates=12, chain_fraction=0.5),
    Eagle1Options(intermediate_size=32),
    MedusaOptions(heads=2),
    LMOptions(hidden_size=32, heads=4, intermediate_size=48, layers=1),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny") / "model", layers=3)


def far_runs(folder: Path, model: Path, methods: tuple[MethodOptions, ...], served: int) -> list[Path]:
    """Train on the far device, in one process; the folders of the runs."""
    configs = []
    for method in methods:
        config = tiny_run(folder / method.name, model, device="far", method=method, features="stored")
        recipe = replace(config.recipe, total_tokens=30, tokens_per_batch=20)
        evaluation = Served(held_out=served, prompts=0, tokens=4, nodes=4, depth=2, branch=2, kv_cache_mib=1)
        configs.append(replace(config, recipe=recipe, served=evaluation))
        (folder / f"{method.name}.pickle").write_bytes(pickle.dumps(configs[-1]))
    files = [str(folder / f"{method.name}.pickle") for method in methods]
    command = [sys.executable, "-m", "tests.train.far_device", *files]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [config.output for config in configs]


@pytest.mark.slow
def test_every_method_trains_on_another_device(tmp_path: Path, model: Path) -> None:
    for output in far_runs(tmp_path, model, METHODS[1:], served=0):
        assert sum("gradient_norm" in entry for entry in read_log(output / "log.jsonl")) >= 2
        assert (output / "head" / "config.json").is_file()


@pytest.mark.slow
def test_a_run_on_another_device_is_served_there_and_goes_on_here(tmp_path: Path, model: Path) -> None:
    (output,) = far_runs(tmp_path, model, METHODS[:1], served=1)
    served = [entry["evaluation"]["served"] for entry in read_log(output / "log.jsonl") if "evaluation" in entry]
    assert served and all(figures["tau"] == figures["estimate"]["tau"] for figures in served)
    state = load_state(output / "checkpoint.pt")
    assert state is not None and {tensor.device.type for tensor in state["head"].values()} == {"cpu"}
    config: object = pickle.loads((tmp_path / "eagle3.pickle").read_bytes())
    here = replace(config, device="cpu", change=("recipe.total_tokens",))  # type: ignore[type-var]
    before = state["progress"]["step"]
    run(replace(here, recipe=replace(here.recipe, total_tokens=60)))  # type: ignore[attr-defined]
    steps = [entry["step"] for entry in read_log(output / "log.jsonl") if "gradient_norm" in entry]
    assert steps == list(range(1, steps[-1] + 1)) and steps[-1] > before


def test_a_device_that_is_not_there_is_refused_before_anything(tmp_path: Path, model: Path) -> None:
    config = tiny_run(tmp_path, model, device="nonsense")
    with pytest.raises(AlulaError, match="device is 'nonsense', which torch cannot use here"):
        run(config)
    if not torch.cuda.is_available():
        with pytest.raises(AlulaError, match=r"device is 'cuda', which torch cannot use here.*give cpu"):
            run(replace(config, device="cuda"))
    assert not config.output.exists()


def test_each_process_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (local_device("cuda:1"), local_device("cuda"), local_device("cpu")) == ("cuda:1", "cuda", "cpu")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert (local_device("cpu"), local_device("cuda")) == ("cpu", "cuda:1")
    with pytest.raises(AlulaError, match="device is 'cuda:0' for 2 processes: give cuda"):
        local_device("cuda:0")
