"""The whole proof: its cells, the oracle, and the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Protocol

from alula.bench.oracle import Oracle
from alula.bench.prove import CellReport, Difference, Prompt, Trial, prove
from alula.bench.report import difference_line, proof_table
from alula.bench.session import Session
from alula.bench.settings import Setting, cells
from alula.engine.config import EngineConfig
from alula.engine.engine import Engine
from alula.engine.request import resolve_seed
from alula.sequence import SamplingParams


class Watcher(Protocol):
    """Somebody who watches a long proof."""

    def announce(self, what: str, more: int = 0) -> None:
        """A new part begins; `more` prompts are added to what is to be done."""

    def tick(self) -> None:
        """One prompt is done."""


@dataclass(frozen=True)
class Plan:
    """config: the base, from which one factor at a time departs; its batch is max_num_seqs."""

    config: EngineConfig
    drafters: tuple[str, ...]
    cell_prompts: int = 6
    combinations: int = 10
    oracle_prompts: int = 2
    oracle_tokens: int = 16

    @property
    def base(self) -> Setting:
        config = self.config
        return Setting(self.drafters[0], config.shape, config.max_num_seqs, config.max_num_batched_tokens)


@dataclass(frozen=True)
class OracleReport:
    prompts: int
    tokens: int
    differences: tuple[Difference, ...]

    def report(self) -> dict[str, object]:
        return {
            "prompts": self.prompts,
            "identical": self.prompts - len(self.differences),
            "tokens": self.tokens,
            "differences": [asdict(difference) for difference in self.differences],
        }


@dataclass(frozen=True)
class Proof:
    setup: dict[str, object]
    cells: tuple[CellReport, ...]
    oracle: OracleReport

    @property
    def holds(self) -> bool:
        return all(cell.holds for cell in self.cells) and not self.oracle.differences

    def report(self) -> dict[str, object]:
        return {
            "setup": self.setup,
            "cells": [cell.report() for cell in self.cells],
            "oracle": self.oracle.report(),
            "identical": self.holds,
        }

    def text(self) -> str:
        oracle = self.oracle
        lines = [proof_table(self.cells), ""]
        lines += [
            difference_line(difference, f"{cell.cell.factor}, {cell.cell.setting.drafter}")
            for cell in self.cells
            for difference in cell.differences
        ]
        lines += [difference_line(difference, "oracle") for difference in oracle.differences]
        lines.append(
            f"oracle without a cache: {oracle.prompts - len(oracle.differences)} of {oracle.prompts} prompts identical "
            f"({oracle.tokens} tokens)"
        )
        if not any(cell.multi_token_commits for cell in self.cells):
            lines.append("no draft token was ever accepted, so this proves nothing: give more prompts or tokens")
        lines.append("identical everywhere" if self.holds else "DIFFERENCES FOUND")
        return "\n".join(lines)


def run_proof(
    session: Session, plan: Plan, prompts: Sequence[Prompt], params: SamplingParams, watcher: Watcher
) -> Proof:
    """Plain decoding once, every cell, then the oracle. A missing seed is drawn once for all."""
    params = replace(params, seed=resolve_seed(params.seed))
    assert params.seed is not None
    chosen = cells(
        plan.base,
        distinct(session, plan.drafters),
        prompts=len(prompts),
        cell_prompts=plan.cell_prompts,
        combinations=plan.combinations,
        max_tokens=params.max_tokens,
        seed=params.seed,
    )
    watcher.announce("plain", len(prompts) + sum(cell.prompts for cell in chosen) + plan.oracle_prompts)

    def make_engine(setting: Setting) -> Engine:
        return session.engine(setting.drafter, _config(plan.config, setting))

    plain, reports = prove(make_engine, chosen, prompts, params, announce=watcher.announce, tick=watcher.tick)
    watcher.announce("oracle")
    oracle = _ask_oracle(session, plan, prompts, plain, params, watcher)
    return Proof(_setup(session, params), tuple(reports), oracle)


def distinct(session: Session, names: Sequence[str]) -> list[str]:
    """The drafters without repeats: `auto` may stand for one that is named as well."""
    found: dict[str, str] = {}
    for name in names:
        key = "random" if name == "random" else session.drafter(name).name
        found.setdefault(key, name)
    return list(found.values())


def _config(base: EngineConfig, setting: Setting) -> EngineConfig:
    return replace(
        base,
        shape=setting.shape,
        max_num_seqs=setting.batch,
        max_num_batched_tokens=setting.chunk,
        enable_prefix_caching=setting.warm,
    )


def _setup(session: Session, params: SamplingParams) -> dict[str, object]:
    names = ("temperature", "top_p", "top_k", "min_p", "max_tokens", "seed")
    return {**session.setup(), "sampling": {name: getattr(params, name) for name in names}}


def _ask_oracle(
    session: Session, plan: Plan, prompts: Sequence[Prompt], plain: Trial, params: SamplingParams, watcher: Watcher
) -> OracleReport:
    oracle, found, tokens = Oracle(session.model, params), list[Difference](), 0
    for index in range(plan.oracle_prompts):
        output = plain.tokens[index][: plan.oracle_tokens]
        difference = oracle.check(index, prompts[index], output)
        found += [] if difference is None else [difference]
        tokens += len(output)
        watcher.tick()
    return OracleReport(plan.oracle_prompts, tokens, tuple(found))
