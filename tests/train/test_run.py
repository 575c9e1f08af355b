"""The whole way, on a tiny random model: data file, features, training, resuming, a head that serves."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from alula.config import AlulaError
from alula.draft.dialects import read_head
from alula.draft.load import load_drafter
from alula.model.load import load_model
from alula.train.config import Served, TrainConfig
from alula.train.features import FeatureStore
from alula.train.logs import read_log
from alula.train.run import run
from alula.train.target import DecoderTarget
from tests.engine.tiny import save_tiny_llama
from tests.train.support import conversations
from tests.train.tiny_run import tiny_run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny") / "model", layers=3)


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(entry["step"], entry["loss_2"]) for entry in read_log(folder / "log.jsonl") if "loss_2" in entry]


def test_a_run_its_continuation_and_the_head_in_service(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served = Served(held_out=2, prompts=0, tokens=12, nodes=6, depth=3, branch=2, kv_cache_mib=8)
    config = tiny_run(tmp_path, model, evaluate_steps=4, served=served)
    config = replace(config, recipe=replace(config.recipe, total_tokens=300))
    run(config)
    told = capsys.readouterr().err
    assert "cover" in told and "of the held-out answers" in told and "GFLOP/s: at most" in told and "served tau" in told
    first = losses(config.output)
    longer = replace(config.recipe, total_tokens=600)
    with pytest.raises(AlulaError, match=r"recipe.total_tokens 300, and this run's is 600.*--change"):
        run(replace(config, recipe=longer))
    run(replace(config, recipe=longer, change=("recipe.total_tokens",)))
    steps = [step for step, _ in losses(config.output)]
    assert steps == list(range(1, steps[-1] + 1)) and len(steps) > len(first)
    assert load_drafter(config.output / "head", load_model(str(model), dtype="float32")).name == "eagle3"
    _check_evaluations(config, first[-1][0])
    still = replace(config.recipe, total_tokens=1, matrix_rate=0.0, other_rate=0.0)
    _check_going_on_from_the_head(replace(config, recipe=still), tmp_path)


def _check_evaluations(config: TrainConfig, steps: int) -> None:
    """In the log, in the provenance of what was kept, and as a picture."""
    evaluations = [entry for entry in read_log(config.output / "log.jsonl") if "evaluation" in entry]
    assert [entry["step"] for entry in evaluations][:3] == [0, 4, steps if steps < 8 else 8]
    served = [entry["evaluation"]["served"] for entry in evaluations]
    for figures in served:
        assert figures["tau"] >= 1 and figures["tree"] == {"nodes": 6, "depth": 3, "branch": 2}
        assert figures["tau"] == pytest.approx(figures["estimate"]["tau"], rel=0.05)
    best = max(figures["tau"] for figures in served)
    for name, tau in (("head", best), ("last", served[-1]["tau"])):
        training = json.loads((config.output / name / "provenance.json").read_text())["training"]
        assert training["evaluation"]["served"]["tau"] == tau
    assert (config.output / "training.png").read_bytes().startswith(b"\x89PNG")


def _check_going_on_from_the_head(config: TrainConfig, folder: Path) -> None:
    """A run that starts from an exported head and makes one tiny step exports nearly that head."""
    start = folder / "run" / "head"
    other = replace(config.method, draft_vocab_size=5)
    run(replace(config, output=folder / "on", start_from=start, method=other))
    before, after = (read_head(folder / name).weights for name in ("run/head", "on/last"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=0.01, atol=1e-6)
    narrow = replace(config.method, intermediate_size=16)
    with pytest.raises(AlulaError, match="intermediate_size"):
        run(replace(config, output=folder / "off", start_from=start, method=narrow))


def test_packed_texts_have_the_states_of_single_ones(tmp_path: Path) -> None:
    model = load_model(str(save_tiny_llama(tmp_path / "model", layers=3)), dtype="float32")
    target, chosen = DecoderTarget(model), conversations(5)
    together = target.states([c.tokens for c in chosen], (0, 1, 2))
    for conversation, (taps, hidden) in zip(chosen, together, strict=True):
        ((alone_taps, alone_hidden),) = target.states([conversation.tokens], (0, 1, 2))
        assert torch.equal(taps, alone_taps)
        assert torch.equal(hidden, alone_hidden)
    tokens = torch.tensor(chosen[0].tokens)
    width = target.embedding_VD.shape[1]
    assert torch.equal(together[0][0][:, :width], target.embedding_VD[tokens])
    features = FeatureStore(target, taps=(0, 1, 2), dtype=torch.float32).get(chosen[:1])[0]
    logits = model.decoder.logits(features.hidden_MD)
    assert torch.equal(features.choice_M, logits.argmax(-1))
