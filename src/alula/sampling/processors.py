"""What changes the logits of a node before temperature and cuts: masks, biases, penalties, user processors.

All of it is over the node's own path: prompt, output, and the tokens of the tree from the root's child down to
the node itself. Every step writes single entries of one row, so a row's result does not depend on its company.

Shape suffixes: B rows, V vocabulary, C columns of a row (the target's ids or a draft vocabulary), I distinct ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from alula import sequence as seq
from alula.config import AlulaError
from alula.sampling.columns import DraftColumns
from alula.tree import FloatArray, IntArray

if TYPE_CHECKING:
    import torch


class SamplingError(AlulaError):
    """No token can be chosen for this sequence; the sentence says why."""


@dataclass(frozen=True)
class Context:
    """Where a row of logits stands.

    path: tokens below the root down to the node itself (empty at the root).
    mask: ids the grammar allows here: bool [V], or int32 words of 32 ids each, lowest bit first. None allows all.
    """

    sequence: seq.Sequence
    path: tuple[int, ...] = ()
    mask: torch.Tensor | None = None

    @classmethod
    def at(cls, sequence: seq.Sequence, path: tuple[int, ...]) -> Context:
        """With the mask that the sequence's grammar, if it has one, has there."""
        return cls(sequence, path, None if sequence.grammar is None else sequence.grammar.mask(path))

    @property
    def position(self) -> int:
        """Absolute position of the token that these logits choose."""
        return len(self.sequence.tokens) + len(self.path)


@dataclass(frozen=True)
class Counts:
    """Distinct tokens of a history and how often each stands in the output part."""

    ids_I: IntArray
    output_I: IntArray

    @classmethod
    def of(cls, tokens: Sequence[int], prompt_len: int) -> Counts:
        history = np.asarray(tokens, np.int64)
        ids, inverse = np.unique(history, return_inverse=True)
        return cls(ids, np.bincount(inverse[prompt_len:], minlength=len(ids)))

    def after(self, path: Sequence[int]) -> Counts:
        """Counts with more output tokens behind (their ids no longer sorted)."""
        if not path:
            return self
        ids, times = np.unique(np.asarray(path, np.int64), return_counts=True)
        at = np.minimum(np.searchsorted(self.ids_I, ids), len(self.ids_I) - 1)
        known = self.ids_I[at] == ids
        output = self.output_I.copy()
        output[at[known]] += times[known]
        return Counts(np.concatenate([self.ids_I, ids[~known]]), np.concatenate([output, times[~known]]))


class Shaper:
    """Applies the logit shaping of one sequence to rows of its tree. Reads the sequence, never changes it.

    strict: an id that the rows lack is an error; otherwise it is skipped (drafters lack ids).
    vocabulary: target ids of the rows' columns; None where column i is id i.
    """

    def __init__(self, sequence: seq.Sequence, *, strict: bool = True, vocabulary: DraftColumns | None = None) -> None:
        self.sequence = sequence
        self.params = sequence.params
        self.strict = strict
        self.vocabulary = vocabulary

    def apply(self, row_C: FloatArray, path: Sequence[int], mask: torch.Tensor | None = None) -> None:
        """Changes the row in place. Raises SamplingError for an id outside the vocabulary, where that is an error."""
        if mask is not None:
            _mask_out(row_C, mask, self.vocabulary)
        if not self.params.shapes_logits:
            return
        if self.params.allowed_token_ids is not None:
            self._keep_allowed(row_C)
        if self.sequence.bad_words:
            self._ban_bad_words(row_C, path)
        if len(self.sequence.tokens) - self.sequence.prompt_len + len(path) < self.params.min_tokens:
            row_C[self._held(row_C, self._ending_ids, "stop_token_ids")[0]] = -np.inf
        if self.params.logit_bias:
            self._add_bias(row_C)
        if self._penalises:
            self._penalise(row_C, path)

    def process(self, row_V: FloatArray, path: Sequence[int]) -> None:
        """Runs the user's processors on a copy and writes their result into the row."""
        import torch

        logits = torch.from_numpy(row_V.copy())
        for processor in self.params.logits_processors:
            logits = processor([*self.sequence.tokens, *path], logits)
            if not isinstance(logits, torch.Tensor) or logits.shape != row_V.shape:
                raise SamplingError(f"logits_processors returned {_describe(logits)}: return logits [{len(row_V)}]")
        row_V[:] = logits.detach().to("cpu", torch.float32).numpy()

    @cached_property
    def _penalises(self) -> bool:
        p = self.params
        return bool(p.repetition_penalty != 1.0 or p.presence_penalty or p.frequency_penalty)

    @cached_property
    def _counts(self) -> Counts:
        return Counts.of(self.sequence.tokens, self.sequence.prompt_len)

    @cached_property
    def _ending_ids(self) -> IntArray:
        return np.array(sorted({*self.sequence.eos_ids, *self.params.stop_token_ids}), np.int64)

    @cached_property
    def _allowed_ids(self) -> IntArray:
        return np.array(self.params.allowed_token_ids, np.int64)

    @cached_property
    def _bias(self) -> tuple[IntArray, FloatArray]:
        bias = self.params.logit_bias
        return np.fromiter(bias.keys(), np.int64, len(bias)), np.fromiter(bias.values(), np.float32, len(bias))

    def _columns(self, row_C: FloatArray, ids: IntArray) -> IntArray:
        """Column of each id, -1 where the row lacks it."""
        if self.vocabulary is not None:
            return self.vocabulary.columns_of(ids)
        return np.where((ids >= 0) & (ids < len(row_C)), ids, -1)

    def _held(self, row_C: FloatArray, ids: IntArray, name: str) -> tuple[IntArray, NDArray[np.bool_]]:
        """Columns of those ids that the row has, and which ids these are."""
        columns = self._columns(row_C, ids)
        held = columns >= 0
        if self.strict and not held.all():
            raise SamplingError(
                f"{name} holds token id {ids[~held][0]}: give ids from 0 to {len(row_C) - 1}, the vocabulary's last"
            )
        return columns[held], held

    def _keep_allowed(self, row_C: FloatArray) -> None:
        columns, _ = self._held(row_C, self._allowed_ids, "allowed_token_ids")
        kept = row_C[columns]
        row_C[:] = -np.inf
        row_C[columns] = kept

    def _ban_bad_words(self, row_C: FloatArray, path: Sequence[int]) -> None:
        words = self.sequence.bad_words
        reach = max(len(word) for word in words) - 1
        tail = (*self.sequence.tokens[-reach:], *path)[-reach:] if reach else ()
        last = [word[-1] for word in words if len(word) == 1 or tail[1 - len(word) :] == word[:-1]]
        row_C[self._held(row_C, np.array(last, np.int64), "bad_words")[0]] = -np.inf

    def _add_bias(self, row_C: FloatArray) -> None:
        ids, values = self._bias
        columns, held = self._held(row_C, ids, "logit_bias")
        row_C[columns] += values[held]

    def _penalise(self, row_C: FloatArray, path: Sequence[int]) -> None:
        """Repetition (Keskar et al., CTRL, section 4.1) over everything; presence and frequency over the output."""
        counts = self._counts.after(path)
        columns = self._columns(row_C, counts.ids_I)
        held = columns >= 0
        columns, output = columns[held], counts.output_I[held].astype(np.float32)
        values = row_C[columns]
        if self.params.repetition_penalty != 1.0:
            factor = np.float32(self.params.repetition_penalty)
            values = np.where(values > 0, values / factor, values * factor)
        values -= np.float32(self.params.presence_penalty) * (output > 0)
        values -= np.float32(self.params.frequency_penalty) * output
        row_C[columns] = values


