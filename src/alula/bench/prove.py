"""Whether speculation leaves the text as it is: token ids of every configuration against plain decoding's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

from alula.bench.settings import Cell, Setting
from alula.engine.engine import Engine
from alula.engine.request import Request, RequestOutput
from alula.sequence import SamplingParams

Prompt = tuple[int, ...]
MakeEngine = Callable[[Setting], Engine]
PLAIN = "none"


@dataclass(frozen=True)
class Difference:
    """The first position of an output where the tokens differ; None where one had ended already."""

    prompt: int
    position: int
    plain: int | None
    speculative: int | None


@dataclass
class Trial:
    """Outputs of one configuration, in the order of the prompts, and what made them. kind: the drafter's own name."""

    kind: str = ""
    tokens: list[list[int]] = field(default_factory=list)
    finish: list[str | None] = field(default_factory=list)
    tau: float = 0.0
    multi_token_commits: int = 0
    preemptions: int = 0
    prefix_hit_tokens: int = 0


@dataclass(frozen=True)
class CellReport:
    """How one configuration compares with plain decoding. Its counts show that it had something to prove."""

    cell: Cell
    kind: str
    identical: int
    tau: float
    multi_token_commits: int
    preemptions: int
    prefix_hit_tokens: int
    differences: tuple[Difference, ...]

    @property
    def holds(self) -> bool:
        return self.identical == self.cell.prompts

    def report(self) -> dict[str, object]:
        return {
            "factor": self.cell.factor,
            **self.cell.setting.report(),
            "drafter_kind": self.kind,
            "prompts": self.cell.prompts,
            "identical": self.identical,
            "tau": round(self.tau, 4),
            "multi_token_commits": self.multi_token_commits,
            "preemptions": self.preemptions,
            "prefix_hit_tokens": self.prefix_hit_tokens,
            "differences": [asdict(difference) for difference in self.differences],
        }


def plain_setting(base: Setting) -> Setting:
    """What everything is compared with: no drafter, one sequence at a time, nothing reused."""
    return Setting(PLAIN, base.shape, batch=1)


def run_trial(
    engine: Engine, setting: Setting, prompts: Sequence[Prompt], params: SamplingParams, tick: Callable[[], None]
) -> Trial:
    """All prompts through one engine; with `setting.warm` twice, the second time counted."""
    hits = 0
    if setting.warm:
        _drive(engine, setting, prompts, params, Trial(), lambda: None)
        hits = sum(engine.cache.peek(prompt) for prompt in prompts)
    trial = Trial(engine.drafter.name, prefix_hit_tokens=hits)
    before, forwards, committed = engine.scheduler.preemptions, engine.totals.target_forwards, engine.totals.committed
    _drive(engine, setting, prompts, params, trial, tick)
    trial.preemptions = engine.scheduler.preemptions - before
    trial.tau = (engine.totals.committed - committed) / max(engine.totals.target_forwards - forwards, 1)
    return trial


def _drive(
    engine: Engine,
    setting: Setting,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    trial: Trial,
    tick: Callable[[], None],
) -> None:
    ids = [engine.add(Request(prompt, params)) for prompt in prompts]
    outputs: dict[int, RequestOutput] = {}
    marks: dict[int, int] = {}
    while len(outputs) < len(ids):
        events = engine.step()
        trial.multi_token_commits += sum(len(event.tokens) > 1 for event in events)
        for event in events:
            if event.finish_reason is not None:
                outputs[event.sequence_id] = engine.pop(event.sequence_id)
                tick()
        if setting.preempt_every:
            _preempt(engine, setting.preempt_every, marks)
    trial.tokens = [outputs[i].outputs[0].token_ids for i in ids]
    trial.finish = [outputs[i].outputs[0].finish_reason for i in ids]


def _preempt(engine: Engine, every: int, marks: dict[int, int]) -> None:
    """Take the cache from each sequence that wrote `every` tokens since it last lost it, so that all advance."""
    for sequence in list(engine.scheduler.running):
        if len(sequence.output) - marks.get(sequence.id, 0) >= every:
            marks[sequence.id] = len(sequence.output)
            engine.scheduler.preempt(sequence)


def first_difference(prompt: int, plain: Sequence[int], speculative: Sequence[int]) -> Difference | None:
    """Where two outputs part, or None."""
    shorter = min(len(plain), len(speculative))
    place = next((i for i in range(shorter) if plain[i] != speculative[i]), shorter)
    if place == max(len(plain), len(speculative)):
        return None
    return Difference(
        prompt,
        place,
        plain[place] if place < len(plain) else None,
        speculative[place] if place < len(speculative) else None,
    )


def compare(cell: Cell, plain: Trial, trial: Trial) -> CellReport:
    """Token ids, and how each output ended, of a cell's prompts against plain decoding's."""
    found = [first_difference(i, plain.tokens[i], tokens) for i, tokens in enumerate(trial.tokens)]
    same = [difference is None and plain.finish[i] == trial.finish[i] for i, difference in enumerate(found)]
    return CellReport(
        cell,
        kind=trial.kind,
        identical=sum(same),
        tau=trial.tau,
        multi_token_commits=trial.multi_token_commits,
        preemptions=trial.preemptions,
        prefix_hit_tokens=trial.prefix_hit_tokens,
        differences=tuple(difference for difference in found if difference is not None),
    )


def prove(
    make_engine: MakeEngine,
    chosen: Sequence[Cell],
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    announce: Callable[[str], None] = lambda text: None,
    tick: Callable[[], None] = lambda: None,
) -> tuple[Trial, list[CellReport]]:
    """Plain decoding once, then every cell, each in an engine of its own. Returns the plain outputs too."""
    base = chosen[0].setting
    announce("plain")
    plain = run_trial(make_engine(plain_setting(base)), plain_setting(base), prompts, params, tick)
    reports = []
    for cell in chosen:
        announce(f"{cell.factor}: {cell.setting.drafter}")
        trial = run_trial(make_engine(cell.setting), cell.setting, prompts[: cell.prompts], params, tick)
        reports.append(compare(cell, plain, trial))
    return plain, reports
