"""Everything that moves a request, in all combinations: the tokens are those of plain decoding."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from alula.draft.drafter import Drafter
from alula.draft.load import load_drafter
from alula.draft.static import StaticTree
from alula.engine.engine import Engine
from alula.engine.request import Request, RequestOutput
from alula.model.load import LoadedModel, load_model
from alula.sequence import SamplingParams
from alula.structured import StructuredOutputsParams
from alula.tree import TreeShape
from tests.engine.tiny import EOS, engine_for, prompt_of, run, save_tiny_llama

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 6}, "b": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
LENGTH, SHARED, OWN, PAGE, CHUNK, EVERY = 24, 18, 14, 8, 12, 7
FLAGS = ("hit", "chunks", "preempted", "schema", "penalties")


@dataclass(frozen=True)
class Layout:
    """static: the tree is always this one; None grows it from scores."""

    shape: TreeShape
    static: StaticTree | None = None


LAYOUTS = {
    "chain": Layout(TreeShape(4, 3, 1)),
    "wide": Layout(TreeShape(7, 2, 3)),
    "static": Layout(TreeShape(6, 3, 2), StaticTree(((0,), (1,), (0, 0), (1, 0), (0, 0, 0)))),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("combinations"), layers=2)


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load_model(str(folder), dtype="float32")


@pytest.fixture(scope="module")
def drafters(folder: Path, model: LoadedModel) -> dict[str, Drafter]:
    """The target as its own drafter, which is often right, with keys and values of its own to keep in order."""
    return {name: load_drafter(str(folder), model, tree=layout.static) for name, layout in LAYOUTS.items()}


@pytest.fixture(scope="module")
def plain(model: LoadedModel) -> dict[tuple[bool, bool], list[list[int]]]:
    """Token ids by (schema, penalties), each request alone and with nothing reused."""
    found = {}
    for schema, penalties in itertools.product((False, True), repeat=2):
        engine = engine_for(model, enable_prefix_caching=False, page_size=PAGE)
        found[schema, penalties] = [ids(run(engine, [request]))[0] for request in requests(schema, penalties)]
    assert len({str(each) for each in found.values()}) == 4, "schema and penalties change the text"
    return found


def requests(schema: bool, penalties: bool) -> list[Request]:
    """One greedy, one sampled; their prompts begin alike, with whole pages and a part of one."""
    options: dict[str, Any] = {"max_tokens": LENGTH, "logit_bias": {EOS: -2.0}}
    if schema:
        options["structured_outputs"] = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
    if penalties:
        options |= {"frequency_penalty": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.3}
    return [
        Request(
            tuple(prompt_of(SHARED, seed=1) + prompt_of(OWN, seed=2 + number)),
            SamplingParams(temperature, seed=number, **options),
        )
        for number, temperature in enumerate((0.0, 0.9))
    ]


def ids(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@dataclass
class Moved:
    """An engine at work, and how often each factor really had a part."""

    engine: Engine
    chunks: int = 0
    grammars: int = 0
    preempted: dict[int, int] = field(default_factory=dict)

    def step(self, preempts: bool) -> None:
        """Preempts a sequence for every few tokens it wrote, so that it gets somewhere in between."""
        plan = self.engine.plan()
        self.chunks += sum(item.shape is None for item in plan.items)
        self.grammars += sum(item.sequence.grammar is not None for item in plan.items)
        self.engine.run(plan)
        for sequence in list(self.engine.scheduler.running) if preempts else ():
            if len(sequence.output) // EVERY > self.preempted.get(sequence.id, 0):
                self.preempted[sequence.id] = len(sequence.output) // EVERY
                self.engine.scheduler.preempt(sequence)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_combinations_equal_plain_decoding(
    model: LoadedModel, drafters: dict[str, Drafter], plain: dict[tuple[bool, bool], list[list[int]]], layout: str
) -> None:
    accepted = 0
    for values in itertools.product((False, True), repeat=len(FLAGS)):
        on = dict(zip(FLAGS, values, strict=True))
        engine = engine_for(
            model,
            drafters[layout],
            shape=LAYOUTS[layout].shape,
            page_size=PAGE,
            enable_prefix_caching=on["hit"],
            max_num_batched_tokens=CHUNK if on["chunks"] else 128,
            max_num_seqs=4,
        )
        wanted = requests(on["schema"], on["penalties"])
        if on["hit"]:
            run(engine, [Request(wanted[0].prompt_token_ids[:SHARED], SamplingParams(max_tokens=1))])
        moved = Moved(engine)
        keys = [engine.add(request) for request in wanted]
        while engine.has_work:
            moved.step(on["preempted"])
        outputs = [engine.pop(key) for key in keys]
        assert ids(outputs) == plain[on["schema"], on["penalties"]], on
        _check_factors(on, moved, outputs)
        accepted += engine.totals.accepted
        assert engine.totals.checked > engine.totals.accepted or layout == "chain"
    assert accepted > 2 * 2 ** len(FLAGS), "drafts have no part in this"


def _check_factors(on: dict[str, bool], moved: Moved, outputs: Sequence[RequestOutput]) -> None:
    engine = moved.engine
    assert [output.cached_tokens for output in outputs] == [on["hit"] * (SHARED // PAGE) * PAGE] * 2, on
    assert (moved.chunks > 0) == on["chunks"], on
    assert (engine.scheduler.preemptions > 1) == on["preempted"], on
    assert (moved.grammars > 0) == on["schema"], on
    assert engine.cache.free_pages == engine.cache.total_pages
    for output in outputs:
        sample = output.outputs[0]
        if on["schema"] and sample.finish_reason == "stop":
            assert 0 <= json.loads(sample.text)["b"] <= 99
