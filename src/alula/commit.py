"""Applies verdicts: the only mutation of a step.

For each sequence, KV, tokens, features, text, grammar and stop state move together, or, if anything raises before its
turn, not at all: the transaction rolls back what was not committed.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from alula.cache import Transaction
from alula.sequence import FinishReason, PlanItem, Sequence, StepPlan, TokenEvent, Verdict


@dataclass(frozen=True)
class _Cut:
    """How many of a verdict's tokens are kept, and why no more."""

    kept: int
    reason: FinishReason | None = None
    stop_reason: int | str | None = None
    text: str = ""
    ends: tuple[int, ...] = ()


def commit(
    plan: StepPlan,
    verdicts: Seq[Verdict | None],
    features: Seq[torch.Tensor | None],
    txn: Transaction,
    max_len: int,
) -> list[TokenEvent]:
    """One event per sequence that got a verdict.

    features: per item [chunk + nodes, F] or None. max_len: longest prompt plus output in tokens.
    """
    events = []
    for item, verdict, feature in zip(plan.items, verdicts, features, strict=True):
        if verdict is None:
            _commit_rows(item, item.sequence.tokens, None, feature, txn)
        elif verdict.error is not None:
            events.append(_fail(item.sequence, verdict.error))
        else:
            events.append(_commit_verdict(item, verdict, feature, txn, max_len))
    return events


def _commit_verdict(
    item: PlanItem, verdict: Verdict, feature: torch.Tensor | None, txn: Transaction, max_len: int
) -> TokenEvent:
    sequence = item.sequence
    cut = _cut(sequence, verdict.tokens, max_len)
    tokens = verdict.tokens[: cut.kept]
    # The last kept token is the next root, so its own KV is not committed yet.
    _commit_rows(item, [*sequence.tokens, *tokens], verdict.path[: cut.kept - 1], feature, txn)
    sequence.tokens.extend(tokens)
    if sequence.grammar is not None:
        sequence.grammar.advance(tokens)
    sequence.finish_reason = cut.reason
    logprobs = None if verdict.logprobs is None else verdict.logprobs[: cut.kept]
    return TokenEvent(sequence.id, tokens, cut.text, cut.ends, logprobs, cut.reason, cut.stop_reason)


def _commit_rows(
    item: PlanItem, tokens: list[int], path: Seq[int] | None, feature: torch.Tensor | None, txn: Transaction
) -> None:
    """Stage the KV first: the sequence changes only once the transaction has taken its rows."""
    sequence, chunk = item.sequence, len(item.chunk)
    if feature is not None:
        feature = _kept(feature, chunk, path)
    txn.commit(sequence.id, tokens, chunk, path, feature)
    if feature is not None:
        sequence.features.append(feature)
    # Pair (f_j, t_{j+1}) lies in slot j + 1, so the pairs before draft_length - 1 are done.
    sequence.features.drop_before(txn.draft_length(sequence.id) - 1)


def _kept(features_TF: torch.Tensor, chunk: int, path: Seq[int] | None) -> torch.Tensor:
    """Rows of the chunk, the root and the accepted nodes; a copy, without what is not kept."""
    places = [] if path is None else [0, *path]
    if places == list(range(len(places))):  # the first child of the first child, as is most likely
        return features_TF[: chunk + len(places)].clone()
    return features_TF[[*range(chunk), *(chunk + node for node in places)]]


def _fail(sequence: Sequence, error: str) -> TokenEvent:
    sequence.finish_reason = FinishReason.ERROR
    return TokenEvent(sequence.id, (), finish_reason=FinishReason.ERROR, error=error)


def _cut(sequence: Sequence, tokens: tuple[int, ...], max_len: int) -> _Cut:
    """Feed the tokens one by one to everything that can end the output, and stop at the first that does."""
    params, text, ends = sequence.params, "", list[int]()
    for count, token in enumerate(tokens, start=1):
        produced = len(sequence.tokens) + count - sequence.prompt_len
        is_end = token in params.stop_token_ids or (token in sequence.eos_ids and not params.ignore_eos)
        stop_string = None
        if not is_end or params.include_stop_str_in_output:
            delta, stop_string = _feed(sequence, token, produced)
            text += delta
        ends.append(0 if sequence.text is None else len(sequence.text.text))
        if is_end:
            stop_reason = token if token in params.stop_token_ids else None
            return _Cut(count, FinishReason.STOP, stop_reason, text + _rest(sequence), tuple(ends))
        if stop_string is not None:
            return _Cut(count, FinishReason.STOP, stop_string, text, tuple(ends))
        if produced >= params.max_tokens or sequence.prompt_len + produced >= max_len:
            return _Cut(count, FinishReason.LENGTH, None, text + _rest(sequence), tuple(ends))
    return _Cut(len(tokens), text=text, ends=tuple(ends))


def _feed(sequence: Sequence, token: int, produced: int) -> tuple[str, str | None]:
    if sequence.text is None:
        return "", None
    return sequence.text.feed(token, produced >= sequence.params.min_tokens)


def _rest(sequence: Sequence) -> str:
    return "" if sequence.text is None else sequence.text.finish()
