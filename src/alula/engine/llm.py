"""Offline generation in the spirit of vLLM's `LLM`."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import TypeAlias, TypeGuard, cast

from alula.config import AlulaError
from alula.draft.load import load_drafter
from alula.draft.static import StaticTree
from alula.engine.acceptance_check import warn_if_never_accepted
from alula.engine.config import EngineConfig
from alula.engine.engine import Engine
from alula.engine.request import Request, RequestOutput
from alula.model.load import load_model, set_threads
from alula.sequence import SamplingParams, TokenEvent

Prompt: TypeAlias = str | bytes | Seq[int]
Message: TypeAlias = Mapping[str, str]


class LLM:
    """A model, its drafter and an engine.

    model: a built-in name (`smollm2`), a Hugging Face folder or hub id, or a GGUF file. drafter: `auto`, `none`,
    `ngram` or a path. threads: torch's thread count, None leaves it. kernels: `auto`, `native` or `torch`.
    tree: a static tree instead of dynamic ones, within the limits of config.shape. sampled: its children are drawn from
    the drafter's distribution (rule `rejection` only). allow_unverified_head: take a head that does not name its
    target; it is measured on a few tokens first, and warned of where it hardly ever guesses right.
    Raises AlulaError for anything that cannot be loaded or does not fit together.
    """

    def __init__(
        self,
        model: str = "smollm2",
        drafter: str = "auto",
        *,
        dtype: str = "bfloat16",
        kernels: str = "auto",
        device: str = "cpu",
        threads: int | None = None,
        config: EngineConfig | None = None,
        tree: StaticTree | None = None,
        sampled: bool = False,
        allow_unverified_head: bool = False,
    ) -> None:
        set_threads(threads)
        config = config or EngineConfig()
        loaded = load_model(model, dtype=dtype, kernels=kernels, device=device, max_len=config.max_model_len)
        proposer = load_drafter(
            drafter, loaded, rule=config.rule, tree=tree, sampled=sampled, allow_unverified=allow_unverified_head
        )
        warn_if_never_accepted(drafter, loaded, proposer, config)
        self.engine = Engine(loaded, proposer, config)
        self.tokenizer = loaded.tokenizer
        self._streams: dict[int, deque[TokenEvent]] = {}

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts (texts or token ids), batched continuously; outputs in the order of the prompts.

        Raises AlulaError when a single prompt is refused. In a list of prompts only the refused ones fail: their
        outputs carry `error`. Whatever else is raised meanwhile aborts all of them.
        """
        prompts = _listed(prompts)
        if _is_prompt(prompts):
            with self._adopted() as adopted:
                adopted.append(self._add(prompts, _one(sampling_params)))
                return [_accepted(self._finish(adopted[0], prompts))]
        return self._generate_all(list(cast("Seq[Prompt]", prompts)), sampling_params)

    def chat(
        self, messages: Seq[Message] | Seq[Seq[Message]], sampling_params: SamplingParams | None = None
    ) -> list[RequestOutput]:
        """Answer one conversation, or several at once; a refused one raises or carries `error`, as in `generate`."""
        if not isinstance(messages, Seq) or not messages or isinstance(messages[0], (str, Mapping)):
            return self.generate(self.render(cast("Seq[Message]", messages)), sampling_params)
        prompts = [self._try_render(conversation) for conversation in cast("Seq[Seq[Message]]", messages)]
        return self._generate_all(prompts, sampling_params)

    def render(self, messages: Seq[Message]) -> list[int]:
        """Token ids of a conversation in the model's chat template, ready for the assistant's turn."""
        return self.tokenizer.apply_chat_template(messages)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[TokenEvent]:
        """Committed tokens and safe text of this request, step by step. Closing the iterator aborts the request."""
        wanted = _one(sampling_params)
        events: deque[TokenEvent] = deque()
        with self._adopted() as adopted:
            adopted.append(self._add(prompt, wanted))
            samples = range(adopted[0], adopted[0] + wanted.n)
            self._streams |= dict.fromkeys(samples, events)
            try:
                while events or not self.engine.output(adopted[0]).finished:
                    if not events:
                        self._step()
                    while events:
                        yield events.popleft()
                _accepted(self.engine.pop(adopted[0]))
            finally:
                for sample in samples:
                    del self._streams[sample]

    @contextmanager
    def _adopted(self) -> Iterator[list[int]]:
        """A list for ids of requests; those the engine still has do not outlive the block by an exception."""
        adopted: list[int] = []
        try:
            yield adopted
        except BaseException:
            for request_id in adopted:
                if self.engine.knows(request_id):
                    self.engine.abort(request_id)
            raise

    def _step(self) -> None:
        """Advance everybody; open streams, whoever steps, get their own events."""
        for event in self.engine.step():
            if event.sequence_id in self._streams:
                self._streams[event.sequence_id].append(event)

    def _generate_all(
        self, prompts: Seq[Prompt | AlulaError], params: SamplingParams | Seq[SamplingParams] | None
    ) -> list[RequestOutput]:
        each = _per_prompt(params, len(prompts))
        with self._adopted() as adopted:
            added = [self._try_add(prompt, wanted, adopted) for prompt, wanted in zip(prompts, each, strict=True)]
            return [
                entry if isinstance(entry, RequestOutput) else self._finish(entry, prompt)
                for entry, prompt in zip(added, prompts, strict=True)
            ]

    def _add(self, prompt: Prompt, params: SamplingParams) -> int:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, (str, bytes)) else _token_ids(prompt)
        return self.engine.add(Request(tuple(ids), params))

    def _try_add(self, prompt: Prompt | AlulaError, params: SamplingParams, adopted: list[int]) -> int | RequestOutput:
        """The request's id, which is noted in `adopted`, or why it was refused."""
        try:
            if isinstance(prompt, AlulaError):
                raise prompt
            adopted.append(self._add(prompt, params))
        except AlulaError as error:
            ids = list(prompt) if isinstance(prompt, Seq) and not isinstance(prompt, (str, bytes)) else []
            return RequestOutput(-1, ids, prompt if isinstance(prompt, str) else None, error=str(error))
        return adopted[-1]

    def _try_render(self, conversation: Seq[Message]) -> list[int] | AlulaError:
        try:
            return self.render(conversation)
        except AlulaError as error:
            return error

    def _finish(self, request_id: int, prompt: Prompt | AlulaError) -> RequestOutput:
        """Step until the request ends (others advance too), and take its output."""
        while not self.engine.output(request_id).finished:
            self._step()
        output = self.engine.pop(request_id)
        output.prompt = prompt if isinstance(prompt, str) else None
        return output


