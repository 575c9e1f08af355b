"""What a request asks for, what it has so far, and the structs that pass between the stages of a step."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from alula.features import FeatureQueue
from alula.structured import StructuredOutputsParams
from alula.tree import TreeShape

if TYPE_CHECKING:
    import torch

LogitsProcessor = Callable[["list[int]", "torch.Tensor"], "torch.Tensor"]
"""Pure function of (prompt and output tokens up to this node, logits [V]) -> logits [V]."""

GREEDY_BELOW = 1e-5


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when a request ends. Names and meanings follow vLLM.

    None stands for an empty collection. Raises ValueError, naming field and mend, for a value outside its range.
    """

    temperature: float = 0.0
    """0 (below 1e-5) is greedy."""
    top_k: int = 0
    """Keep the k most likely tokens; 0 or -1 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches top_p."""
    min_p: float = 0.0
    """Drop tokens less likely than min_p times the most likely one."""
    repetition_penalty: float = 1.0
    """Divides positive logits (multiplies negative ones) of tokens in the prompt or the output."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token already in the output."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence in the output."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these token ids."""
    bad_words: tuple[str, ...] = ()
    """Texts that must not be produced."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Only these ids may be produced."""
    min_tokens: int = 0
    """EOS and stop_token_ids are masked, and stop strings ignored, until this many tokens are out."""
    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    """Texts that end the output."""
    include_stop_str_in_output: bool = False
    """Keep the stop string (or the stop token's text) that ended the output."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None
    """None draws a fresh seed, which the result reports."""
    n: int = 1
    """Samples per prompt, with independent noise."""
    logprobs: int | None = None
    """Report this many of the most likely tokens with each output token (0: the token's own only)."""
    prompt_logprobs: int | None = None
    logprobs_mode: str = "raw"
    """`raw`: of the model's own logits; `processed`: after every step of the pipeline."""
    logits_processors: tuple[LogitsProcessor, ...] = ()
    """Applied in order to the logits of every node, after the penalties; each a pure function of its path."""
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    """What form the output must have: JSON by a schema, a regex, one of several texts, or a grammar."""

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words", "stop_token_ids", "logits_processors", "logit_bias"):
            if getattr(self, name) is None:  # as in vLLM, None is none
                object.__setattr__(self, name, {} if name == "logit_bias" else ())
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        _check_ranges(self)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def shapes_logits(self) -> bool:
        """Whether anything besides temperature and the cuts changes the logits."""
        return bool(
            self.logit_bias
            or self.bad_words
            or self.allowed_token_ids is not None
            or self.min_tokens
            or self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
            or self.logits_processors
        )


_RANGES: tuple[tuple[str, Callable[[float], bool], str], ...] = (
    ("temperature", lambda v: 0 <= v <= 1e6, "a number from 0 to 1,000,000"),
    ("top_k", lambda v: v >= -1, "a whole number; 0 or -1 keeps every token"),
    ("top_p", lambda v: 0 < v <= 1, "a number above 0 and at most 1"),
    ("min_p", lambda v: 0 <= v <= 1, "a number from 0 to 1"),
    ("repetition_penalty", lambda v: 0 < v < math.inf, "a number above 0"),
    ("presence_penalty", lambda v: -2 <= v <= 2, "a number from -2 to 2"),
    ("frequency_penalty", lambda v: -2 <= v <= 2, "a number from -2 to 2"),
    ("min_tokens", lambda v: v >= 0, "a whole number of at least 0"),
    ("max_tokens", lambda v: v >= 1, "a whole number of at least 1"),
    ("n", lambda v: v >= 1, "a whole number of at least 1"),
)
_WHOLE = {"top_k", "min_tokens", "max_tokens", "n", "seed", "logprobs", "prompt_logprobs"}


def _check_ranges(params: SamplingParams) -> None:
    for name in _WHOLE:
        value = getattr(params, name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise ValueError(f"{name} is {value!r}: give a whole number")
    for name, holds, mend in _RANGES:
        value = getattr(params, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not holds(value):
            raise ValueError(f"{name} is {value!r}: give {mend}")
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(params, name)
        if value is not None and value < 0:
            raise ValueError(f"{name} is {value}: give a whole number of at least 0, or None")
    if params.min_tokens > params.max_tokens:
        raise ValueError(
            f"min_tokens is {params.min_tokens}, above max_tokens {params.max_tokens}: lower it or raise max_tokens"
        )
    if params.seed is not None and not -(2**63) <= params.seed < 2**63:
        raise ValueError(f"seed is {params.seed}: give a 64-bit integer")
    if params.logprobs_mode not in ("raw", "processed"):
        raise ValueError(f"logprobs_mode is {params.logprobs_mode!r}: give 'raw' or 'processed'")
    _check_collections(params)
    if not isinstance(params.structured_outputs, StructuredOutputsParams | None):
        raise ValueError(f"structured_outputs is {params.structured_outputs!r}: give StructuredOutputsParams, or None")
    for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
        if not isinstance(getattr(params, name), bool):
            raise ValueError(f"{name} is {getattr(params, name)!r}: give True or False")


def _check_collections(params: SamplingParams) -> None:
    """Their kinds, and whatever can be said without a vocabulary."""
    for name in ("stop", "bad_words"):
        texts = getattr(params, name)
        if not _is_listing(texts) or not all(_is_text(text) for text in texts):
            raise ValueError(f"{name} is {texts!r}: give a tuple of valid texts, none of them empty")
    for name in ("stop_token_ids", "allowed_token_ids"):
        ids = getattr(params, name)
        if ids is not None and not _is_listing(ids):
            raise ValueError(f"{name} is {ids!r}: give a tuple of token ids")
    if params.allowed_token_ids is not None and not params.allowed_token_ids:
        raise ValueError("allowed_token_ids is empty: give at least one id, or None to allow all")
    processors = params.logits_processors
    if not _is_listing(processors) or not all(callable(processor) for processor in processors):
        raise ValueError(f"logits_processors is {processors!r}: give a tuple of functions")
    if not isinstance(params.logit_bias, Mapping):
        raise ValueError(f"logit_bias is {params.logit_bias!r}: give a mapping from token ids to numbers")
    for token, bias in params.logit_bias.items():
        if isinstance(bias, bool) or not isinstance(bias, (int, float)) or not (abs(bias) < 1e30 or bias == -math.inf):
            raise ValueError(f"logit_bias of token {token!r} is {bias!r}: give a number below 1e30, or -inf to ban it")


def _is_listing(value: object) -> bool:
    return isinstance(value, Collection) and not isinstance(value, (str, bytes, Mapping))


def _is_text(value: object) -> bool:
    """Not empty, and no lone surrogates: no output could ever hold those."""
    return isinstance(value, str) and bool(value) and not any("\ud800" <= char <= "\udfff" for char in value)


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True)
class TokenLogprobs:
    """Log probabilities at one output position: the chosen token's, its rank (1 is the top), and the top ones."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Verdict:
    """What verification decided for one sequence.

    path: accepted nodes, from the root's child down (the root itself is always committed).
    tokens: tokens of the path, then the one the target chose after it (correction or bonus).
    checked: children of every node the walk visited.
    logprobs: one per token, where asked for.
    error: why no token could be chosen (an empty allowed set); then path and tokens are empty.
    """

    path: tuple[int, ...]
    tokens: tuple[int, ...]
    checked: int = 0
    logprobs: tuple[TokenLogprobs, ...] | None = None
    error: str | None = None


@dataclass(frozen=True)
class StepTrace:
    """What one step drafted for one sequence, and what became of it.

    step: which of the sequence's target forwards it was, from 1. tokens, parents, scores: the tree (see DraftTree), its
    root first. path: accepted nodes whose tokens were committed. checked: as in Verdict. committed: tokens kept, those
    of the path first; one more than the path unless the output was cut.
    """

    step: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    scores: tuple[float, ...]
    path: tuple[int, ...]
    checked: int
    committed: int


@dataclass(frozen=True)
class TokenEvent:
    """What one step committed for one sequence: the only thing a client ever sees.

    text: newly safe text (no half code point, no possible stop-string prefix).
    ends: characters of the whole output's text after each token, those still held back included; a stop string
        may cut the text before them.
    stop_reason: the stop token id or stop string that ended the output, as in vLLM.
    error: what went wrong, where finish_reason is ERROR.
    fault: whether that was a fault of alula's own, and not of the request's.
    trace: where the request asked for it.
    """

    sequence_id: int
    tokens: tuple[int, ...]
    text: str = ""
    ends: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    fault: bool = False
    trace: StepTrace | None = None


class TextSink(Protocol):
    """Turns committed tokens into text, and finds stop strings."""

    @property
    def text(self) -> str:
        """Everything decoded so far, held-back characters included."""

    def feed(self, token: int, may_stop: bool) -> tuple[str, str | None]:
        """Newly safe text, and the stop string that this token completes (never one while not `may_stop`)."""

    def finish(self) -> str:
        """Text still held back when the output ends for another reason."""


class Grammar(Protocol):
    """What one output may still be. Looking along paths leaves it as it is; only commit advances it."""

    def mask(self, path: Seq[int]) -> torch.Tensor | None:
        """Ids allowed after the committed tokens and this path of tokens below them (see `Context.mask`)."""

    def advance(self, tokens: Seq[int]) -> None:
        """These tokens were committed."""


@dataclass(eq=False)
class Sequence:
    """One sample of one request. Between steps only `commit` changes it.

    tokens: prompt, then output. The last token is the root of the next tree; its KV is not computed yet.
    eos_ids: ids that end the output unless params.ignore_eos.
    bad_words: tokenised `params.bad_words`.
    features: what the drafter has still to consume.
    text: None for sequences whose text nobody asks for.
    grammar: what `params.structured_outputs` leaves to choose; None where all is free.
    shape: limits of its trees, None for the engine's. drafter: who proposes them, None for the engine's own choice.
    traced: its events carry traces.
    priority: lower runs earlier.
    cached: prompt tokens that were in the cache when it was first admitted, at perf_counter time admitted_s.
    """

    id: int
    prompt_len: int
    tokens: list[int]
    params: SamplingParams
    seed: int
    text: TextSink | None = None
    grammar: Grammar | None = None
    sample: int = 0
    eos_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()
    features: FeatureQueue = field(default_factory=FeatureQueue)
    finish_reason: FinishReason | None = None
    shape: TreeShape | None = None
    drafter: str | None = None
    traced: bool = False
    priority: int = 0
    cached: int = 0
    admitted_s: float | None = None

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]

    @property
    def root_position(self) -> int:
        return len(self.tokens) - 1

    @property
    def remaining(self) -> int:
        return self.params.max_tokens - (len(self.tokens) - self.prompt_len)


@dataclass(frozen=True)
class PlanItem:
    """One sequence's share of a step: catch-up rows at `chunk` positions, then its tree.

    chunk: positions whose KV is computed without logits (prompt chunks, recompute after preemption); possibly empty.
    shape: limits of the tree, or None when the chunk does not reach the root yet. A tree is root-only while
        the chunk is not empty, since the drafter has no features for it yet.
    """

    sequence: Sequence
    chunk: range
    shape: TreeShape | None

    @property
    def rows(self) -> int:
        """Upper bound of packed rows."""
        return len(self.chunk) + (self.shape.nodes if self.shape else 0)


@dataclass(frozen=True)
class StepPlan:
    items: tuple[PlanItem, ...]
