"""What a run tells: the ceiling, the picture, the schedules; and the formats it trains in."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from alula.config import AlulaError, ModelConfig
from alula.model.progress import Pace
from alula.train.config import Recipe, Served, TrainConfig
from alula.train.files import write_text, write_whole
from alula.train.methods.options import Eagle3Options
from alula.train.plot import draw
from alula.train.report import Report
from alula.train.throughput import Throughput, matmul_ceiling, measure, reading_flop
from alula.train.trainer import Trainer
from tests.train.support import DRAFT, HIDDEN, SIZES, FakeTarget, conversations, eagle3, store

TARGET = ModelConfig("llama", 40, 16, 24, 3, 4, 2, 8, 128)


def test_the_flop_of_a_token_are_those_of_the_products_by_hand() -> None:
    """One step of the head: each weight costs two FLOP forward and four backward, attention comes on top."""
    target, data = FakeTarget(), conversations(30)
    method = eagle3(target, Eagle3Options(steps=1))
    before = [parameter.clone() for parameter in method.module.parameters()]
    found = measure(method, store(target), data, Recipe(tokens_per_batch=60), TARGET)
    layer = (SIZES.heads + 2 * SIZES.kv_heads) * SIZES.head_dim * 2 * HIDDEN + SIZES.heads * SIZES.head_dim * HIDDEN
    per_token = layer + 3 * HIDDEN * SIZES.intermediate_size + 3 * HIDDEN * HIDDEN + HIDDEN * DRAFT
    assert 6 * per_token < found.flop_per_token - reading_flop(TARGET) < 14 * per_token
    assert all(torch.equal(now, then) for now, then in zip(method.module.parameters(), before, strict=True))
    assert all(parameter.grad is None for parameter in method.module.parameters())
    two = measure(eagle3(target, Eagle3Options(steps=2)), store(target), data, Recipe(tokens_per_batch=60), TARGET)
    assert two.flop_per_token > 1.4 * found.flop_per_token - reading_flop(TARGET)


def test_the_ceiling_is_a_speed_of_products() -> None:
    ceiling = Throughput(flop_per_token=2e6, flop_per_second=matmul_ceiling("fp32"))
    assert 1e8 < ceiling.flop_per_second < 1e15
    assert ceiling.share(ceiling.most_tokens_per_second / 4) == pytest.approx(0.25)
    assert reading_flop(TARGET) == 2 * 3 * ((2 * 4 + 2 * 2) * 8 * 16 + 3 * 16 * 24)


@pytest.mark.parametrize(
    ("schedule", "middle", "end"), [("cosine", 0.55, 0.1), ("linear", 0.55, 0.1), ("constant", 1, 1)]
)
def test_schedules(schedule: str, middle: float, end: float) -> None:
    recipe = Recipe(schedule=schedule, warmup_tokens=100, total_tokens=1100, final_share=0.1)  # type: ignore[arg-type]
    assert [recipe.share(tokens) for tokens in (100, 600, 1100)] == pytest.approx([1.0, middle, end])
    quarter = {"cosine": 0.868, "linear": 0.775, "constant": 1.0}[schedule]
    assert recipe.share(350) == pytest.approx(quarter, abs=0.001)
    assert recipe.share(49) == pytest.approx(50 / 101)


def test_bf16_learns_too_and_its_weights_stay_fp32() -> None:
    target, data = FakeTarget(), conversations(60)
    recipe = Recipe(total_tokens=2000, tokens_per_batch=40, warmup_tokens=100, matrix_rate=0.02)
    found = {}
    for precision in ("fp32", "bf16"):
        chosen = replace(recipe, precision=precision)  # type: ignore[arg-type]
        trainer = Trainer(eagle3(target, Eagle3Options(steps=2)), store(target), chosen, lambda: data, seed=5)
        entries = [trainer.train_step() for _ in range(40)]
        assert entries[-1]["loss_1"] < entries[0]["loss_1"] - 0.3
        assert all(parameter.dtype == torch.float32 for parameter in trainer.method.module.parameters())
        found[precision] = [entry["loss_0"] for entry in entries]
    assert found["bf16"][0] == pytest.approx(found["fp32"][0], rel=0.02)
    assert found["bf16"] != found["fp32"]


def test_a_log_hears_of_the_steps(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    target, data, recipe = FakeTarget(), conversations(20), Recipe(tokens_per_batch=40, total_tokens=1000)
    trainer = Trainer(eagle3(target), store(target), recipe, lambda: data, seed=5)
    throughput = Throughput(flop_per_token=1e6, flop_per_second=1e9)
    monkeypatch.setattr(Pace, "is_due", lambda self: True)
    for speaks in (True, False):
        with Report(speaks) as report:
            report.begin(trainer)
            report.step(trainer, {**trainer.train_step(), "tokens_per_second": 250.0}, throughput)
    told = capsys.readouterr().err
    assert re.fullmatch(r"step 1, \d+ of 1,000 tokens: loss 0 \d+\.\d\d, 250 tokens/s \(25% of the ceiling\)\n", told)


def test_a_gradient_that_is_not_finite_stops_the_run() -> None:
    target, data = FakeTarget(), conversations(20)
    trainer = Trainer(eagle3(target), store(target), Recipe(tokens_per_batch=40), lambda: data, seed=5)
    with torch.no_grad():
        trainer.method.module.get_parameter("fc.weight")[0, 0] = float("nan")
    with pytest.raises(AlulaError, match="gradient of step 1 is not finite"):
        trainer.train_step()


def test_the_picture_is_drawn_whatever_there_is(tmp_path: Path) -> None:
    steps = [
        {"step": n, "tokens": 40 * n, "loss_0": 2 / n, "loss_1": 3 / n, "gradient_norm": 1.0} for n in range(1, 500)
    ]
    served = {"tau": 1.8, "estimate": {"tau": 1.7}}
    evaluations = [{"step": n, "tokens": 40 * n, "evaluation": {"served": served}} for n in (0, 99)]
    sizes = []
    for name, entries in (
        ("none", []),
        ("steps", steps),
        ("all", [*steps, *evaluations, {"step": 9, "evaluation": {}}]),
    ):
        draw(entries, tmp_path / f"{name}.png")  # type: ignore[arg-type]
        content = (tmp_path / f"{name}.png").read_bytes()
        assert content.startswith(b"\x89PNG")
        sizes.append(len(content))
    assert sizes[0] < sizes[1] < sizes[2] and len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Recipe(accumulate=0), "accumulate is 0"),
        (lambda: Recipe(betas=(0.9, 1.0)), "betas is"),
        (lambda: Recipe(matrix_rate=float("nan")), "matrix_rate is nan"),
        (lambda: Recipe(schedule="steps"), "schedule is 'steps': give one of cosine, linear, constant"),  # type: ignore[arg-type]
        (lambda: Recipe(warmup_tokens=1.5), "warmup_tokens is 1.5: give a whole number"),  # type: ignore[arg-type]
        (lambda: Served(tokens=0), "served.tokens is 0"),
        (lambda: TrainConfig(Path(), held_out_one_in=1), "held_out_one_in is 1: give a whole number of at least 2"),
        (lambda: TrainConfig(Path(), features="maybe"), "features is 'maybe'"),  # type: ignore[arg-type]
    ],
)
def test_bad_settings_are_named(make: object, sentence: str) -> None:
    with pytest.raises(AlulaError, match=sentence):
        make()  # type: ignore[operator]


def test_a_file_is_whole_or_not_there(tmp_path: Path) -> None:
    write_text(tmp_path / "a.txt", "one")

    def half(unfinished: Path) -> None:
        unfinished.write_text("tw")
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        write_whole(tmp_path / "a.txt", half)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a.txt", "one")]
