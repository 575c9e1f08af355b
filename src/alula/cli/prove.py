"""`alula prove`: speculation against plain decoding, token by token. Exit code 1 when anything differs."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from alula.cli.options import JsonOption, ModelOptions, SamplingOptions, check_writable
from alula.cli.progress import Progress
from alula.config import AlulaError

if TYPE_CHECKING:
    from alula.bench.proof import Proof
    from alula.sequence import SamplingParams

DIFFERENT = 1


@dataclass(frozen=True)
class Prove(JsonOption, SamplingOptions, ModelOptions):
    """Compare the token ids of plain decoding with speculation, one factor at a time and in combinations."""

    prompts: tuple[str, ...] = ()
    """Sets of prompts: alula's own by name (default, summaries, forms), or files of JSON lines with `turns` (the first
    is asked) or `prompt`. None is default."""
    limit: int | None = None
    """Only the first so many prompts of each set."""
    drafters: tuple[str, ...] = ()
    """Drafters compared on all prompts; empty is --drafter, ngram and `random` (an EAGLE-3 head of random weights)."""
    batch: int = 4
    """Sequences running at once, where that is not the factor."""
    cell_prompts: int = 6
    """Prompts of each cell that varies another factor than the drafter."""
    full: bool = False
    """All prompts in every cell."""
    combinations: int = 10
    """Cells that combine all factors at random."""
    oracle_prompts: int = 2
    """Prompts held against the oracle, which recomputes everything for every token."""
    oracle_tokens: int = 16
    """Tokens per prompt held against the oracle."""
    raw: bool = False
    """Continue the prompts as they are, without the chat template."""
    output: Path | None = None
    """Write the JSON object to this file too."""

    def run(self) -> int:
        from alula.bench.tasks import read_sets

        self._check()
        params, sets = self.params(), read_sets(self.prompts, self.limit)
        texts = [text for found in sets.values() for text in found]
        proof = self._prove(texts, params)
        report = proof.report()
        if self.output is not None:
            self.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        print(json.dumps(report) if self.json else proof.text())
        return 0 if proof.holds else DIFFERENT

    def _check(self) -> None:
        self.engine_config(max_num_seqs=self.batch)
        if self.rule != "coupled" and self.temperature > 0:
            raise AlulaError(
                "rule 'rejection' promises the distribution, not the text, above temperature 0: prove rule 'coupled'"
            )
        for name, least in (("cell_prompts", 1), ("combinations", 0), ("oracle_prompts", 0), ("oracle_tokens", 1)):
            if getattr(self, name) < least:
                raise AlulaError(f"{name} is {getattr(self, name)}: give a whole number of at least {least}")
        check_writable("output", self.output)

    def _prove(self, texts: list[str], params: SamplingParams) -> Proof:
        target = self.load_target()
        from alula.bench.proof import Plan, run_proof
        from alula.bench.session import RANDOM, Session
        from alula.bench.tasks import as_user_turn

        session = Session(target, self.rule, self.allow_unverified_head)
        if not target.kernels.row_invariant:
            warnings.warn("these kernels are not row-invariant, so texts may differ", stacklevel=2)
        prompts = [tuple(as_user_turn(target.tokenizer, text, raw=self.raw)) for text in texts]
        plan = Plan(
            config=self.engine_config(max_num_seqs=self.batch),
            drafters=self.drafters or (self.drafter, "ngram", RANDOM),
            cell_prompts=len(prompts) if self.full else self.cell_prompts,
            combinations=self.combinations,
            oracle_prompts=min(self.oracle_prompts, len(prompts)),
            oracle_tokens=self.oracle_tokens,
        )
        with Progress("plain", 0) as progress:
            return run_proof(session, plan, prompts, params, progress)
