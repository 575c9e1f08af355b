"""Text of a form: with speculation as without, valid when it is finished, and the state freed when it is over."""

from __future__ import annotations

import gc
import json
import random
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from alula.cache import Transaction
from alula.config import AlulaError
from alula.draft.drafter import Drafter, NoDrafter, grows
from alula.draft.load import load_drafter
from alula.draft.ngram import NgramDrafter
from alula.draft.static import StaticTree, default_static_tree
from alula.engine.config import EngineConfig
from alula.engine.engine import Engine
from alula.engine.llm import LLM
from alula.engine.request import Request, RequestOutput
from alula.grammar import GrammarState
from alula.model.load import LoadedModel
from alula.sequence import PlanItem, SamplingParams, StepPlan
from alula.structured import StructuredOutputsParams
from alula.tree import DraftTree, TreeShape
from tests.draft.heads import save_random_head
from tests.engine.guesses import Guesser, Recorder, spoiled_by_turns
from tests.engine.tiny import EOS, VOCAB, engine_for, prompt_of, run, save_tiny_llama
from tests.grammar.support import PERSON, allowed, json_like, replayed

FORMS = (
    json_like(PERSON, disable_any_whitespace=True),
    StructuredOutputsParams(regex="((ab|cd)e?){2,8}(日|é)"),
    StructuredOutputsParams(choice=("yes", "yes, but", "no", "日本")),
    StructuredOutputsParams(grammar='root ::= "(" root ")" root | "x" root | "y"'),
    StructuredOutputsParams(json_object=True),
    StructuredOutputsParams(choice=("one", "two"), free_until="e"),
    None,
)


def requests(temperature: float, *, length: int = 40, **params: Any) -> list[Request]:
    return [
        Request(
            tuple(prompt_of(7 + number, seed=number % 2)),
            SamplingParams(temperature, max_tokens=length, seed=number, structured_outputs=form, **params),
        )
        for number, form in enumerate(FORMS)
    ]


def ids(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [sample.token_ids for output in outputs for sample in output.outputs]


class RandomTrees:
    """Random guesses in trees of random shape, half of them told what is allowed, with ends among them."""

    name, kv_shapes, kv_first, taps = "random", (), 1, ()

    def __init__(self) -> None:
        self._rng = random.Random(0)

    def scratch(self, shape: TreeShape) -> int:
        return 0

    def draft(self, plan: StepPlan, txn: Transaction) -> list[DraftTree | None]:
        trees = NoDrafter().draft(plan, txn)
        return [self._tree(item) if grows(item) else tree for item, tree in zip(plan.items, trees, strict=True)]

    def _tree(self, item: PlanItem) -> DraftTree:
        assert item.shape is not None
        tokens, parents, paths = [item.sequence.tokens[-1]], [-1], {0: ()}
        for node in range(1, item.shape.nodes):
            parent = self._rng.choice([n for n in range(node) if len(paths.get(n, ())) < item.shape.depth])
            path, grammar = paths.get(parent), item.sequence.grammar
            token = self._rng.choice([EOS, self._rng.randrange(VOCAB)])
            if grammar is not None and path is not None and self._rng.random() < 0.8:
                mask = grammar.mask(path)
                assert mask is not None
                token = self._rng.choice(allowed(mask))
                paths[node] = (*path, token)
            tokens.append(token)
            parents.append(parent)
        return DraftTree(np.array(tokens), np.array(parents), -np.arange(len(tokens), dtype=np.float32))


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory, tiny: LoadedModel) -> Path:
    return save_random_head(tmp_path_factory.mktemp("head"), tiny)


@pytest.fixture(scope="module")
def plain(tiny: LoadedModel) -> dict[float, list[RequestOutput]]:
    return {temperature: run(engine_for(tiny), requests(temperature)) for temperature in (0.0, 1.0)}


def make(kind: str, tiny: LoadedModel, head: Path, plain: list[RequestOutput], **options: Any) -> Drafter:
    makers: dict[str, Callable[[], Drafter]] = {
        "ngram": NgramDrafter,
        "head": lambda: load_drafter(str(head), tiny, **options),
        "random": RandomTrees,
        "right and wrong": lambda: Guesser(plain, spoiled_by_turns, siblings=1),
    }
    return makers[kind]()


