"""A finished drafter, by its folder alone: service accepts what training expects."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from alula.bench.tasks import as_user_turn
from alula.cli import main
from alula.config import AlulaError
from alula.draft.load import target_provenance
from alula.model.load import LoadedModel, load_model
from alula.train.config import Recipe, Served
from alula.train.data import Conversation
from alula.train.estimate import drafter_folder, options_of, served_and_estimated
from alula.train.features import FeatureStore
from alula.train.methods.method import Setting
from alula.train.methods.options import Eagle1Options, Eagle3Options, LMOptions, MedusaOptions, MethodOptions
from alula.train.methods.select import maker
from alula.train.target import DecoderTarget
from alula.train.trainer import Trainer
from tests.engine.tiny import complete, engine_for, save_tiny_llama

TEXTS = ("one two", "three", "four five six")
OPTIONS: tuple[MethodOptions, ...] = (
    Eagle3Options(draft_vocab_size=240, intermediate_size=64, fc_norm=True, norm_output=True, rope_theta=500.0),
    Eagle1Options(intermediate_size=64),
    MedusaOptions(heads=3, layers=2),
    LMOptions(hidden_size=32, heads=4, intermediate_size=48, layers=2),
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(save_tiny_llama(tmp_path_factory.mktemp("target"), layers=3), dtype="float32")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS))
    return path


def trained(options: MethodOptions, target: LoadedModel, folder: Path) -> Path:
    """A drafter that knows what the target says to the texts."""
    engine, data = engine_for(target), []
    for text in TEXTS:
        prompt = tuple(as_user_turn(target.tokenizer, text))
        answer = complete(engine, prompt, max_tokens=16, ignore_eos=True).outputs[0].token_ids
        data.append(Conversation((*prompt, *answer), (False,) * len(prompt) + (True,) * len(answer)))
    making = maker(options)
    store = FeatureStore(DecoderTarget(target), taps=making.taps(target.config.num_layers), dtype=target.dtype)
    method = making.fresh(Setting(target, store, data, seed=0))
    recipe = Recipe(total_tokens=10**6, tokens_per_batch=120, warmup_tokens=100, matrix_rate=0.02, other_rate=2e-3)
    trainer = Trainer(method, store, recipe, lambda: data, seed=0)
    for _ in range(20):
        trainer.train_step()
    method.export(folder, {"target": target_provenance(target)})
    return folder


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: options.name)
def test_service_accepts_what_training_expects(
    options: MethodOptions, target: LoadedModel, prompts: Path, tmp_path: Path
) -> None:
    folder = trained(options, target, tmp_path / "drafter")
    served = Served(held_out=0, sets=(str(prompts),), tokens=14, nodes=7, depth=3, branch=2, kv_cache_mib=4)
    found = served_and_estimated(target, str(folder), served)
    assert found["prompts"] == len(TEXTS) and found["tau"] > 1.1
    # Both are of the same weights, which are exported in bf16.
    assert found["estimate"]["tau"] == pytest.approx(found["tau"], rel=0.02)
    assert found["served_over_estimate"] == pytest.approx(0, abs=0.02)
    known = vars(options_of(folder, target))
    assert {name: vars(options)[name] for name in ("fc_norm", "heads", "hidden_size", "layers") if name in known} == {
        name: known[name] for name in ("fc_norm", "heads", "hidden_size", "layers") if name in known
    }


def test_the_command(target: LoadedModel, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, output = trained(OPTIONS[2], target, tmp_path / "drafter"), tmp_path / "report.json"
    flags = f"--model {target.checkpoint.folder} --drafter {folder} --dtype fp32 --prompts {prompts} --limit 2"
    tree = f"--max-tokens 8 --nodes 5 --depth 3 --branch 2 --floor 0.01 --kv-cache-mib 4 --output {output}"
    assert main(["bench", "--estimate", *flags.split(), *tree.split()]) == 0
    told = capsys.readouterr().out.splitlines()
    assert "served tau" in told[0] and "prompts" in told[2]
    report = json.loads(told[-1])
    assert report == json.loads(output.read_text())
    assert report["sets"]["prompts"]["prompts"] == 2
    assert report["sets"]["prompts"]["tree"] == {"nodes": 5, "depth": 3, "branch": 2, "floor": 0.01}
    assert main(["bench", "--estimate", *flags.split(), "--temperature", "1"]) == 2


def test_what_was_not_trained_has_no_estimate(target: LoadedModel) -> None:
    for name in ("ngram", "none", "nowhere/at/all"):
        with pytest.raises(AlulaError, match=f"drafter is '{name}', which training knows nothing of"):
            drafter_folder(name, target)
