"""The proof holds where it should, and finds every fault that is planted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from alula.bench.oracle import Oracle
from alula.bench.proof import Plan, Proof, run_proof
from alula.bench.prove import CellReport, Difference, first_difference, run_trial
from alula.bench.report import proof_table
from alula.bench.session import Session
from alula.bench.settings import BATCHES, CHUNKS, SHAPES, Setting, cells
from alula.cli import main
from alula.engine.config import EngineConfig
from alula.engine.engine import Engine
from alula.sequence import SamplingParams, StepPlan, Verdict
from alula.tree import DraftTree, TreeShape

PARAMS = SamplingParams(max_tokens=10, seed=1, ignore_eos=True)
CONFIG = EngineConfig(kv_cache_mib=8, max_num_seqs=2, max_num_batched_tokens=64)


class Quiet:
    def announce(self, what: str, more: int = 0) -> None: ...

    def tick(self) -> None: ...


class Faulty(Session):
    """Speculative engines accept the first child wherever there is one, whatever the target says."""

    def engine(self, drafter: str, config: EngineConfig) -> Engine:
        engine = super().engine(drafter, config)
        honest = engine._verify

        def credulous(
            logits_RV: torch.Tensor, trees: Sequence[DraftTree | None], plan: StepPlan
        ) -> list[Verdict | None]:
            verdicts = honest(logits_RV, trees, plan)
            return [
                Verdict((1,), (int(tree.tokens_N[1]), 65), 1) if tree is not None and len(tree) > 1 else verdict
                for tree, verdict in zip(trees, verdicts, strict=True)
            ]

        if drafter != "none":
            engine._verify = credulous
        return engine


def prove_with(session: Session, prompts: Sequence[tuple[int, ...]], params: SamplingParams = PARAMS) -> Proof:
    plan = Plan(CONFIG, ("random",), cell_prompts=2, combinations=2, oracle_prompts=1, oracle_tokens=4)
    return run_proof(session, plan, prompts, params, Quiet())


def test_where_outputs_part() -> None:
    assert first_difference(0, [1, 2], [1, 2]) is None
    assert first_difference(3, [1, 2, 5], [1, 4, 5]) == Difference(3, 1, 2, 4)
    assert first_difference(0, [1], [1, 9]) == Difference(0, 1, None, 9)
    assert first_difference(0, [1, 9], [1]) == Difference(0, 1, 9, None)


def test_one_factor_at_a_time() -> None:
    base = Setting("?", TreeShape(), batch=4)
    found = cells(base, ["a", "b"], prompts=80, cell_prompts=6, combinations=10, max_tokens=128, seed=1)
    start = replace(base, drafter="a")
    assert [(cell.setting.drafter, cell.prompts) for cell in found[:2]] == [("a", 80), ("b", 80)]
    single = [cell for cell in found[2:] if cell.factor != "combination"]
    assert len(single) == len(SHAPES) + len(BATCHES) + len(CHUNKS) + 2
    for cell in single:
        changed = [name for name, value in vars(cell.setting).items() if value != getattr(start, name)]
        assert len(changed) == 1 and cell.prompts == 6
    assert sum(cell.factor == "combination" for cell in found) == 10
    assert found == cells(base, ["a", "b"], prompts=80, cell_prompts=6, combinations=10, max_tokens=128, seed=1)


def test_a_floor_is_proved_with_every_tree() -> None:
    options: Any = {"prompts": 8, "cell_prompts": 6, "combinations": 10, "max_tokens": 128, "seed": 1}
    plain = cells(Setting("?", TreeShape()), ["a", "b"], **options)
    found = cells(Setting("?", TreeShape(floor=0.2)), ["a", "b"], **options)
    assert {cell.setting.shape.floor for cell in found} == {0.2}
    without = [
        replace(cell, setting=replace(cell.setting, shape=replace(cell.setting.shape, floor=0.0))) for cell in found
    ]
    assert without == plain
    setting = found[0].setting
    assert setting.report()["shape"] == {"nodes": 4, "depth": 2, "branch": 3, "floor": 0.2}
    report = CellReport(found[0], "a", 8, 1.0, 0, 0, 0, ())
    assert "4/2/3/0.2" in proof_table([report])
    assert "4/2/3 " in proof_table([replace(report, cell=plain[0])])


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_it_holds(session: Session, prompts: list[tuple[int, ...]], temperature: float) -> None:
    proof = prove_with(session, prompts, replace(PARAMS, temperature=temperature, top_p=0.95))
    assert proof.holds
    report = proof.report()
    assert [cell.identical for cell in proof.cells] == [3] + [2] * (len(proof.cells) - 1)
    assert report["oracle"] == {"prompts": 1, "identical": 1, "tokens": 4, "differences": []}
    by_factor = {cell.cell.factor: cell for cell in proof.cells}
    assert by_factor["prefix hit"].prefix_hit_tokens > 0
    assert by_factor["preemption"].preemptions >= 2 * 3
    assert "identical everywhere" in proof.text()


def test_preemption_is_forced_and_everybody_advances(session: Session, prompts: list[tuple[int, ...]]) -> None:
    setting = Setting("ngram", TreeShape(4, 2, 2), batch=2, chunk=16, preempt_every=3)
    config = replace(CONFIG, shape=setting.shape, max_num_batched_tokens=16)
    trial = run_trial(session.engine("ngram", config), setting, prompts, PARAMS, lambda: None)
    calm = run_trial(session.engine("ngram", config), replace(setting, preempt_every=0), prompts, PARAMS, lambda: None)
    assert trial.preemptions >= 6 and calm.preemptions == 0
    assert trial.tokens == calm.tokens and all(len(tokens) == 10 for tokens in trial.tokens)


def test_a_fault_is_found(session: Session, prompts: list[tuple[int, ...]]) -> None:
    proof = prove_with(Faulty(session.model, "coupled"), prompts)
    assert not proof.holds
    main_cell = proof.cells[0]
    assert main_cell.identical < 3 and main_cell.differences
    difference = main_cell.differences[0]
    assert difference.plain != difference.speculative
    report = json.loads(json.dumps(proof.report()))
    assert report["identical"] is False
    assert report["cells"][0]["differences"][0]["position"] == difference.position
    assert "DIFFERENCES FOUND" in proof.text()
    assert f"position {difference.position}: plain token {difference.plain}" in proof.text()


def test_the_oracle_finds_a_wrong_token(session: Session, prompts: list[tuple[int, ...]]) -> None:
    setting = Setting("none", TreeShape(), batch=1)
    engine = session.engine("none", replace(CONFIG, max_num_seqs=1))
    output = run_trial(engine, setting, prompts[:1], PARAMS, lambda: None).tokens[0][:4]
    oracle = Oracle(session.model, PARAMS)
    assert oracle.check(0, prompts[0], output) is None
    wrong = [*output[:2], (output[2] + 1) % 256, output[3]]
    assert oracle.check(0, prompts[0], wrong) == Difference(0, 2, wrong[2], output[2])


SMALL = ["--limit", "2", "--max-tokens", "6", "--cell-prompts", "1", "--combinations", "1", "--oracle-tokens", "2"]


@pytest.mark.slow
def test_exit_codes(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["prove", "--model", str(tiny_folder), "--dtype", "fp32", "--kv-cache-mib", "8", "--json", *SMALL]
    command += ["--drafters", "random", "--output", str(tmp_path / "proof.json"), "--ignore-eos"]
    assert main(command) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["identical"] is True and found == json.loads((tmp_path / "proof.json").read_text())
    names = {"factor", "prompts", "identical", "tau", "multi_token_commits", "differences"}
    assert all(names <= set(cell) for cell in found["cells"])
    monkeypatch.setattr("alula.bench.session.Session", Faulty)
    assert main(command) == 1
    assert json.loads(capsys.readouterr().out)["identical"] is False


def test_rejection_above_zero_is_refused(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prove", "--model", str(tiny_folder), "--rule", "rejection", "--temperature", "1"]) == 2
    assert "prove rule 'coupled'" in capsys.readouterr().err