@pytest.mark.parametrize("shape", [TreeShape(4, 3, 1), TreeShape(12, 4, 3), TreeShape(9, 1, 8)], ids=str)
@pytest.mark.parametrize("kind", ["ngram", "head", "random", "right and wrong"])
def test_the_same_text_as_plain_decoding(
    tiny: LoadedModel, head: Path, plain: dict[float, list[RequestOutput]], kind: str, shape: TreeShape
) -> None:
    for temperature, expected in plain.items():
        engine = engine_for(tiny, make(kind, tiny, head, expected), shape=shape)
        assert ids(run(engine, requests(temperature))) == ids(expected)
        assert engine.totals.drafted > 0
        assert kind != "right and wrong" or engine.totals.accepted > 0


def test_finished_outputs_have_their_form(plain: dict[float, list[RequestOutput]]) -> None:
    import re

    finished = 0
    for outputs in plain.values():
        for output, form in zip(outputs, FORMS, strict=True):
            sample = output.outputs[0]
            if form is None or sample.finish_reason != "stop":
                continue
            finished += 1
            assert sample.token_ids[-1] == EOS and EOS not in sample.token_ids[:-1]
            text = sample.text if form.free_until is None else sample.text.split(form.free_until, 1)[1]
            if form.kind in ("json", "json_object"):
                Draft202012Validator(PERSON if form.kind == "json" else {"type": "object"}).validate(json.loads(text))
            elif form.kind == "choice":
                assert text in (form.choice or ())
            elif form.kind == "regex":
                assert re.fullmatch(form.source, text)
    assert finished >= 8


@pytest.mark.parametrize(("tree", "sampled"), [(None, False), ("chain", True), ("static", False), ("static", True)])
def test_rule_rejection_keeps_the_form(tiny: LoadedModel, head: Path, tree: str | None, sampled: bool) -> None:
    """Point and drawn proposals; every drafted token is one that its node allows."""
    shape = {None: None, "chain": StaticTree.chain(3), "static": default_static_tree()}[tree]
    drafter = load_drafter(str(head), tiny, rule="rejection", tree=shape, sampled=sampled)
    watched = Watched(drafter)
    engine = engine_for(tiny, watched, rule="rejection", shape=TreeShape(10, 3, 3))
    for temperature in (0.0, 1.0):
        for output, form in zip(run(engine, requests(temperature, length=24)), FORMS, strict=True):
            sample = output.outputs[0]
            assert sample.error is None
            if form is not None and form.free_until is None:
                compiled = engine.grammars.compile(form)
                for length, token in enumerate(sample.token_ids):
                    assert token in replayed(compiled, sample.token_ids[:length])
    assert watched.checked > 100


