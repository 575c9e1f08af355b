"""Masks of tree nodes: each on its own path, by an independent replay, wherever the last question was."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from xgrammar import CompiledGrammar

from alula.grammar import Grammars, GrammarState
from alula.sampling.processors import is_allowed
from alula.structured import StructuredOutputsParams
from alula.text import Tokenizer
from tests.engine.tiny import EOS, VOCAB, _byte_tokenizer
from tests.grammar.support import PERSON, USER, allowed, byte_tokenizer, json_like, replayed

WANTED = {
    "json": json_like(PERSON),
    "regex": StructuredOutputsParams(regex="(ab|c(de)*|é)+"),
    "choice": StructuredOutputsParams(choice=("yes", "yes, but", "no", "日本")),
    "grammar": StructuredOutputsParams(grammar='root ::= "(" root ")" root | "x" | ""'),
    "after a marker": json_like(PERSON, free_until="</t>"),
}
TEXT = byte_tokenizer()


def ids(text: str) -> list[int]:
    return TEXT.encode(text, add_special_tokens=False)


def random_paths(compiled: CompiledGrammar, start: Sequence[int], rng: random.Random, count: int) -> list[list[int]]:
    """Paths of a random tree: each goes on from another one, through allowed tokens, ends included."""
    paths: list[list[int]] = [[]]
    while len(paths) < count:
        parent = rng.choice(paths)
        if len(parent) < 6:
            choices = replayed(compiled, [*start, *parent])
            paths.append([*parent, EOS if EOS in choices and rng.random() < 0.4 else rng.choice(choices)])
    return paths


@pytest.mark.parametrize("kind", WANTED)
def test_every_node_has_the_mask_of_its_own_path(made: Grammars, kind: str) -> None:
    """Nodes are asked for in any order and more than once, and after every commit the same holds again."""
    compiled, rng = made.compile(WANTED[kind]), random.Random(kind)
    state, committed = made.state(compiled), list[int]()
    for _ in range(6):
        paths = random_paths(compiled, committed, rng, 24)
        asked = rng.choices(paths, k=60)
        for path in asked:
            assert allowed(state.mask(path)) == replayed(compiled, [*committed, *path])
        step = max(rng.choices(paths, k=3), key=len)
        if EOS in step:
            step = step[: step.index(EOS)]
        state.advance(step)
        committed += step


def test_asking_changes_nothing(made: Grammars) -> None:
    compiled = made.compile(WANTED["regex"])
    asked, untouched = made.state(compiled), made.state(compiled)
    for path in ("", "ab", "cde", "abab", "c", "abcdede"):
        first = asked.mask(ids(path)).clone()
        assert torch.equal(asked.mask(ids(path)), first)
    for state in (asked, untouched):
        state.advance(ids("cd"))
    assert allowed(asked.mask(())) == allowed(untouched.mask(())) == ids("e")


def test_only_committed_tokens_advance(made: Grammars) -> None:
    """A path that was looked at and rejected leaves no trace, at whatever depth it parted from the committed one."""
    compiled = made.compile(WANTED["choice"])
    for kept in range(3):
        state = made.state(compiled)
        state.mask(ids("yes, "))
        state.advance(ids("yes")[:kept])
        assert allowed(state.mask(())) == replayed(compiled, ids("yes")[:kept])


def test_f6_nodes_below_a_finished_text_and_below_its_end(made: Grammars) -> None:
    """Nothing but the end follows what is complete, and nothing else ever follows the end."""
    state = made.state(made.compile(WANTED["choice"]))
    assert allowed(state.mask(ids("no"))) == [EOS]
    assert allowed(state.mask(ids("yes"))) == sorted([EOS, *ids(",")])
    for path in ([*ids("no"), EOS], [*ids("no"), EOS, EOS], [*ids("yes"), EOS, EOS, EOS]):
        assert allowed(state.mask(path)) == [EOS]
    state.advance([*ids("no"), EOS])
    assert allowed(state.mask(())) == allowed(state.mask([EOS, EOS])) == [EOS]
    state.advance([EOS])
    assert allowed(state.mask(())) == [EOS]
    longer = made.state(made.compile(WANTED["choice"]))
    longer.advance([*ids("yes"), EOS])
    assert allowed(longer.mask(())) == [EOS]


def test_f8_an_end_that_was_drafted_and_rejected_is_taken_back(made: Grammars) -> None:
    compiled = made.compile(WANTED["choice"])
    state = made.state(compiled)
    assert allowed(state.mask([*ids("yes"), EOS, EOS])) == [EOS]
    state.advance(ids("yes,"))
    assert allowed(state.mask(())) == replayed(compiled, ids("yes,")) == ids(" ")[:1]
    assert allowed(state.mask(ids(" but"))) == [EOS]


def test_f2_quiet_over_paths_of_every_kind(made: Grammars, capfd: pytest.CaptureFixture[str]) -> None:
    for wanted in WANTED.values():
        compiled = made.compile(wanted)
        state = made.state(compiled)
        for path in random_paths(compiled, [], random.Random(0), 40):
            for token in (EOS, USER, 5):
                is_allowed(state.mask(path), token)
    assert capfd.readouterr() == ("", "")


def test_a_path_that_is_not_allowed_is_a_fault_of_the_caller(made: Grammars) -> None:
    state = made.state(made.compile(WANTED["choice"]))
    with pytest.raises(RuntimeError, match="does not allow"):
        state.mask(ids("z"))
    assert allowed(state.mask(ids("n"))) == ids("o")


def test_half_a_character_is_followed_by_its_other_half_only(made: Grammars) -> None:
    compiled = made.compile(WANTED["choice"])
    state, tokens = made.state(compiled), ids("日本")
    assert len(tokens) == 6
    for length in range(6):
        assert tokens[length] in allowed(state.mask(tokens[:length]))
        if length:
            assert allowed(state.mask(tokens[:length])) == [tokens[length]]
    state.advance(tokens[:2])
    assert allowed(state.mask(())) == [tokens[2]]


def test_special_tokens_are_no_text(made: Grammars) -> None:
    """They are spelled like text, and a client never sees them."""
    compiled = made.compile(StructuredOutputsParams(regex=r"<\|user\|>|.*"))
    state = made.state(compiled)
    assert USER not in allowed(state.mask(())) and ids("<")[0] in allowed(state.mask(()))
    free = made.state(made.compile(StructuredOutputsParams(regex="a", free_until="</t>")))
    assert USER in allowed(free.mask(())) and EOS not in allowed(free.mask(()))


def test_padded_ids_are_never_allowed() -> None:
    made = Grammars(byte_tokenizer(), VOCAB + 30, (EOS,))
    state = made.state(made.compile(StructuredOutputsParams(regex="[^a]*", free_until="</t>")))
    for path in ("", "x</t>", "x</t>y"):
        words = state.mask(ids(path))
        assert not any(is_allowed(words, token) for token in range(VOCAB, VOCAB + 30))


def merged_tokenizer() -> Tokenizer:
    """Bytes, and tokens that run over the end of a marker."""
    from tokenizers import AddedToken

    backend = _byte_tokenizer().backend_tokenizer
    backend.add_tokens([AddedToken(text, normalized=False) for text in (">a", ">b", "t>ab", "<think>")])
    return Tokenizer(backend)


def test_the_text_after_a_marker_has_the_form_wherever_tokens_cut_it() -> None:
    tokenizer = merged_tokenizer()
    over_a, over_b, over_ab, think = range(VOCAB, VOCAB + 4)
    made = Grammars(tokenizer, VOCAB + 4, (EOS,))
    state = made.state(made.compile(StructuredOutputsParams(regex="ab?", free_until="</t>")))

    def offered(path: Sequence[int]) -> set[int]:
        return {token for token in range(VOCAB + 4) if is_allowed(state.mask(path), token)}

    begun = [think, *ids("so</")]
    assert {over_a, over_b, over_ab, think, USER} <= offered(begun[:-2])
    assert over_ab in offered(begun)
    assert offered([*begun, over_ab]) == {EOS}
    near = [*begun, *ids("t")]
    assert {over_a, *ids(">")} <= offered(near) and over_b not in offered(near)
    assert offered([*near, over_a]) == {EOS, *ids("b")}
    assert offered([*near, *ids(">")]) == set(ids("a"))


def test_a_marker_may_be_a_special_token(made: Grammars) -> None:
    compiled = made.compile(StructuredOutputsParams(choice=("yes",), free_until="<|assistant|>"))
    state = made.state(compiled)
    assert EOS not in allowed(state.mask(ids("so <|assis")))
    assert allowed(state.mask([*ids("so"), 258])) == ids("y")
    assert allowed(state.mask([258, *ids("yes")])) == [EOS]


class Frozen(GrammarState):
    """Mutant: every node gets the mask of the root."""

    def mask(self, path: Sequence[int]) -> torch.Tensor:
        return super().mask(())


class Sibling(GrammarState):
    """Mutant: nodes of one depth share a mask, as if trees were chains."""

    def mask(self, path: Sequence[int]) -> torch.Tensor:
        self._by_depth: dict[int, torch.Tensor] = getattr(self, "_by_depth", {})
        return self._by_depth.setdefault(len(path), super().mask(path))


class Drafted(GrammarState):
    """Mutant: looking at a draft is taken for committing it."""

    def mask(self, path: Sequence[int]) -> torch.Tensor:
        found = super().mask(path)
        self._path = []
        return found


@pytest.mark.parametrize("mutant", [Frozen, Sibling, Drafted])
def test_mutants_that_lose_the_path_are_caught(made: Grammars, mutant: type[GrammarState]) -> None:
    compiled, rng = made.compile(WANTED["json"]), random.Random(1)
    state = mutant(compiled, (EOS,))

    def compare() -> None:
        for path in random_paths(compiled, [], rng, 24):
            assert allowed(state.mask(path)) == replayed(compiled, path)

    with pytest.raises((AssertionError, RuntimeError)):
        compare()


def test_masks_of_both_kinds_answer_for_single_ids() -> None:
    words, flags = torch.tensor([1 << 3 | -(1 << 31), 1], dtype=torch.int32), torch.zeros(33, dtype=torch.bool)
    flags[[3, 31, 32]] = True
    for mask in (words, flags):
        assert np.flatnonzero([is_allowed(mask, token) for token in range(80)]).tolist() == [3, 31, 32]
    assert is_allowed(None, 7)
