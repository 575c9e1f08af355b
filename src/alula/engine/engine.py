"""The engine: requests in, token events out, one transaction per step."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from typing import Any

import torch

from alula.cache import CacheLayout, PagedCache
from alula.commit import commit
from alula.config import AlulaError
from alula.draft.drafter import Drafter, root_only_trees
from alula.engine.compiling import Compiling, wanted_of
from alula.engine.config import EngineConfig
from alula.engine.metrics import DraftStats, StepTimes
from alula.engine.request import CompletionOutput, Request, RequestOutput, check_request, resolve_seed
from alula.engine.runner import Runner, Scored
from alula.engine.scheduler import Scheduler
from alula.engine.trace import traced
from alula.grammar import Grammars
from alula.model.load import LoadedModel
from alula.sampling.logprobs import prompt_logprobs
from alula.sequence import FinishReason, Sequence, StepPlan, TokenEvent, Verdict
from alula.text import TextStream
from alula.tree import DraftTree
from alula.verify import load_rule

IDLE_S = 0.005
"""How long a step waits for a grammar when there is nothing else to do."""


class Engine:
    """Continuous batching with speculation. Not thread-safe: one thread adds, aborts and steps.

    model: the loaded target. drafter: what proposes trees.
    Raises AlulaError for an illegal pair of rule and drafter, or a cache too small for one page.
    """

    def __init__(self, model: LoadedModel, drafter: Drafter, config: EngineConfig) -> None:
        self.model = model
        self.drafter = drafter
        self.config = config
        self.max_len = min(config.max_model_len or model.config.max_position_embeddings, model.decoder.max_positions)
        self.cache = _build_cache(model, drafter, config)
        self.scheduler = Scheduler(self.cache, config, self.max_len, drafter.scratch)
        self.times = StepTimes()
        self.totals = DraftStats()
        self.grammars = Grammars(model.tokenizer, model.config.vocab_size, model.eos_ids)
        self._compiling = Compiling(self.grammars)
        self._refused: list[TokenEvent] = []
        self._verify = load_rule(config.rule, drafter, model.kernels)
        self._runner = Runner(model.decoder, self.cache, drafter.taps)
        self._sequences: dict[int, Sequence] = {}
        self._requests: dict[int, RequestOutput] = {}
        self._outputs: dict[int, tuple[int, CompletionOutput]] = {}
        self._added: dict[int, float] = {}
        self._begun: dict[int, StepTimes] = {}
        self._next_id = 0

    @property
    def has_work(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running or len(self._compiling) or self._refused)

    def add(self, request: Request) -> int:
        """Queue a request and return its id. Raises AlulaError for one that can never be served."""
        slots = self.cache.total_pages * self.config.page_size
        vocab = self.model.config.vocab_size
        check_request(request, vocab_size=vocab, max_len=self.max_len, max_slots=slots)
        self._check_drafter(request.speculation.drafter)
        request_id, seed = self._next_id, resolve_seed(request.params.seed)
        sequences = [self._sequence(request_id + sample, request, seed, sample) for sample in range(request.params.n)]
        self._next_id += len(sequences)
        self._queue(request_id, sequences, request)  # before anything knows of it: what raises here leaves nothing
        output = RequestOutput(request_id, list(request.prompt_token_ids))
        if request.params.prompt_logprobs is not None:
            output.prompt_logprobs = [None]
        self._requests[request_id] = output
        self._added[request_id] = time.perf_counter()
        for sequence in sequences:
            self._register(sequence, output)
        return request_id

    def abort(self, request_id: int) -> RequestOutput:
        """End a request at once, with whatever it has; its pages are free when this returns."""
        self.end(request_id)
        return self.pop(request_id)

    def end(self, request_id: int, reason: str | None = None) -> list[TokenEvent]:
        """As `abort`, but the output stays until it is popped; an event, with this stop_reason, per sample ended."""
        running = [sample for sample in self._known(request_id).outputs if sample.finish_reason is None]
        return [self._close(request_id + s.index, FinishReason.ABORT, stop_reason=reason) for s in running]

    def fail(self, sequence_id: int, error: str) -> TokenEvent:
        """End one sample for a fault that is not the request's own."""
        return self._close(sequence_id, FinishReason.ERROR, error=error, fault=True)

    def _close(self, sequence_id: int, reason: FinishReason, **details: Any) -> TokenEvent:
        sequence = self._sequences[sequence_id]
        text = "" if sequence.text is None else sequence.text.finish()
        event = TokenEvent(sequence_id, (), text, finish_reason=reason, **details)
        self._deliver(event)
        return event

    def knows(self, request_id: int) -> bool:
        """Whether the request was added and its output not taken yet."""
        return request_id in self._requests

    def output(self, request_id: int) -> RequestOutput:
        """What a request has produced so far."""
        return self._known(request_id)

    def pop(self, request_id: int) -> RequestOutput:
        """The output of a finished request, which the engine then forgets."""
        output = self._known(request_id)
        if not output.finished:
            raise AlulaError(f"request {request_id} still runs: step until it finishes, or abort it")
        del self._requests[request_id], self._added[request_id]
        self._begun.pop(request_id, None)
        return output

    def step(self) -> list[TokenEvent]:
        """Advance every sequence of one plan; returns what was committed.

        If drafting, the forward or verification raises, no sequence changes, and the next step tries again.
        """
        return self.run(self.plan())

    def plan(self) -> StepPlan:
        with self.times.stage("other"):
            self._take_compiled()
            plan = self.scheduler.plan()
        for item in plan.items:
            request_id = item.sequence.id - item.sequence.sample
            if request_id not in self._begun:
                self._begun[request_id] = self.times.copy()
        return plan

    def run(self, plan: StepPlan, *, drafting: bool = True) -> list[TokenEvent]:
        """Carry out a plan of the scheduler, or some items of it; without `drafting` all trees are their roots."""
        with self.times.step():
            events = self._run(plan, drafting) if plan.items else []
        refused, self._refused = self._refused, []  # not before the step has gone well, which would lose them
        if self.config.check_integrity:
            self.cache.check_integrity()
        return refused + events

    def _run(self, plan: StepPlan, drafting: bool) -> list[TokenEvent]:
        stage = self.times.stage
        with self.cache.begin(self.scheduler.needs(plan)) as txn:
            with stage("draft"):
                trees = self.drafter.draft(plan, txn) if drafting else root_only_trees(plan)
            with stage("tree"):
                packed = self._runner.pack(plan, trees, txn)
            with stage("forward"):
                scored = self._runner.forward(plan, packed)
            with stage("sample"):
                verdicts = self._verify(scored.logits_RV, trees, plan)
            with stage("commit"):
                events = commit(plan, verdicts, scored.features, txn, self.max_len)
        return self._record(plan, trees, verdicts, scored, events)

    def _record(
        self,
        plan: StepPlan,
        trees: Seq[DraftTree | None],
        verdicts: Seq[Verdict | None],
        scored: Scored,
        events: list[TokenEvent],
    ) -> list[TokenEvent]:
        """Counts the step and hands its events out, with traces where they are wanted."""
        self._record_prompts(plan, scored)
        found = {event.sequence_id: event for event in events}
        for item, tree, verdict in zip(plan.items, trees, verdicts, strict=True):
            if tree is not None and verdict is not None and verdict.error is None:
                sequence_id = item.sequence.id
                own = self._outputs[sequence_id][1].stats
                for stats in (self.totals, own):
                    stats.record(tree, verdict, len(found[sequence_id].tokens))
                if item.sequence.traced:
                    found[sequence_id] = traced(found[sequence_id], tree, verdict, own.target_forwards)
        for event in found.values():
            self._deliver(event)
        return list(found.values())

    def _record_prompts(self, plan: StepPlan, scored: Scored) -> None:
        for item, logits in zip(plan.items, scored.prompt_logits, strict=True):
            if logits is not None:
                self._record_prompt(item.sequence, item.chunk.start, logits)

    def _record_prompt(self, sequence: Sequence, start: int, logits: torch.Tensor) -> None:
        known = self._requests[self._outputs[sequence.id][0]].prompt_logprobs
        wanted = sequence.params.prompt_logprobs
        if known is None or wanted is None:
            return
        # Another sample, or this one before a preemption, may have reported some of these rows.
        first = len(known)
        targets = sequence.tokens[first : min(start + 1 + len(logits), sequence.prompt_len)]
        if targets:
            rows = logits[first - start - 1 :]
            known.extend(prompt_logprobs(rows[: len(targets)], targets, wanted))

    def _deliver(self, event: TokenEvent) -> None:
        request_id, output = self._outputs[event.sequence_id]
        self._note(self._requests[request_id], self._sequences[event.sequence_id], bool(event.tokens))
        output.token_ids.extend(event.tokens)
        output.text += event.text
        if event.logprobs is not None:
            output.logprobs = [*(output.logprobs or []), *event.logprobs]
        if event.finish_reason is not None:
            output.finish_reason = event.finish_reason.value
            output.stop_reason, output.error = event.stop_reason, event.error
            if request_id in self._begun:
                self._requests[request_id].times = self.times.since(self._begun[request_id])
            self._drop(event.sequence_id)

    def _note(self, request: RequestOutput, sequence: Sequence, has_tokens: bool) -> None:
        added = self._added[request.request_id]
        request.latency_s = time.perf_counter() - added
        if has_tokens and request.ttft_s is None:
            request.ttft_s = request.latency_s
        if sequence.sample == 0 and sequence.admitted_s is not None:
            request.queue_s, request.cached_tokens = sequence.admitted_s - added, sequence.cached

    def _sequence(self, sequence_id: int, request: Request, seed: int, sample: int) -> Sequence:
        tokenizer, params = self.model.tokenizer, request.params
        return Sequence(
            id=sequence_id,
            prompt_len=len(request.prompt_token_ids),
            tokens=list(request.prompt_token_ids),
            params=params,
            text=TextStream(tokenizer, params),
            seed=seed,
            sample=sample,
            eos_ids=frozenset(self.model.eos_ids),
            bad_words=tokenizer.bad_words(params.bad_words),
            shape=request.speculation.shape(self.config.shape),
            drafter=request.speculation.drafter,
            traced=request.speculation.trace,
            priority=request.priority,
        )

    def _register(self, sequence: Sequence, output: RequestOutput) -> None:
        completion = CompletionOutput(sequence.sample, sequence.seed)
        output.outputs.append(completion)
        self._outputs[sequence.id] = (output.request_id, completion)
        self._sequences[sequence.id] = sequence

    def _queue(self, request_id: int, sequences: list[Sequence], request: Request) -> None:
        wanted = request.params.structured_outputs
        if wanted is not None:
            wanted = wanted_of(self.model.tokenizer, request.prompt_token_ids, wanted)
            self._compiling.add(request_id, sequences, wanted)
            return
        for sequence in sequences:
            self.scheduler.add(sequence)

    def _take_compiled(self) -> None:
        """What has got its grammar joins the queue; what cannot have one is refused."""
        if not len(self._compiling):
            return
        if not self.scheduler.waiting and not self.scheduler.running:
            self._compiling.wait(IDLE_S)
        ready, failed = self._compiling.take()
        for sequence in ready:
            self.scheduler.add(sequence)
        for request_id, error in failed.items():
            self._refused += self._refuse(request_id, error)

    def _refuse(self, request_id: int, error: str) -> list[TokenEvent]:
        output = self._known(request_id)
        running = [sample for sample in output.outputs if sample.finish_reason is None]
        events = [self._close(request_id + s.index, FinishReason.ERROR, error=error) for s in running]
        output.error = error
        output.outputs.clear()
        return events

    def _drop(self, sequence_id: int) -> None:
        sequence = self._sequences.pop(sequence_id)
        self.scheduler.remove(sequence)
        self._compiling.remove(sequence)
        del self._outputs[sequence_id]

    def _check_drafter(self, name: str | None) -> None:
        known = getattr(self.drafter, "names", (self.drafter.name,))
        if name is not None and name not in (*known, "none"):
            raise AlulaError(f"speculation.drafter is {name!r}: give one of {', '.join(sorted({*known, 'none'}))}")

    def _known(self, request_id: int) -> RequestOutput:
        if request_id not in self._requests:
            raise AlulaError(f"request {request_id} is unknown: it was never added, or its output was taken")
        return self._requests[request_id]


def _build_cache(model: LoadedModel, drafter: Drafter, config: EngineConfig) -> PagedCache:
    """As many pages as fit in kv_cache_mib, drafter layers and kept features included."""
    layout = CacheLayout(
        page_size=config.page_size,
        target=model.decoder.kv_shapes,
        drafter=drafter.kv_shapes,
        feature_size=len(drafter.taps) * model.config.hidden_size,
        dtype=model.dtype,
    )
    try:
        return _paged_cache(model, drafter, config, layout)
    except AlulaError as error:
        raise AlulaError(f"kv_cache_mib is {config.kv_cache_mib} and page_size {config.page_size}: {error}") from None


def _paged_cache(model: LoadedModel, drafter: Drafter, config: EngineConfig, layout: CacheLayout) -> PagedCache:
    return PagedCache(
        pages=layout.pages_for(config.kv_cache_mib * 2**20),
        page_size=layout.page_size,
        target=layout.target,
        drafter=layout.drafter,
        feature_size=layout.feature_size,
        dtype=layout.dtype,
        device=model.device,
        drafter_first=drafter.kv_first,
        drafter_name=drafter.name,
        prefix_caching=config.enable_prefix_caching,
    )