class Watched(Recorder):
    """Every node that a drafter proposes is allowed on its own path, by an independent replay."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter)
        self.policy = getattr(drafter, "policy", None)
        self.checked = 0

    def draft(self, plan: StepPlan, txn: Transaction) -> list[DraftTree | None]:
        trees = super().draft(plan, txn)
        for item, tree in zip(plan.items, trees, strict=True):
            if tree is not None and item.sequence.params.structured_outputs is not None:
                self._check(item, tree)
        return trees

    def _check(self, item: PlanItem, tree: DraftTree) -> None:
        grammar = item.sequence.grammar
        assert isinstance(grammar, GrammarState)
        compiled = grammar.compiled
        for node in range(1, len(tree)):
            before = [int(tree.tokens_N[n]) for n in tree.path(node)[:-1]]
            assert int(tree.tokens_N[node]) in replayed(compiled, [*item.sequence.output, *before])
            self.checked += 1
        for node, proposal in tree.proposals.items():
            before = [int(tree.tokens_N[n]) for n in tree.path(node)]
            support = np.flatnonzero(proposal.numpy() > 0).tolist()
            assert set(support) <= set(replayed(compiled, [*item.sequence.output, *before]))


@pytest.mark.parametrize("kind", ["ngram", "head"])
def test_drafters_propose_allowed_tokens_only(
    tiny: LoadedModel, head: Path, plain: dict[float, list[RequestOutput]], kind: str
) -> None:
    for temperature, expected in plain.items():
        watched = Watched(make(kind, tiny, head, expected))
        run(engine_for(tiny, watched, shape=TreeShape(12, 4, 3)), requests(temperature))
        assert watched.checked > 20


def test_all_that_moves_a_request_leaves_the_text(tiny: LoadedModel, head: Path) -> None:
    """Small chunks, prefix hits, preemptions, several samples, penalties and aborted neighbours."""
    extras: list[dict[str, Any]] = [{}, {"frequency_penalty": 0.5, "repetition_penalty": 1.2}, {"n": 3}]
    wanted = [request for extra in extras for request in requests(1.0, length=24, **extra)]
    expected = ids(run(engine_for(tiny), wanted))
    drafter = load_drafter(str(head), tiny)
    engine = engine_for(tiny, drafter, kv_cache_mib=1, max_num_batched_tokens=16, shape=TreeShape(6, 3, 2))
    run(engine, wanted[:4])
    keys, rng = [engine.add(request) for request in wanted], random.Random(0)
    victims = [engine.add(request) for request in wanted[: len(FORMS)]]
    while engine.has_work:
        engine.step()
        if engine.scheduler.running and rng.random() < 0.2:
            engine.scheduler.preempt(rng.choice(engine.scheduler.running))
        if victims and rng.random() < 0.3 and not engine.output(victims[-1]).finished:
            engine.abort(victims.pop())
    assert ids([engine.pop(key) for key in keys]) == expected
    assert engine.scheduler.preemptions > 5 and engine.scheduler.prefix_hits > 0


def test_e10_preempted_between_drafts_with_a_schema(tiny: LoadedModel, head: Path) -> None:
    """Preempted after every step: drafts of before say nothing about the state that goes on."""
    request = requests(0.0)[:2]
    expected = ids(run(engine_for(tiny), request))
    engine = engine_for(tiny, load_drafter(str(head), tiny), shape=TreeShape(8, 4, 2))
    keys = [engine.add(one) for one in request]
    for step in range(1000):
        if not engine.has_work:
            break
        engine.step()
        if engine.scheduler.running:
            engine.scheduler.preempt(engine.scheduler.running[step % len(engine.scheduler.running)])
    assert ids([engine.pop(key) for key in keys]) == expected


def test_d2_an_end_that_the_drafter_forces_does_not_end_the_grammar(tiny: LoadedModel) -> None:
    class Ends:
        name, kv_shapes, kv_first, taps = "ends", (), 1, ()

        def scratch(self, shape: TreeShape) -> int:
            return 0

        def draft(self, plan: StepPlan, txn: Transaction) -> list[DraftTree | None]:
            roots = NoDrafter().draft(plan, txn)
            ladder = np.array([EOS, EOS, 65]), np.array([0, 1, 2])
            return [
                DraftTree(
                    np.append(tree.tokens_N, ladder[0]), np.append(-1, ladder[1]), -np.arange(4, dtype=np.float32)
                )
                if tree is not None and grows(item)
                else tree
                for tree, item in zip(roots, plan.items, strict=True)
            ]

    for temperature in (0.0, 1.0):
        expected = ids(run(engine_for(tiny), requests(temperature)))
        assert ids(run(engine_for(tiny, Ends(), shape=TreeShape(4, 3, 1)), requests(temperature))) == expected


def test_f4_a_drafter_that_always_proposes_the_wrong_key_stops_nothing(tiny: LoadedModel) -> None:
    """Keys the model finds unlikely; every guess leaves the grammar at its first or its second token."""
    schema = {
        "type": "object",
        "properties": {"zqxj日": {"enum": [1]}, "wvkk": {"enum": [2]}},
        "required": ["zqxj日", "wvkk"],
    }
    request = Request(
        tuple(prompt_of(9)),
        SamplingParams(max_tokens=60, structured_outputs=json_like(schema, disable_any_whitespace=True)),
    )
    expected = run(engine_for(tiny), [request])
    assert json.loads(expected[0].outputs[0].text) == {"zqxj日": 1, "wvkk": 2}
    for script in (
        lambda truth, item: [t ^ 1 for t in truth],
        lambda truth, item: [*truth[:1], *(t ^ 1 for t in truth[1:])],
    ):
        engine = engine_for(tiny, Guesser(expected, script), shape=TreeShape(5, 4, 1))
        assert ids(run(engine, [request])) == ids(expected)


def test_d11_nothing_after_an_accepted_end_reaches_the_grammar(tiny: LoadedModel) -> None:
    """The drafter knows the output and goes on beyond its end; with `ignore_eos` the ends themselves go on."""
    for ignore in (False, True):
        wanted = requests(0.0, ignore_eos=ignore)[1:4]
        expected = run(engine_for(tiny), wanted)
        beyond = lambda truth, item: [*truth, EOS, 65, EOS]  # noqa: E731
        engine = engine_for(tiny, Guesser(expected, beyond), shape=TreeShape(8, 7, 1))
        assert ids(run(engine, wanted)) == ids(expected)
        for sample in (output.outputs[0] for output in expected):
            first = sample.token_ids.index(EOS)
            assert set(sample.token_ids[first:]) == {EOS} and (ignore or sample.token_ids[-1] == EOS)


def test_a_grammar_that_allows_nothing_fails_its_request_alone(tiny: LoadedModel, head: Path) -> None:
    """From the start, half-way, and by what else the request forbids."""
    impossible = [
        SamplingParams(structured_outputs=StructuredOutputsParams(grammar="root ::= root")),
        SamplingParams(structured_outputs=StructuredOutputsParams(grammar='root ::= "ab" rest\nrest ::= rest "c"')),
        SamplingParams(structured_outputs=FORMS[2], allowed_token_ids=(5,)),
        SamplingParams(structured_outputs=FORMS[2], min_tokens=30),
    ]
    expected = run(engine_for(tiny), requests(0.0))
    for drafter in (None, load_drafter(str(head), tiny)):
        mixed = [Request(tuple(prompt_of(5)), params) for params in impossible] + requests(0.0)
        outputs = run(engine_for(tiny, drafter), mixed)
        for output in outputs[: len(impossible)]:
            assert output.outputs[0].finish_reason == "error"
            assert "loosen the grammar" in (output.outputs[0].error or "")
        assert ids(outputs[len(impossible) :]) == ids(expected)


def test_a_processor_cannot_bring_back_what_the_grammar_forbids(tiny: LoadedModel) -> None:
    params = SamplingParams(
        max_tokens=20,
        structured_outputs=FORMS[2],
        logits_processors=(lambda path, logits: logits.new_zeros(logits.shape),),
    )
    output = run(engine_for(tiny), [Request(tuple(prompt_of(5)), params)])[0].outputs[0]
    assert output.text in ("yes", "yes, but", "no", "日本") and output.error is None


def test_state_is_freed_when_a_request_is_over(tiny: LoadedModel) -> None:
    engine = engine_for(tiny, NgramDrafter())
    keys = [engine.add(request) for request in requests(0.0, n=2)]
    while len(engine.scheduler.running) < 4:
        engine.step()
    states = [weakref.ref(sequence.grammar) for sequence in engine._sequences.values() if sequence.grammar is not None]
    assert len(states) >= 6
    for key in keys[::2]:
        engine.abort(key)
    while engine.has_work:
        engine.step()
    gc.collect()
    assert [state() for state in states] == [None] * len(states)


def slowed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Compiling waits for the event."""
    go_on, compile_one = threading.Event(), engine.grammars._compile

    def slowly(wanted: StructuredOutputsParams) -> object:
        assert go_on.wait(60)
        return compile_one(wanted)

    monkeypatch.setattr(engine.grammars, "_compile", slowly)
    return go_on


