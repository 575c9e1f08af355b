"""`alula train`: from a model's name to a drafter that serves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from alula.bench.tasks import read_prompts
from alula.config import AlulaError
from alula.draft.drafter import NoDrafter
from alula.engine.config import EngineConfig
from alula.engine.engine import Engine
from alula.model.load import LoadedModel, load_model, resolve_device, set_threads
from alula.train.checkpoint import CHECKPOINT, load_state
from alula.train.config import TrainConfig
from alula.train.data import Conversation, read_conversations, split_held_out
from alula.train.distributed import Processes, joined, local_device
from alula.train.features import FeatureStore
from alula.train.generate import engine_generate
from alula.train.interrupt import Interruption
from alula.train.loop import Keeper, Loop
from alula.train.meter import Meter
from alula.train.methods.method import Maker, Method, Setting
from alula.train.methods.select import maker
from alula.train.provenance import provenance_of
from alula.train.report import Report
from alula.train.resume import DATA, check_names, check_resumable, data_record, settings_of
from alula.train.served import ServedEvaluation
from alula.train.sharding import ShardedGroup, sharded_losses
from alula.train.shards import ShardStore
from alula.train.synth import SynthConfig, write_conversations
from alula.train.target import DecoderTarget
from alula.train.throughput import measure
from alula.train.trainer import Trainer
from alula.train.watch import Watch

Watching = Callable[[], AbstractContextManager[Watch]]
"""Who is told how the writing of data goes, if it has to be written."""


def run(config: TrainConfig, watching: Watching = lambda: nullcontext(Watch())) -> None:
    """Train, keep the best in ``output/head`` and return.

    Raises AlulaError for what the user can mend, and Stopped after a signal, with everything saved.
    """
    set_threads(config.threads)
    device = resolve_device(local_device(config.device))
    _check_files(config)
    config.output.mkdir(parents=True, exist_ok=True)
    with joined(device) as processes, Report(processes.rank == 0) as report:
        _check_processes(config, processes.count)
        model = load_model(config.model, dtype=config.dtype, device=device)
        settings = settings_of(config, model.weights_hash)
        check_names(config.change, settings)
        files = config.data or (processes.agree(lambda: _write_data(config, model, watching, report.say)),)
        state = load_state(config.output / CHECKPOINT)
        if state is not None:
            check_resumable(config.output / CHECKPOINT, state, settings, files, config.change)
        _Assembly(config, model, files, processes, report).train(state, settings)


def _check_files(config: TrainConfig) -> None:
    """Before anything is loaded."""
    _synth_config(config).check()
    for path in config.data:
        if not path.is_file():
            raise AlulaError(f"data file {path} does not exist: check the path")
    for name in config.served.sets if config.served.prompts else ():
        read_prompts(name, config.served.prompts)
    if config.start_from is not None and not config.start_from.is_dir():
        raise AlulaError(f"start_from: {config.start_from} is no folder: give that of a head")
    if config.tensorboard and find_spec("tensorboard") is None:
        raise AlulaError("tensorboard is not installed: pip install alula[train], or leave it out")


def _check_processes(config: TrainConfig, count: int) -> None:
    if config.fsdp and count < 2:
        raise AlulaError("fsdp is on and there is one process: start several with torchrun, or leave it out")
    if config.recipe.accumulate % count:
        raise AlulaError(
            f"recipe.accumulate is {config.recipe.accumulate}: give a multiple of the number of processes, {count}"
        )


def _synth_config(config: TrainConfig) -> SynthConfig:
    return SynthConfig(**vars(config.synth), answer_tokens=config.answer_tokens, seed=config.seed)


def _write_data(config: TrainConfig, model: LoadedModel, watching: Watching, say: Callable[[str], None]) -> Path:
    path, synth = config.output / "data.jsonl", _synth_config(config)
    # Wide batches: nothing waits for these texts, and a row of many shares each load of the weights.
    wide = EngineConfig(max_num_seqs=synth.batch, max_num_batched_tokens=4 * synth.batch, kv_cache_mib=1536)
    with watching() as watch:
        generate = engine_generate(Engine(model, NoDrafter(), wide), watch.tokens)
        say(write_conversations(path, model.tokenizer, generate, synth, watch).report(path))
    return path


class _Assembly:
    """The parts of one run, put together."""

    def __init__(
        self, config: TrainConfig, model: LoadedModel, files: Sequence[Path], processes: Processes, report: Report
    ) -> None:
        self._config, self._model, self._files = config, model, files
        self._processes, self._report = processes, report

    def train(self, state: dict[str, Any] | None, settings: dict[str, Any]) -> None:
        train, held = self._read(self._report.say)
        if not train:
            raise AlulaError("data holds no conversation with an answer to train on: give more of it")
        self._report.data(train, held)
        store = self._store()
        self._prepare(store, train)
        setting = Setting(self._model, store, train, self._config.seed)
        method = self._method(setting, state)
        trainer = self._trainer(setting, method, state)
        facts = {**method.facts(held), "trainable_parameters": trainer.trainable}
        self._report.opening(trainer, facts)
        meter = Meter(self._model.device, trainer.progress.tokens)
        keeper = self._keeper(trainer, method, held, settings, facts, meter) if self._processes.rank == 0 else None
        throughput = measure(method, setting.store, train, self._config.recipe, self._model.config)
        self._report.say(throughput.sentence())
        with Interruption(speaks=self._processes.rank == 0) as interruption:
            Loop(self._config, trainer, keeper, throughput, self._report, meter, interruption).run()

    def _keeper(
        self,
        trainer: Trainer,
        method: Method,
        held: list[Conversation],
        settings: dict[str, Any],
        facts: Mapping[str, Any],
        meter: Meter,
    ) -> Keeper:
        config = self._config
        evaluation = ServedEvaluation(self._model, held, config.served)
        record = {"settings": settings, DATA: data_record(self._files)}
        known = provenance_of(config, self._model, self._files, facts)
        return Keeper(config, trainer, method, evaluation, held[: config.evaluated], record, known, self._report, meter)

    def _read(self, tell: Callable[[str], None]) -> tuple[list[Conversation], list[Conversation]]:
        """(training, held out)"""
        limit = min(self._config.max_tokens, self._model.decoder.max_positions)
        found = read_conversations(self._files, max_tokens=limit, tokenizer=self._model.tokenizer, tell=tell)
        return split_held_out(found, one_in=self._config.held_out_one_in)

    def _store(self) -> FeatureStore:
        target, model = DecoderTarget(self._model), self._model
        taps = maker(self._config.method).taps(model.config.num_layers)
        if self._config.features == "on-the-fly":
            return FeatureStore(target, taps=taps, dtype=model.dtype)
        return ShardStore(
            target,
            taps=taps,
            dtype=model.dtype,
            folder=self._config.output / "features",
            identity=model.feature_identity,
            part=(self._processes.rank, self._processes.count),
        )

    def _method(self, setting: Setting, state: dict[str, Any] | None) -> Method:
        """As saved, or with start values."""
        making, start = maker(self._config.method), self._config.start_from
        if state is not None:
            return _rebuilt(making, setting, state)
        made: list[Method] = []

        def begin() -> dict[str, Any]:
            self._report.say("making start values from the first conversations")
            made.append(making.fresh(setting) if start is None else making.continued(setting, start))
            return _saved(made[0])

        begun = self._processes.agree(begin)  # the same bits for all: a fit may differ in its last ones
        return made[0] if made else _rebuilt(making, setting, begun)

    def _trainer(self, setting: Setting, method: Method, state: dict[str, Any] | None) -> Trainer:
        config, processes, store, losses = self._config, self._processes, setting.store, None
        if config.fsdp:  # `method` stays whole, for all that is not training
            method = _rebuilt(maker(config.method), setting, _saved(method))
            processes, losses = ShardedGroup(), sharded_losses(method, processes.count)

        def read_data() -> Sequence[Conversation]:
            found = self._read(lambda sentence: None)[0]
            store.prepare(found, self._report.say)
            return found

        trainer = Trainer(method, store, config.recipe, read_data, seed=config.seed, processes=processes, losses=losses)
        if state is not None:
            trainer.restore(state)
            if DATA in config.change:
                trainer.start_epoch()
        return trainer

    def _prepare(self, store: FeatureStore, conversations: Sequence[Conversation]) -> None:
        store.prepare(conversations, self._report.say)
        if self._processes.count > 1:
            self._processes.meet()
            store.prepare(conversations, self._report.say)  # takes note of what the others have stored


def _saved(method: Method) -> dict[str, Any]:
    return {**method.saved(), "head": method.module.state_dict()}


def _rebuilt(making: Maker, setting: Setting, saved: Mapping[str, Any]) -> Method:
    method = making.resumed(setting, saved)
    method.module.load_state_dict(saved["head"])
    return method
