"""Many prompts through one engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from alula.engine.engine import Engine
from alula.model.load import load_model
from alula.sequence import SamplingParams
from alula.train.data import read_conversations
from alula.train.generate import engine_generate
from alula.train.synth import SynthConfig, write_conversations
from tests.engine.tiny import complete, engine_for, prompt_of, save_tiny_llama


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    model = load_model(str(save_tiny_llama(tmp_path_factory.mktemp("tiny"), layers=2)), dtype="float32")
    return engine_for(model, max_num_seqs=8)


def test_outputs_are_those_of_the_engine_in_order(engine: Engine) -> None:
    prompts = [prompt_of(length, seed=length) for length in (5, 40, 600, 9, 21)]
    params = [SamplingParams(temperature=0.0 if i % 2 else 1.0, seed=i, max_tokens=3 + i) for i in range(5)]
    counted: list[int] = []
    found = engine_generate(engine, counted.append)(prompts, params)
    assert found[2] == []  # longer than the model's context
    for i in (0, 1, 3, 4):
        alone = complete(engine, prompts[i], temperature=params[i].temperature, seed=i, max_tokens=3 + i)
        assert found[i] == alone.outputs[0].token_ids
    assert sum(counted) == sum(map(len, found))


def test_nothing_stays_in_the_engine_after_an_interruption(engine: Engine) -> None:
    def interrupt(count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine_generate(engine, interrupt)([prompt_of(5), prompt_of(6)], [SamplingParams(max_tokens=50)] * 2)
    assert not engine.has_work and not any(engine.knows(i) for i in range(20))


def test_conversations_by_the_real_engine(engine: Engine, tmp_path: Path) -> None:
    """A random model hardly ends a turn, so it answers given ones; its words are in the file as it said them."""
    given, path = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text("".join(f'{{"prompt": "question {i}"}}\n' for i in range(5)))
    config = SynthConfig(inputs=(given,), batch=3, turns=1, temperatures=(0.0,), max_answer_tokens=20, max_tokens=200)
    generate, tokenizer = engine_generate(engine), engine.model.tokenizer
    assert write_conversations(path, tokenizer, generate, config).conversations == 5
    for conversation in read_conversations([path], max_tokens=200, tokenizer=tokenizer):
        start = conversation.learned[0]
        assert tokenizer.decode(conversation.tokens[:start], skip_special_tokens=False).endswith("<|assistant|>")
        greedy = complete(engine, conversation.tokens[:start], max_tokens=20).outputs[0].token_ids
        assert list(conversation.tokens[start:]) == greedy
        assert all(conversation.mask[start:])
