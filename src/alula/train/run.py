"""`alula train`: from a model's name to a head that serves."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from alula.config import AlulaError
from alula.draft.load import target_provenance
from alula.engine.config import EngineConfig
from alula.engine.llm import LLM
from alula.model.load import LoadedModel, load_model, set_threads
from alula.sequence import SamplingParams
from alula.train.checkpoint import load_state, save_state
from alula.train.config import TrainConfig
from alula.train.data import Conversation, read_conversations, split_held_out
from alula.train.features import FeatureStore
from alula.train.methods.method import Setting
from alula.train.methods.select import maker
from alula.train.synth import SynthConfig, write_conversations
from alula.train.target import DecoderTarget
from alula.train.trainer import Trainer, append_log, figures_entry


def run(config: TrainConfig) -> None:
    """Train, export to ``output/head`` and return. Raises AlulaError for what the user can mend."""
    set_threads(config.threads)
    config.output.mkdir(parents=True, exist_ok=True)
    files = config.data or (_write_data(config),)
    model = load_model(config.model, dtype=config.dtype)
    train, held = split_held_out(read_conversations(files, max_tokens=config.max_tokens), one_in=config.held_out_one_in)
    if not train:
        raise AlulaError("data holds no conversation with an answer; give more of it")
    trainer = _trainer(config, model, files, train)
    provenance = _provenance(config, model, files, trainer, held)
    _loop(config, trainer, held[: config.evaluated], provenance)


def _write_data(config: TrainConfig) -> Path:
    path = config.output / "data.jsonl"
    synth = SynthConfig(config.answer_tokens, seed=config.seed)
    # Wide batches: nothing waits for these texts, and a row of many shares each load of the weights.
    engine = EngineConfig(max_num_seqs=synth.batch, max_num_batched_tokens=4 * synth.batch, kv_cache_mib=1536)
    llm = LLM(config.model, drafter="none", dtype=config.dtype, config=engine)

    def generate(prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[list[int]]:
        return [output.outputs[0].token_ids for output in llm.generate(list(prompts), list(params))]

    write_conversations(path, llm.tokenizer, generate, synth)
    return path


def _trainer(config: TrainConfig, model: LoadedModel, files: Sequence[Path], train: Sequence[Conversation]) -> Trainer:
    made = maker(config.method)
    taps = made.taps(model.config.num_layers)
    store = FeatureStore(DecoderTarget(model), taps=taps, dtype=model.dtype)
    setting = Setting(model, store, train, config.seed)
    state = load_state(config.output / "checkpoint.pt")
    if state is not None:
        method = made.resumed(setting, state)
    elif config.start_from is not None:
        method = made.continued(setting, config.start_from)
    else:
        method = made.fresh(setting)

    def read_data() -> Sequence[Conversation]:
        found = read_conversations(files, max_tokens=config.max_tokens)
        return split_held_out(found, one_in=config.held_out_one_in)[0]

    trainer = Trainer(method, store, config.recipe, read_data, seed=config.seed)
    if state is not None:
        trainer.restore(state)
    return trainer


def _loop(config: TrainConfig, trainer: Trainer, held: Sequence[Conversation], provenance: Mapping[str, Any]) -> None:
    from rich.progress import Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (*Progress.get_default_columns()[:2], TextColumn("{task.fields[figures]}"), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn()) as bar:
        task = bar.add_task("training", total=trainer.recipe.total_tokens, figures="")
        saved = time.monotonic()
        while not trainer.finished:
            entry = trainer.train_step()
            append_log(config.output / "log.jsonl", {"step": trainer.progress.step, **entry})
            shown = f"loss {entry['loss_0']:.2f}, {entry['tokens_per_second']:.0f} tokens/s"
            bar.update(task, completed=trainer.progress.tokens, figures=shown)
            if time.monotonic() - saved > 60 * config.save_minutes:
                _save(config, trainer, held, provenance)
                saved = time.monotonic()
    _save(config, trainer, held, provenance)


def _save(config: TrainConfig, trainer: Trainer, held: Sequence[Conversation], provenance: Mapping[str, Any]) -> None:
    """Checkpoint, evaluate, log, export."""
    save_state(config.output / "checkpoint.pt", trainer.state())
    reached = {"step": trainer.progress.step, "tokens": trainer.progress.tokens}
    figures = figures_entry(trainer.evaluate(held, steps=trainer.method.steps)) if held else {}
    append_log(config.output / "log.jsonl", {**reached, "evaluation": figures})
    trained = {**provenance, "training": {**reached, "evaluation": figures}}
    trainer.method.export(config.output / "head", trained)


def _provenance(
    config: TrainConfig,
    model: LoadedModel,
    files: Sequence[Path],
    trainer: Trainer,
    held: Sequence[Conversation],
) -> dict[str, Any]:
    from importlib.metadata import PackageNotFoundError, version

    from alula.model.weights import hash_file

    try:
        alula = version("alula")
    except PackageNotFoundError:
        alula = "source"
    return {
        "target": target_provenance(model),
        "data": {file.name: hash_file(file) for file in files},
        **trainer.method.facts(held),
        "method": {"name": config.method.name, **asdict(config.method)},
        "recipe": asdict(config.recipe),
        "versions": {"alula": alula, "torch": torch.__version__, "python": sys.version.split()[0]},
        "argv": sys.argv[1:],
    }
