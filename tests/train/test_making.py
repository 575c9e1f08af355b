"""What `alula train` is told of data making is what `alula synth` would be told."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from alula.cli import main
from alula.config import AlulaError
from alula.train import run as training
from alula.train.config import TrainConfig
from alula.train.making import MakingConfig
from alula.train.provenance import provenance_of
from alula.train.synth import SynthConfig
from tests.engine.tiny import save_tiny_llama


class Asked(Exception):
    """Carries the settings that data would be made with."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny") / "model", layers=2)


def test_every_setting_reaches_synth(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(path: Path, tokenizer: object, generate: object, config: SynthConfig, watch: object) -> None:
        raise Asked(path, config)

    monkeypatch.setattr(training, "write_conversations", ask)
    given = tmp_path / "given.jsonl"
    given.write_text('{"prompt": "a"}\n')
    flags = (
        f"train --output {tmp_path / 'run'} --model {model} --dtype float32 --answer-tokens 77 --seed 5 "
        f"--synth.inputs {given} --synth.rewrite --synth.exclude forms {given} --synth.ngram 9 --synth.turns 4 "
        "--synth.batch 3 --synth.user-tokens 11 --synth.max-answer-tokens 22 --synth.max-tokens 333 "
        "--synth.temperatures 0.5 0.7 --synth.top-p 0.9 medusa --heads 2"
    )
    with pytest.raises(Asked) as asked:
        main(flags.split())
    path, config = asked.value.args
    assert path == tmp_path / "run" / "data.jsonl"
    assert (config.answer_tokens, config.seed, config.inputs, config.exclude) == (
        77,
        5,
        (given,),
        ("forms", str(given)),
    )
    assert (config.temperatures, config.top_p, config.turns, config.batch) == ((0.5, 0.7), 0.9, 4, 3)
    plain = SynthConfig()
    assert all(getattr(config, field.name) != getattr(plain, field.name) for field in fields(plain))


def test_settings_are_checked_before_anything(tmp_path: Path) -> None:
    config = TrainConfig(tmp_path / "run", synth=MakingConfig(exclude=("nowhere.jsonl",)))
    with pytest.raises(AlulaError, match=r"exclude: nowhere\.jsonl is no file"):
        training.run(config)
    assert not config.output.exists()
    with pytest.raises(AlulaError, match="synth says how data is written, and data is given"):
        replace(config, data=(tmp_path / "data.jsonl",))


def test_provenance_says_how_data_was_made(tmp_path: Path, model: Path) -> None:
    from alula.model.load import load_model

    target = load_model(model, dtype="float32")
    made = provenance_of(TrainConfig(tmp_path, synth=MakingConfig(inputs=(tmp_path / "a.jsonl",))), target, (), {})
    given = provenance_of(TrainConfig(tmp_path, data=(tmp_path / "b.jsonl",)), target, (), {})
    assert json.loads(json.dumps(made))["synth"]["inputs"] == [str(tmp_path / "a.jsonl")]
    assert given["synth"] is None and given["device"] == "cpu"
