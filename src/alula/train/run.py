"""`alula train`: from a model's name to a head that serves."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from alula.config import AlulaError
from alula.draft.head_config import default_taps
from alula.draft.load import target_provenance
from alula.engine.config import EngineConfig
from alula.engine.llm import LLM
from alula.model.load import LoadedModel, load_model, set_threads
from alula.sequence import SamplingParams
from alula.train.batch import make_batch
from alula.train.checkpoint import export_head, load_state, read_start, save_state
from alula.train.data import Conversation, read_conversations, split_held_out
from alula.train.features import FeatureStore
from alula.train.head import Eagle3Head, HeadConfig
from alula.train.initial import new_head, tap_sizes
from alula.train.synth import SynthConfig, write_conversations
from alula.train.target import DecoderTarget
from alula.train.trainer import Recipe, Trainer, append_log, figures_entry
from alula.train.vocabulary import DraftVocabulary, choose_vocabulary, expected_counts

_SAMPLES = 200
"""Conversations that the start values are fitted on."""


@dataclass(frozen=True)
class TrainConfig:
    """A training run. The same command, given again, goes on where it was interrupted."""

    output: Path
    """Folder of the run: data.jsonl, features/, checkpoint.pt, log.jsonl and head/ (the result)."""
    model: str = "smollm2"
    """The target: a built-in name, a Hugging Face folder or hub id, or a GGUF file."""
    data: tuple[Path, ...] = ()
    """JSON-lines files of conversations; none lets the target write its own."""
    start_from: Path | None = None
    """Folder of a head of the same sizes to go on from, with its own draft vocabulary; none starts from a fit."""
    answer_tokens: int = 300_000
    """How many answer tokens the target writes when no data is given."""
    draft_vocab_size: int = 12_288
    """Tokens the head can propose."""
    intermediate_size: int | None = None
    """Width of the head's MLP; the target's by default."""
    rope_theta: float = 10_000.0
    """Base of the head's rotary embedding, written to its config.json."""
    max_tokens: int = 1024
    """Longer conversations are cut here."""
    held_out_one_in: int = 24
    """One conversation in so many is kept for evaluation."""
    evaluated: int = 24
    """Held-out conversations looked at in each evaluation, at most."""
    save_minutes: float = 5.0
    """Between checkpoints, each with an evaluation and an exported head."""
    dtype: str = "bfloat16"
    """Numeric format in which the target runs and features are kept."""
    threads: int | None = None
    """torch's thread count."""
    seed: int = 0
    """Start values, data order and data."""
    recipe: Recipe = field(default_factory=Recipe)
    """Loss and optimiser."""


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
    provenance = _provenance(config, model, files, trainer.vocabulary, held)
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
    target, taps = DecoderTarget(model), default_taps(model.config.num_layers)
    store = FeatureStore(target, taps=taps, dtype=model.dtype, directory=config.output / "features")
    state = load_state(config.output / "checkpoint.pt")
    sizes = _head_config(config, model, taps)
    if state is None:
        head, vocabulary = _start(config, sizes, store, train)
    else:
        vocabulary = DraftVocabulary(state["target_ids"], model.config.vocab_size)
        head = Eagle3Head(replace(sizes, draft_vocab_size=vocabulary.size), target.embedding_VD)

    def read_data() -> Sequence[Conversation]:
        found = read_conversations(files, max_tokens=config.max_tokens)
        return split_held_out(found, one_in=config.held_out_one_in)[0]

    trainer = Trainer(head, vocabulary, store, config.recipe, read_data, seed=config.seed)
    if state is not None:
        trainer.restore(state)
    return trainer


def _start(
    config: TrainConfig, sizes: HeadConfig, store: FeatureStore, train: Sequence[Conversation]
) -> tuple[Eagle3Head, DraftVocabulary]:
    """The head before the first step: an exported one, or a fit to the first conversations."""
    target, fitted_on = store.target, train[:_SAMPLES]
    samples = [make_batch([c], store.get([c])) for c in fitted_on]
    if config.start_from is not None:
        weights, vocabulary = read_start(config.start_from, sizes, tap_sizes(samples))
        head = Eagle3Head(replace(sizes, draft_vocab_size=vocabulary.size), target.embedding_VD.float())
        head.load_state_dict(weights)
        return head, vocabulary
    expected_V = expected_counts((store.get([c])[0].hidden_MD for c in fitted_on), target.lm_head_VD)
    vocabulary = choose_vocabulary(
        train, size=config.draft_vocab_size, vocab_size=sizes.vocab_size, expected_V=expected_V
    )
    return new_head(sizes, target, vocabulary, samples, seed=config.seed), vocabulary


def _head_config(config: TrainConfig, model: LoadedModel, taps: tuple[int, ...]) -> HeadConfig:
    sizes = model.config
    return HeadConfig(
        hidden_size=sizes.hidden_size,
        intermediate_size=config.intermediate_size or sizes.intermediate_size,
        heads=sizes.num_heads,
        kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        vocab_size=sizes.vocab_size,
        draft_vocab_size=config.draft_vocab_size,
        taps=taps,
        rope_theta=config.rope_theta,
        rms_norm_eps=sizes.norm_eps,
    )


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
    figures = figures_entry(trainer.evaluate(held, steps=trainer.recipe.steps)) if held else {}
    append_log(config.output / "log.jsonl", {**reached, "evaluation": figures})
    trained = {**provenance, "training": {**reached, "evaluation": figures}}
    export_head(config.output / "head", trainer.head, trainer.vocabulary, trained)


def _provenance(
    config: TrainConfig,
    model: LoadedModel,
    files: Sequence[Path],
    vocabulary: DraftVocabulary,
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
        "draft_vocabulary": {"size": vocabulary.size, "held_out_coverage": round(vocabulary.coverage(held), 4)},
        "recipe": asdict(config.recipe),
        "versions": {"alula": alula, "torch": torch.__version__, "python": sys.version.split()[0]},
        "argv": sys.argv[1:],
    }
