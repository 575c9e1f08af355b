"""Ablations: the tables, that they go on where they stopped, and that they tell heads apart."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from alula.cli.main import main
from alula.config import AlulaError
from alula.train.ablation import Result, input_arms, loss_arms, run_ablation
from alula.train.ablation_config import AblationConfig
from alula.train.ablation_report import ablation_table
from alula.train.config import Recipe
from alula.train.methods.options import Eagle1Options
from tests.engine.tiny import save_tiny_llama

RECIPE = Recipe(total_tokens=3000, tokens_per_batch=150, warmup_tokens=100, matrix_rate=0.02)


class Heard:
    """A watcher that remembers which heads were trained."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.said: list[str] = []
        self.tokens = 0

    def say(self, sentence: str) -> None:
        self.said.append(sentence)

    def begin(self, what: str, tokens: int) -> None:
        self.begun.append(what)

    def step(self, tokens: int) -> None:
        self.tokens = tokens


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> AblationConfig:
    """Texts of a dozen tokens at random: the token after a feature cannot be told from it."""
    folder = tmp_path_factory.mktemp("ablation")
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(0, 12, (60, 20), generator=generator).tolist()
    lines = [json.dumps({"prompt_ids": text[:4], "answer_ids": text[4:]}) + "\n" for text in texts]
    (folder / "data.jsonl").write_text("".join(lines))
    return AblationConfig(
        output=folder / "table",
        data=(folder / "data.jsonl",),
        model=str(save_tiny_llama(folder / "model", layers=2)),
        seeds=(0,),
        held_out_one_in=5,
        dtype="float32",
        recipe=RECIPE,
        head=Eagle1Options(intermediate_size=64),
    )


def test_only_the_advanced_token_tells_the_next_feature(config: AblationConfig) -> None:
    results = run_ablation("inputs", config, Heard())
    right = {result.arm: result.top1[0] for result in results}
    assert list(right) == [arm.name for arm in input_arms(config.head)]
    blind = max(right["feature"], right["feature + unshifted token"])
    assert min(right["token"], right["feature + advanced token"]) > 1.5 * blind > 0, right
    off = {result.arm: result.losses["loss_regression"] for result in results}
    assert min(off, key=off.__getitem__) == "feature + advanced token", off
    assert all(result.tokens >= RECIPE.total_tokens for result in results)


def test_a_table_goes_on_with_what_is_missing(config: AblationConfig, capsys: pytest.CaptureFixture[str]) -> None:
    run_ablation("inputs", config, Heard())
    path = config.output / "inputs.json"
    whole = json.loads(path.read_text())
    path.write_text(json.dumps({**whole, "results": whole["results"][:3]}))
    heard = Heard()
    assert [vars(result) for result in run_ablation("inputs", config, heard)] == [
        {**values, "alpha": tuple(values["alpha"]), "top1": tuple(values["top1"])} for values in whole["results"]
    ]
    assert heard.begun == ["feature + advanced token, seed 0 (1 of 1)"]
    assert heard.tokens >= RECIPE.total_tokens
    with pytest.raises(AlulaError, match="recipe"):
        run_ablation("inputs", replace(config, recipe=replace(RECIPE, clip=2.0)), Heard())


def test_losses_differ_in_what_they_say(config: AblationConfig) -> None:
    arms = {arm.name: arm.options for arm in loss_arms(Eagle1Options())}
    weights = {name: (o.regression, o.classification, o.noise) for name, o in arms.items()}
    assert weights == {
        "regression only": (1.0, 0.0, 0.1),
        "cross-entropy only": (0.0, 1.0, 0.1),
        "both, lambda 0.01": (1.0, 0.01, 0.1),
        "both, lambda 0.1": (1.0, 0.1, 0.1),
        "both, lambda 1": (1.0, 1.0, 0.1),
        "both, lambda 0.1, no noise": (1.0, 0.1, 0.0),
    }
    short = replace(config, output=config.output.parent / "losses", recipe=replace(RECIPE, total_tokens=200))
    results = {result.arm: result for result in run_ablation("losses", short, Heard())}
    assert list(results) == list(arms)
    assert list(results["regression only"].losses) == ["loss_regression"]
    assert list(results["cross-entropy only"].losses) == ["loss_classification"]
    assert len(results["both, lambda 1"].losses) == 2


def test_the_command_prints_a_table_and_draws_it(config: AblationConfig, capsys: pytest.CaptureFixture[str]) -> None:
    run_ablation("inputs", config, Heard())
    flags = ["--output", str(config.output), "--data", str(config.data[0]), "--model", config.model, "--seeds", "0"]
    flags += ["--held-out-one-in", "5", "--dtype", "float32", "--head.intermediate-size", "64"]
    flags += ["--recipe.total-tokens", "3000", "--recipe.tokens-per-batch", "150", "--recipe.warmup-tokens", "100"]
    assert main(["ablate", "inputs", *flags, "--recipe.matrix-rate", "0.02"]) == 0
    printed = capsys.readouterr().out
    assert "feature + unshifted token" in printed and "4-alpha" in printed
    assert (config.output / "inputs.png").stat().st_size > 5000
    assert main(["ablate", "inputs", "--output", str(config.output)]) == 2
    assert "data is empty" in capsys.readouterr().err


def test_a_table_has_means_and_half_ranges_over_seeds() -> None:
    alpha = (0.5, 0.4, 0.3, 0.2, 0.1)
    results = [Result("one", seed, tuple(a + 0.02 * seed for a in alpha), alpha, 10, {}) for seed in (0, 1)]
    assert "0.510 ±0.010" in ablation_table(results)
    assert "0.500  " in ablation_table(results[:1]) and "±" not in ablation_table(results[:1])