def _accepted(output: RequestOutput) -> RequestOutput:
    """Raises AlulaError where the request was refused after it had been added: its grammar does not compile."""
    if output.error is not None:
        raise AlulaError(output.error)
    return output


def _listed(prompts: Prompt | Seq[Prompt]) -> Prompt | Seq[Prompt]:
    """As given, or as a list where it is an array or an iterator. Raises AlulaError for what holds no prompts."""
    if isinstance(prompts, (str, bytes, list, tuple)):
        return prompts
    try:
        if isinstance(prompts, Mapping):
            raise TypeError
        return cast("list[Prompt]", list(prompts))
    except TypeError:
        kind = type(prompts).__name__
        raise AlulaError(f"prompts is a {kind}: give a text, a list of token ids, or a list of those") from None


def _is_prompt(prompts: Prompt | Seq[Prompt]) -> TypeGuard[Prompt]:
    if isinstance(prompts, (str, bytes)) or not len(prompts):
        return isinstance(prompts, (str, bytes))
    try:
        operator.index(cast("int", prompts[0]))
    except TypeError:
        return False
    return True


def _token_ids(prompt: Seq[int]) -> list[int]:
    """Whole numbers of any library as Python's own. Raises AlulaError for anything else."""
    try:
        return [token if isinstance(token, bool) else operator.index(token) for token in prompt]
    except (TypeError, ValueError):
        raise AlulaError(f"prompt is {str(prompt)[:80]!r}: give a text, or a list of token ids") from None


def _one(params: SamplingParams | Seq[SamplingParams] | None) -> SamplingParams:
    if params is None or isinstance(params, SamplingParams):
        return params or SamplingParams()
    return _per_prompt(params, 1)[0]


def _per_prompt(params: SamplingParams | Seq[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, Seq):
        raise AlulaError(f"sampling_params is {params!r}: give SamplingParams, a list of them, or None")
    if len(params) != count:
        raise AlulaError(
            f"sampling_params has {len(params)} entries for {count} prompts: give one for all, or one each"
        )
    return list(params)
