"""Evaluation by the serving path: the exported drafter in the engine, on prompts that it was not trained on.

Beside the served figures stands what training expects of the same drafter, trees and texts (`simulate`). A head that
looks good in training and is rejected in service shows as a gap between the two.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from alula.bench.tasks import as_user_turn, read_prompts
from alula.config import AlulaError
from alula.draft.drafter import Drafter
from alula.draft.load import load_drafter
from alula.draft.neural import NeuralDrafter
from alula.draft.policy import TreePolicy
from alula.engine.config import EngineConfig
from alula.engine.engine import Engine
from alula.engine.metrics import DraftStats
from alula.engine.request import Request, RequestOutput
from alula.model.load import LoadedModel
from alula.sequence import SamplingParams
from alula.train.batch import make_batch
from alula.train.config import Served
from alula.train.data import Conversation
from alula.train.features import FeatureStore
from alula.train.methods.method import Method
from alula.train.simulate import Written, simulate
from alula.tree import TreeShape

Prompt = tuple[int, ...]

_KEPT = ("tau", "acceptance_rate", "accepted_per_drafted", "acceptance_by_depth")


class ServedEvaluation:
    """Serves the same prompts again and again, each time with the drafter in a folder.

    The target is the one that training reads; it is not loaded twice.
    Raises AlulaError for a prompt file that cannot be read, or where no prompt fits the context.
    """

    def __init__(self, model: LoadedModel, held: Sequence[Conversation], config: Served) -> None:
        self._model, self._config = model, config
        self._shape = TreeShape(config.nodes, config.depth, config.branch, config.floor)
        limit = min(model.config.max_position_embeddings, model.decoder.max_positions) - config.tokens
        wanted = [*_held_out(held)[: config.held_out], *_from_sets(model, config)]
        self.prompts = [prompt for prompt in wanted if len(prompt) < limit]
        if wanted and not self.prompts:
            raise AlulaError(f"served: no prompt leaves room for {config.tokens} tokens: lower served.tokens")

    def settings(self) -> dict[str, Any]:
        """What the figures hold for; figures of other settings, or other prompts, cannot be compared."""
        known = hashlib.sha256(repr(self.prompts).encode()).hexdigest()[:16]
        sizes = {"prompts": len(self.prompts), "prompts_hash": known, "tokens": self._config.tokens}
        return {"tree": self._shape.report(), **sizes}

    def run(self, folder: Path, method: Method | None = None, store: FeatureStore | None = None) -> dict[str, Any]:
        """Figures of the drafter in ``folder``; with the method that it was exported from, the estimate beside them."""
        started = time.perf_counter()
        drafter = load_drafter(folder, self._model)
        outputs = self._serve(drafter)
        seconds = time.perf_counter() - started
        stats = _pooled([output.outputs[0].stats for output in outputs])
        figures = {
            **self.settings(),
            **_figures(stats),
            "tokens_per_second": round(stats.committed / seconds, 2),
            "seconds": round(seconds, 2),
        }
        if method is None or store is None:
            return figures
        policy = drafter.policy if isinstance(drafter, NeuralDrafter) else TreePolicy()
        estimate = _pooled([self._estimate(output, method, store, policy) for output in outputs])
        gap = round(stats.tau / estimate.tau - 1, 4) if estimate.tau else 0.0
        return {**figures, "estimate": _figures(estimate), "served_over_estimate": gap}

    def _serve(self, drafter: Drafter) -> list[RequestOutput]:
        config = self._config
        engine = Engine(
            self._model,
            drafter,
            EngineConfig(shape=self._shape, kv_cache_mib=config.kv_cache_mib, enable_prefix_caching=False),
        )
        params = SamplingParams(max_tokens=config.tokens)
        ids = [engine.add(Request(prompt, params)) for prompt in self.prompts]
        while engine.has_work:
            engine.step()
        outputs = [engine.pop(request_id) for request_id in ids]
        for output in outputs:
            if output.outputs[0].error is not None:
                raise AlulaError(f"served: a prompt cannot be served ({output.outputs[0].error})")
        return outputs

    def _estimate(self, output: RequestOutput, method: Method, store: FeatureStore, policy: TreePolicy) -> DraftStats:
        """What training expects for the text that was served."""
        prompt, answer = output.prompt_token_ids, output.outputs[0].token_ids
        written = Written(len(prompt), (*prompt, *answer), self._config.tokens)
        text = Conversation(written.tokens, tuple(place > len(prompt) for place in range(len(written.tokens))))
        if not text.learned:
            return DraftStats()
        branches = method.branches(make_batch([text], store.compute([text])))
        return simulate(written, branches, policy, self._shape)


def _held_out(held: Sequence[Conversation]) -> list[Prompt]:
    """What stands before the first answer of each conversation."""
    return [c.tokens[: c.mask.index(True)] for c in held if True in c.mask and not c.mask[0]]


def _from_sets(model: LoadedModel, config: Served) -> list[Prompt]:
    if not config.prompts:
        return []
    texts = [text for name in config.sets for text in read_prompts(name, config.prompts)]
    return [tuple(as_user_turn(model.tokenizer, text)) for text in texts]


def _pooled(parts: Sequence[DraftStats]) -> DraftStats:
    total = DraftStats()
    for part in parts:
        total.add(part)
    return total


def _figures(stats: DraftStats) -> dict[str, Any]:
    report = stats.report()
    return {name: report[name] for name in _KEPT}
