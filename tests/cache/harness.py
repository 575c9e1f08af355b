"""Drives a paged cache as the engine does, with rows whose value tells which tokens they belong to.

Every row written is a function of the tokens up to its own, so after any history it is known what each committed slot
of each sequence must hold.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from alula.cache import KVLayer, KVShape, PagedCache, Transaction
from alula.tree import IntArray

TARGET = (KVShape(1, 4), KVShape(2, 3), KVShape(1, 4))
EAGLE = (KVShape(1, 3),)
LM = (KVShape(2, 1), KVShape(1, 2))
FEATURES = 3


class Mishap(Exception):
    """Raised inside a transaction on purpose."""


def mark(kind: str, tokens: Sequence[int]) -> float:
    """A number, exact in fp32, for the last of `tokens` after the others."""
    return float(zlib.crc32(f"{kind}{list(tokens)}".encode()) % 2**22 + 1)


Rows = list[tuple[np.ndarray, np.ndarray]]
"""Keys and values of each layer as numpy views [slots, heads, size], which are quicker to touch row by row."""


def rows_of(layers: Sequence[KVLayer]) -> Rows:
    return [(layer.keys.transpose(0, 1).numpy(), layer.values.transpose(0, 1).numpy()) for layer in layers]


def write(rows: Rows, slot: int, kind: str, tokens: Sequence[int]) -> None:
    value = mark(kind, tokens)
    for number, (keys, values) in enumerate(rows):
        keys[slot], values[slot] = value + 2 * number, value + 2 * number + 1


def holds(rows: Rows, slot: int, kind: str, tokens: Sequence[int]) -> bool:
    value = mark(kind, tokens)
    return all(
        bool((keys[slot] == value + 2 * number).all() and (values[slot] == value + 2 * number + 1).all())
        for number, (keys, values) in enumerate(rows)
    )


def feature(tokens: Sequence[int]) -> torch.Tensor:
    return torch.full((FEATURES,), mark("feature", tokens))


@dataclass(frozen=True)
class Work:
    """One sequence's share of a step.

    chunk: catch-up rows. nodes: (parent, token) of tree nodes 1, 2, ..., or None without a tree. accepted: the last
    node of the accepted path. bonus: the token after it. drafted: fill the drafter up to this slot (None: leave it).
    skip: the first slot it fills, where that lies past its length. commits: False rolls back.
    """

    chunk: int = 0
    nodes: tuple[tuple[int, int], ...] | None = None
    accepted: int = 0
    bonus: int = 0
    drafted: int | None = None
    skip: int = 0
    commits: bool = True
    features: bool = True

    @property
    def need(self) -> int:
        return self.chunk + (0 if self.nodes is None else 1 + len(self.nodes))

    def path(self, node: int) -> list[int]:
        found = []
        while node:
            found.append(node)
            node = (self.nodes or ())[node - 1][0]
        return found[::-1]

    def token(self, node: int) -> int:
        return (self.nodes or ())[node - 1][1]


@dataclass
class Model:
    """What must be true of one sequence. drafts: kind of mark of each slot the drafter filled itself."""

    tokens: list[int]
    hit: int
    length: int
    draft_length: int
    skipped_to: int = 0
    drafts: dict[int, str] = field(default_factory=dict)


class Harness:
    """A cache, a model of every sequence in it, and the comparison of the two."""

    def __init__(self, *, pages: int = 16, page_size: int = 4, lm: bool = False, **options: bool) -> None:
        self.first = 0 if lm else 1
        self.lm = lm
        self.cache = PagedCache(
            pages=pages,
            page_size=page_size,
            target=TARGET,
            drafter=LM if lm else EAGLE,
            feature_size=0 if lm else FEATURES,
            dtype=torch.float32,
            drafter_first=self.first,
            drafter_name="head",
            prefix_caching=options.get("prefix_caching", True),
        )
        self.target = rows_of(self.cache.target_layers)
        self.drafter = rows_of(self.cache.drafter_layers)
        self.models: dict[int, Model] = {}

    def add(self, seq_id: int, tokens: Sequence[int], *, use_prefix: bool = True) -> int:
        expected = self.cache.peek(tokens) if use_prefix else 0
        hit = self.cache.add(seq_id, tokens, use_prefix=use_prefix)
        assert hit == expected and hit % self.cache.page_size == 0 and hit < len(tokens)
        self.models[seq_id] = Model(list(tokens), hit, hit, max(hit, self.first))
        return hit

    def release(self, seq_id: int) -> None:
        self.cache.release(seq_id)
        del self.models[seq_id]

    def step(
        self, works: Mapping[int, Work], *, mishap: bool = False, release: Sequence[int] = (), flush: bool = False
    ) -> None:
        """Run one transaction; with `mishap` an error ends it after the commits."""
        done: dict[int, Work] = {}
        try:
            with self.cache.begin({seq_id: work.need for seq_id, work in works.items()}) as txn:
                for seq_id, work in works.items():
                    self._write(txn, seq_id, work)
                for seq_id, work in works.items():
                    if work.commits:
                        self._commit(txn, seq_id, work)
                        done[seq_id] = work
                if flush:
                    txn.flush()
                for seq_id in release:
                    self.cache.release(seq_id)
                if mishap:
                    raise Mishap
        except Mishap:
            pass
        for seq_id, work in done.items():
            self._learn(seq_id, work)
        for seq_id in release:
            del self.models[seq_id]

    def prefill(self, seq_id: int, *, features: bool = True) -> None:
        """Everything up to the root, without the drafter."""
        model = self.models[seq_id]
        self.step({seq_id: Work(len(model.tokens) - 1 - model.length, features=features)})

    def draft(self, seq_id: int) -> None:
        """The drafter catches up as far as it can; the target commits its root."""
        model = self.models[seq_id]
        chunk = len(model.tokens) - 1 - model.length
        self.step({seq_id: Work(chunk, (), drafted=len(model.tokens), bonus=9)})

    def slots(self, seq_id: int) -> IntArray:
        with self.cache.begin({seq_id: 0}) as txn:
            return txn.slots(seq_id, np.arange(self.models[seq_id].length))

    def verify(self) -> None:
        """Every committed row is right, and no page is lost."""
        self.cache.check_integrity()
        held: set[int] = set()
        for seq_id, model in self.models.items():
            slots = self.slots(seq_id)
            held.update((slots // self.cache.page_size).tolist())
            assert self.cache.length(seq_id) == model.length
            for position, slot in enumerate(slots.tolist()):
                assert holds(self.target, slot, "target", model.tokens[: position + 1])
            self._verify_drafts(seq_id, model, slots)
        assert self.cache.free_pages == self.cache.total_pages - len(held)

    def _verify_drafts(self, seq_id: int, model: Model, slots: IntArray) -> None:
        first = self.cache.draft_first(seq_id)
        assert self.cache.draft_length(seq_id) == model.draft_length
        assert first in {model.skipped_to} if model.skipped_to else first in {self.first, model.hit}
        for position in range(first, min(model.draft_length, len(slots))):
            kind = model.drafts.get(position, f"draft{self.first}")
            assert holds(self.drafter, int(slots[position]), kind, model.tokens[: position + 1])
        with self.cache.begin({seq_id: 0}) as txn:
            boundary = txn.boundary_feature(seq_id)
        if model.hit and model.draft_length == model.hit and not self.lm:
            assert boundary is not None and torch.equal(boundary, feature(model.tokens[: model.hit]))
        else:
            assert boundary is None

    def _write(self, txn: Transaction, seq_id: int, work: Work) -> None:
        model = self.models[seq_id]
        base, tokens = model.length + work.chunk, model.tokens
        logical = np.arange(model.length, model.length + work.need)
        slots = dict(zip(logical.tolist(), txn.slots(seq_id, logical).tolist(), strict=True))
        table = txn.page_table([seq_id])[0]
        for position, slot in slots.items():
            assert int(table[position // txn.page_size]) * txn.page_size + position % txn.page_size == slot
            write(self.drafter, slot, "scratch", [position])
            node = position - base
            prefix = tokens[: position + 1] if node < 1 else self._prefix(seq_id, work, node)
            write(self.target, slot, "target", prefix)
        if work.drafted is not None:
            self._write_drafts(txn, seq_id, work.drafted, work.skip)

    def _write_drafts(self, txn: Transaction, seq_id: int, drafted: int, skip: int) -> None:
        """An EAGLE entry depends on its own pair only; a language model's on what it could see too."""
        model = self.models[seq_id]
        start = max(model.draft_length, skip)
        seen = (skip if skip > model.draft_length else txn.draft_first(seq_id)) if self.lm else self.first
        for position in range(start, drafted):
            slot = int(txn.slots(seq_id, np.array([position]))[0])
            write(self.drafter, slot, f"draft{seen}", model.tokens[: position + 1])
            model.drafts[position] = f"draft{seen}"
        txn.fill_draft(seq_id, drafted, first=skip)
        assert txn.draft_length(seq_id) == drafted

    def _prefix(self, seq_id: int, work: Work, node: int) -> list[int]:
        return self.models[seq_id].tokens + [work.token(n) for n in work.path(node)]

    def _commit(self, txn: Transaction, seq_id: int, work: Work) -> None:
        model = self.models[seq_id]
        path = None if work.nodes is None else work.path(work.accepted)
        tokens = self._tokens_after(seq_id, work)
        new_length = model.length + work.chunk + (0 if path is None else 1 + len(path))
        rows = [feature(tokens[: position + 1]) for position in range(model.length, new_length)]
        features = torch.stack(rows) if rows else torch.zeros(0, FEATURES)
        txn.commit(seq_id, tokens, work.chunk, path, features if work.features and not self.lm else None)

    def _tokens_after(self, seq_id: int, work: Work) -> list[int]:
        if work.nodes is None:
            return self.models[seq_id].tokens
        return [*self._prefix(seq_id, work, work.accepted), work.bonus]

    def _learn(self, seq_id: int, work: Work) -> None:
        model = self.models[seq_id]
        model.tokens = self._tokens_after(seq_id, work)
        model.length += work.chunk + (0 if work.nodes is None else 1 + len(work.path(work.accepted)))
        if work.drafted is not None:
            if work.skip > model.draft_length:
                model.skipped_to = work.skip
            model.draft_length = work.drafted
