"""The target writes its own training data.

An instruct model that is shown the beginning of a user's turn completes it: that gives the questions. Then it
answers them, some greedily and some at a temperature, as it will be asked to in service.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alula.config import AlulaError
from alula.sequence import SamplingParams
from alula.text import Tokenizer

Generate = Callable[[Sequence[Sequence[int]], Sequence[SamplingParams]], Sequence[Sequence[int]]]
"""(prompts, how to sample each) -> the output tokens of each, the end-of-turn token included where it was said."""

STARTS = (
    *("",) * 10,
    *("What", "How", "Why", "Who", "When", "Where", "Which", "Can you", "Could you", "I want", "I am", "My", "Please"),
    *("Explain", "Describe", "Write a", "Write a short story", "Compose", "Draft an email", "Imagine", "Pretend"),
    *("Write a Python function that", "Write a function", "Implement", "def", "Fix this code"),
    *("Complete the following code:\n\ndef", "Solve", "Calculate", "If", "A store", "There are", "Tom", "Sarah has"),
    *("How many", "Given", "Find", "Convert", "Translate", "Summarize", "Rewrite", "Edit the following", "Classify"),
    *("List", "Name", "Give me three", "Create", "Design", "Suggest", "Compare", "Identify", "Generate", "Provide"),
    *("Help me", "Tell me", "Evaluate", "Analyze", "Determine", "Discuss", "In a", "The", "Let"),
)
"""First words of a user's turn. The empty ones let the model begin by itself; the others spread the subjects."""

_MARK = "\u241fUSER\u241f"


@dataclass(frozen=True)
class SynthConfig:
    """How the conversations are sampled."""

    answer_tokens: int
    """Write until so many answer tokens are in the file."""
    batch: int = 128
    """Conversations asked for at a time."""
    user_tokens: int = 100
    """Longest user turn; turns that do not end by then are dropped."""
    max_answer_tokens: int = 256
    """Longest answer; a longer one is cut there."""
    temperatures: tuple[float, ...] = (0.0, 0.0, 0.0, 0.6, 0.8, 1.0)
    """One is drawn for each answer."""
    top_p: float = 0.95
    """Of the user turns, and of the answers that are sampled."""
    seed: int = 0
    """Decides the beginnings, the temperatures and the noise."""


def write_conversations(path: Path, tokenizer: Tokenizer, generate: Generate, config: SynthConfig) -> int:
    """Append conversations to ``path`` until it holds ``config.answer_tokens`` answer tokens; returns how many it has.

    Each batch is appended in one piece, so an interrupted file is whole lines and is simply continued.
    """
    total, batch = _existing(path)
    while total < config.answer_tokens:
        records = list(_batch(tokenizer, generate, config, batch))
        if not records:
            raise AlulaError("the model never ends a user turn; give it prompts instead (data), or raise user_tokens")
        with path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(record) + "\n" for record in records))
        total += sum(len(record["answer_ids"]) for record in records)
        batch += 1
    return total


def _existing(path: Path) -> tuple[int, int]:
    """(answer tokens, batches) already in the file."""
    if not path.exists():
        return 0, 0
    with path.open(encoding="utf-8") as file:
        records = [json.loads(line) for line in file if line.strip()]
    return sum(len(record["answer_ids"]) for record in records), 1 + max((r["batch"] for r in records), default=-1)


def _batch(tokenizer: Tokenizer, generate: Generate, config: SynthConfig, batch: int) -> Iterator[dict[str, Any]]:
    chance = random.Random(f"{config.seed}/{batch}")
    starts = [chance.choice(STARTS) for _ in range(config.batch)]
    asking = [
        SamplingParams(temperature=1.0, top_p=config.top_p, max_tokens=config.user_tokens, seed=chance.getrandbits(62))
        for _ in starts
    ]
    turns = generate([user_prompt(tokenizer, start) for start in starts], asking)
    questions = [
        start + tokenizer.decode(turn)
        for start, turn, params in zip(starts, turns, asking, strict=True)
        if len(turn) < params.max_tokens
    ]
    prompts = [tokenizer.apply_chat_template([{"role": "user", "content": q}]) for q in questions if q.strip()]
    answering = [_answer_params(config, chance) for _ in prompts]
    answers = generate(prompts, answering) if prompts else []
    for prompt, answer, params in zip(prompts, answers, answering, strict=True):
        if answer:
            yield {
                "prompt_ids": list(prompt),
                "answer_ids": list(answer),
                "temperature": params.temperature,
                "batch": batch,
            }


def _answer_params(config: SynthConfig, chance: random.Random) -> SamplingParams:
    temperature = chance.choice(config.temperatures)
    return SamplingParams(
        temperature=temperature,
        top_p=config.top_p if temperature else 1.0,
        max_tokens=config.max_answer_tokens,
        seed=chance.getrandbits(62),
    )


def user_prompt(tokenizer: Tokenizer, start: str) -> list[int]:
    """The chat template up to the middle of the user's turn, which begins with ``start``."""
    text = tokenizer.render_chat([{"role": "user", "content": _MARK}], add_generation_prompt=False)
    before, found, _ = text.partition(_MARK)
    if not found:
        raise AlulaError(
            "the model's chat template does not show the user's text, so it cannot write its own questions"
        )
    return tokenizer.encode(before + start, add_special_tokens=False)