def shape_rows(
    rows_BV: FloatArray, shapers: Sequence[Shaper], paths: Sequence[Sequence[int]], masks: Iterable[torch.Tensor | None]
) -> list[str | None]:
    """Shapes each row in place; returns per row why no token can be chosen, or None.

    Whatever a user's processor raises is that row's error alone.
    """
    errors: list[str | None] = []
    for row_V, shaper, path, mask in zip(rows_BV, shapers, paths, masks, strict=True):
        errors.append(_shape_row(row_V, shaper, path, mask))
    for b, top in enumerate(rows_BV.max(axis=1)):
        if errors[b] is None and not np.isfinite(top):
            errors[b] = _no_choice(float(top))
    return errors


def _shape_row(row_V: FloatArray, shaper: Shaper, path: Sequence[int], mask: torch.Tensor | None) -> str | None:
    try:
        shaper.apply(row_V, path, mask)
    except SamplingError as error:
        return str(error)
    if not shaper.params.logits_processors:
        return None
    try:
        shaper.process(row_V, path)
        if mask is not None:  # what the grammar forbids no processor brings back
            _mask_out(row_V, mask)
    except SamplingError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 (a user's function may raise anything)
        reason = " ".join(str(error).split())
        return f"logits_processors raised {type(error).__name__} ({reason}): mend the processor"
    return None


def _no_choice(top: float) -> str:
    if top == -np.inf:
        return (
            "no token is left to choose: loosen the grammar, allowed_token_ids, bad_words, logit_bias or "
            "logits_processors so that they leave at least one"
        )
    return f"the logits hold {top}: check logit_bias, logits_processors and the model's weights"


def _mask_out(row_C: FloatArray, mask: torch.Tensor, vocabulary: DraftColumns | None = None) -> None:
    words = mask.detach().cpu().numpy()
    if vocabulary is None:
        row_C[~_as_bool(words, len(row_C))] = -np.inf
    else:
        row_C[~_as_bool(words, len(vocabulary.columns_V))[vocabulary.ids_C]] = -np.inf


def is_allowed(mask: torch.Tensor | None, token: int) -> bool:
    """One id of a mask (see `Context.mask`); ids beyond it are not allowed."""
    if mask is None:
        return True
    if mask.element_size() == 1:
        return token < len(mask) and bool(mask[token])
    return token < 32 * len(mask) and bool(int(mask[token >> 5]) >> (token & 31) & 1)


def _as_bool(mask: NDArray[Any], size: int) -> NDArray[np.bool_]:
    """Ids beyond the mask are not allowed."""
    if mask.dtype != np.bool_:
        mask = np.unpackbits(np.ascontiguousarray(mask, "<i4").view(np.uint8), bitorder="little").view(np.bool_)
    allowed = np.zeros(size, np.bool_)
    allowed[: len(mask)] = mask[:size]
    return allowed


def _describe(value: object) -> str:
    shape = getattr(value, "shape", None)
    return f"shape {tuple(shape)}" if shape is not None else type(value).__name__