def test_compiling_holds_up_nobody_and_waits_outside_the_queue(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_for(tiny)
    go_on = slowed(engine, monkeypatch)
    formed = [engine.add(request) for request in requests(0.0, n=2)[:3]]
    other = engine.add(requests(0.0)[-1])
    while not engine.output(other).finished:
        assert len(engine.scheduler.running) + len(engine.scheduler.waiting) == 1
        engine.step()
    assert engine.has_work and engine.step() == []
    engine.abort(formed.pop())
    go_on.set()
    while engine.has_work:
        engine.step()
    alone = run(engine_for(tiny), requests(0.0, n=2)[:2])
    assert ids([engine.pop(key) for key in formed]) == ids(alone)


def test_aborted_while_compiling(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(tiny)
    go_on = slowed(engine, monkeypatch)
    key = engine.add(requests(0.0, n=2)[0])
    assert [sample.finish_reason for sample in engine.abort(key).outputs] == ["abort", "abort"]
    assert not engine.has_work
    go_on.set()


def test_what_does_not_compile_is_refused_with_its_reason_and_others_go_on(tiny: LoadedModel) -> None:
    engine = engine_for(tiny)
    bad = Request((1, 2), SamplingParams(n=2, structured_outputs=StructuredOutputsParams(regex="(")))
    good = requests(0.0)[0]
    keys = [engine.add(bad), engine.add(good)]
    events = []
    while engine.has_work:
        events += engine.step()
    refused, served = (engine.pop(key) for key in keys)
    assert refused.outputs == [] and "not closed" in (refused.error or "")
    ends = [event for event in events if event.sequence_id in (keys[0], keys[0] + 1)]
    assert [event.finish_reason for event in ends] == ["error", "error"] and not any(event.fault for event in ends)
    assert served.outputs[0].token_ids and served.error is None
    assert engine.cache.free_pages == engine.cache.total_pages


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = save_tiny_llama(tmp_path_factory.mktemp("llm"), layers=3)
    return LLM(str(folder), "ngram", dtype="float32", config=EngineConfig(kv_cache_mib=8))


def test_offline_generation_takes_a_form(llm: LLM) -> None:
    formed = SamplingParams(max_tokens=20, structured_outputs=StructuredOutputsParams(choice=("yes", "no")))
    assert llm.generate("?", formed)[0].outputs[0].text in ("yes", "no")
    assert "".join(event.text for event in llm.stream("?", formed)) in ("yes", "no")
    broken = SamplingParams(structured_outputs=StructuredOutputsParams(regex="("))
    with pytest.raises(AlulaError, match="not closed"):
        llm.generate("?", broken)
    with pytest.raises(AlulaError, match="not closed"):
        list(llm.stream("?", broken))
    refused, served = llm.generate(["?", "?"], [broken, formed])
    assert refused.error is not None and served.outputs[0].text in ("yes", "no")
    assert not llm.engine.has_work


def test_a_prompt_that_ends_in_the_marker_has_no_free_part(llm: LLM) -> None:
    form = StructuredOutputsParams(choice=("yes", "no"), free_until="</think>")
    formed = SamplingParams(max_tokens=8, structured_outputs=form)
    assert llm.generate("so</think>\n\n", formed)[0].outputs[0].text in ("yes", "no")
    assert llm.generate("</think> so", formed)[0].outputs[0].text not in ("yes", "no")


@pytest.mark.parametrize("mutant", ["wrong path", "drafts advance", "commit forgets"])
def test_mutants_of_the_state_are_caught(
    tiny: LoadedModel, head: Path, plain: dict[float, list[RequestOutput]], mutant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = GrammarState.mask

    def drafted(self: GrammarState, path: Sequence[int]) -> Any:
        found = mask(self, path)
        self._path = []
        return found

    mutants: dict[str, tuple[str, Any]] = {
        "wrong path": ("mask", lambda self, path: mask(self, ())),
        "drafts advance": ("mask", drafted),
        "commit forgets": ("advance", lambda self, tokens: None),
    }
    monkeypatch.setattr(GrammarState, *mutants[mutant])

    def compare() -> None:
        engine = engine_for(tiny, load_drafter(str(head), tiny), shape=TreeShape(8, 3, 2))
        assert ids(run(engine, requests(1.0))) == ids(plain[1.0])

    with pytest.raises((AssertionError, RuntimeError)):
        compare()
