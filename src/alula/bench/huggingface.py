"""Greedy `transformers` generate on the same weights, as an outside measure of plain decoding."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from alula.bench.harness import Spread, quantile
from alula.bench.run import Run, run_one
from alula.config import AlulaError
from alula.engine.engine import Engine
from alula.sequence import SamplingParams


@dataclass(frozen=True)
class Compared:
    """One prompt: alula's plain run, and transformers' seconds and tokens."""

    plain: Run
    seconds: float
    tokens: list[int]

    @property
    def ratio(self) -> float:
        """How many times faster alula's plain decoding is, per token."""
        return (self.seconds / max(len(self.tokens), 1)) / (self.plain.seconds / max(self.plain.tokens, 1))


class HuggingFace:
    """transformers' own generate, with its KV cache, on a checkpoint folder. Raises AlulaError if it cannot load."""

    def __init__(self, folder: Path, dtype: torch.dtype, eos_ids: Sequence[int]) -> None:
        from transformers import AutoModelForCausalLM

        try:
            # from_pretrained leaves the model in evaluation mode
            self._model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype)
        except (OSError, ValueError) as error:
            raise AlulaError(f"transformers cannot load {folder} ({error}): leave --compare-hf out") from None
        self._eos_ids = list(eos_ids)

    def generate(self, prompt: Sequence[int], params: SamplingParams) -> tuple[float, list[int]]:
        """Seconds and output tokens of a greedy run."""
        ids = torch.tensor([list(prompt)])
        start = time.perf_counter()
        with torch.inference_mode():
            found = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=params.max_tokens,
                min_new_tokens=params.max_tokens if params.ignore_eos else None,
                eos_token_id=self._eos_ids or None,
                pad_token_id=(self._eos_ids or [0])[0],
            )
        seconds = time.perf_counter() - start
        return seconds, found[0, len(prompt) :].tolist()


def compare_plain(
    engine: Engine,
    other: HuggingFace,
    prompts: Sequence[tuple[int, ...]],
    params: SamplingParams,
    *,
    progress: Callable[[], None] = lambda: None,
) -> list[Compared]:
    """Per prompt one run of each, first the one and first the other in turn."""
    other.generate(prompts[0], SamplingParams(max_tokens=2))
    found = []
    for index, prompt in enumerate(prompts):
        if index % 2:
            seconds, tokens = other.generate(prompt, params)
            run = run_one(engine, prompt, params)
        else:
            run = run_one(engine, prompt, params)
            seconds, tokens = other.generate(prompt, params)
        found.append(Compared(run, seconds, tokens))
        progress()
    return found


def ratio_spread(found: Sequence[Compared]) -> Spread:
    ratios = [entry.ratio for entry in found]
    theirs = sum(entry.seconds for entry in found) / max(sum(len(entry.tokens) for entry in found), 1)
    ours = sum(entry.plain.seconds for entry in found) / max(sum(entry.plain.tokens for entry in found), 1)
    return Spread(quantile(ratios, 0.5), quantile(ratios, 0.1), quantile(ratios, 0.9), theirs / ours)
