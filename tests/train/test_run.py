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
from alula.train.config import Recipe, TrainConfig
from alula.train.features import FeatureStore
from alula.train.methods.options import Eagle3Options
from alula.train.run import run
from alula.train.target import DecoderTarget
from tests.engine.tiny import save_tiny_llama
from tests.train.support import conversations


def test_a_run_its_continuation_and_the_head_in_service(tmp_path: Path) -> None:
    folder = save_tiny_llama(tmp_path / "model", layers=3)
    data = tmp_path / "data.jsonl"
    lines = [
        {"prompt_ids": c.tokens[: c.learned[0]], "answer_ids": c.tokens[c.learned[0] :]} for c in conversations(40)
    ]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    recipe = Recipe(total_tokens=300, tokens_per_batch=40, warmup_tokens=40)
    config = TrainConfig(
        output=tmp_path / "run",
        model=str(folder),
        data=(data,),
        method=Eagle3Options(steps=3, draft_vocab_size=24, intermediate_size=32),
        held_out_one_in=5,
        dtype="float32",
        recipe=recipe,
    )
    run(config)
    first = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    run(replace(config, recipe=replace(recipe, total_tokens=600)))
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    steps = [entry["step"] for entry in log if "loss_0" in entry]
    assert steps == list(range(1, steps[-1] + 1)) and len(log) > len(first)
    drafter = load_drafter(tmp_path / "run" / "head", load_model(str(folder), dtype="float32"))
    assert drafter.name == "eagle3"
    _check_going_on_from_the_head(replace(config, recipe=replace(recipe, total_tokens=1)), tmp_path)


def _check_going_on_from_the_head(config: TrainConfig, folder: Path) -> None:
    """A run that starts from an exported head and makes one tiny step exports nearly that head."""
    still = replace(config.recipe, matrix_rate=0.0, other_rate=0.0)
    start = folder / "run" / "head"
    other = replace(config.method, draft_vocab_size=5)
    run(replace(config, output=folder / "on", start_from=start, method=other, recipe=still))
    before, after = (read_head(folder / name / "head").weights for name in ("run", "on"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=0.01, atol=1e-6)
    narrow = replace(config, output=folder / "off", start_from=start, method=replace(other, intermediate_size=16))
    with pytest.raises(AlulaError, match="intermediate_size"):
        run(narrow)


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
