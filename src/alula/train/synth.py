"""The target writes its own training data.

An instruct model that is shown the beginning of a user's turn completes it: that gives the questions. Then it
answers them, some greedily and some at a temperature, as it will be asked to in service. Given prompts and
conversations are answered, rewritten or kept as they are.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING

from alula.bench.tasks import prompt_file
from alula.config import AlulaError
from alula.train.contamination import SHORTEST, Exclusion
from alula.train.dialogue import (
    LEAST_ANSWER,
    Dialogue,
    Generate,
    Sampling,
    Talk,
    select,
    turn_end,
    vocabulary_hash,
)
from alula.train.journal import Journal
from alula.train.lines import BadLines
from alula.train.masks import check_template, find_answers
from alula.train.sources import Source, read_sources
from alula.train.watch import Watch

if TYPE_CHECKING:
    from alula.text import Tokenizer

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

FROM_NOTHING = 300_000
"""Answer tokens that are written without inputs, unless said otherwise."""
PATIENCE = 4
"""Batches in a row that may bring nothing before the model is given up on."""


@dataclass(frozen=True)
class SynthConfig:
    """What is written, and how the target's turns are sampled."""

    answer_tokens: int | None = None
    """Write until so many answer tokens are in the file; None is 300,000 from nothing, and all of the inputs."""
    inputs: tuple[Path, ...] = ()
    """JSON lines of prompts (`prompt`, `question` or `turns`) and conversations (`messages`, or `conversations` as in
    ShareGPT); none lets the model write the user's turns too."""
    rewrite: bool = False
    """Let the model answer conversations anew that have answers; otherwise those are kept as they are."""
    exclude: tuple[str, ...] = ()
    """Benchmark prompts to keep away from: files of JSON lines, or names of alula's own sets."""
    ngram: int = 8
    """So many words in a row in common are an overlap with a benchmark."""
    turns: int = 2
    """Longest conversation, in user's turns; each draws its own length. Turns that are given are all asked."""
    batch: int = 128
    """Conversations written at a time."""
    user_tokens: int = 100
    """Longest user's turn that is written; turns that do not end by then are dropped."""
    max_answer_tokens: int = 256
    """Longest answer; a longer one is cut there."""
    max_tokens: int = 2048
    """Longest conversation."""
    temperatures: tuple[float, ...] = (0.0, 0.0, 0.0, 0.6, 0.8, 1.0)
    """One is drawn for each answer."""
    top_p: float = 0.95
    """Of the user's turns, and of the answers that are sampled."""
    seed: int = 0
    """Decides the beginnings, the temperatures and the noise."""

    def check(self) -> None:
        """Raises AlulaError, naming the field and the mend."""
        for name, least in (("batch", 1), ("turns", 1), ("user_tokens", 1), ("max_answer_tokens", 1)):
            _at_least(name, getattr(self, name), least)
        _at_least("ngram", self.ngram, SHORTEST)
        _at_least("max_tokens", self.max_tokens, 2 * LEAST_ANSWER)
        if self.answer_tokens is not None:
            _at_least("answer_tokens", self.answer_tokens, 1)
        if not self.temperatures or not all(0 <= value < float("inf") for value in self.temperatures):
            raise AlulaError(f"temperatures is {self.temperatures}: give one or more numbers of at least 0")
        if not 0 < self.top_p <= 1:
            raise AlulaError(f"top_p is {self.top_p}: give a number above 0 and at most 1")
        if self.rewrite and not self.inputs:
            raise AlulaError("rewrite is on and there are no inputs: give files of conversations")
        named = [("inputs", path) for path in self.inputs] + [("exclude", prompt_file(name)) for name in self.exclude]
        for name, path in named:
            if not path.is_file():
                raise AlulaError(f"{name}: {path} is no file: check the path")

    @property
    def wanted(self) -> int | None:
        """Answer tokens to write; None for as many as the inputs bring."""
        return FROM_NOTHING if self.answer_tokens is None and not self.inputs else self.answer_tokens

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.user_tokens, self.max_answer_tokens, self.max_tokens, self.temperatures, self.top_p)


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise AlulaError(f"{name} is {value}: give a whole number of at least {least}")


@dataclass(frozen=True)
class Written:
    """What the file holds at the end. dropped: conversations left out, by reason. bad_lines: a sentence per file."""

    conversations: int
    answer_tokens: int
    dropped: dict[str, int]
    bad_lines: tuple[str, ...]


def write_conversations(
    path: Path, tokenizer: Tokenizer, generate: Generate, config: SynthConfig, watch: Watch | None = None
) -> Written:
    """Append conversations to ``path`` until it holds what ``config`` asks for. Given again, it goes on where it was.

    Raises AlulaError for settings, inputs or a chat template that cannot work, and for a file that is not its own.
    """
    config.check()
    watch = watch or Watch()
    check_template(tokenizer)
    turn_end(tokenizer)
    exclusion = read_exclusion(config, watch)
    bad = BadLines(watch.tell)
    lines = _count_inputs(config, bad)
    with Journal(path, vocabulary_hash(tokenizer), watch.tell) as journal:
        watch.begin(answer_tokens=journal.answer_tokens, wanted=config.wanted, inputs=lines)
        writer = _Writer(tokenizer, Talk(tokenizer, generate, config.sampling, exclusion), config, exclusion, bad)
        _write(journal, writer, config, watch)
    return Written(journal.conversations, journal.answer_tokens, dict(journal.dropped), tuple(bad.summary()))


def read_exclusion(config: SynthConfig, watch: Watch) -> Exclusion:
    """The user's turns of all ``exclude`` files. Raises AlulaError for one that cannot be read or holds no prompt."""
    exclusion = Exclusion(config.ngram)
    for name in config.exclude:
        path, bad = prompt_file(name), BadLines(watch.tell)
        texts = [m["content"] for source in read_sources([path], bad) for m in source.messages if m["role"] == "user"]
        if not texts:
            raise AlulaError(f"exclude: {path} holds no prompt: give JSON lines with `turns` or `prompt`")
        exclusion.add(path.stem, texts)
    return exclusion


def _count_inputs(config: SynthConfig, bad: BadLines) -> int | None:
    """How many lines can be used; bad ones are told before hours of work, not after."""
    if not config.inputs:
        return None
    found = sum(1 for _ in read_sources(config.inputs, bad))
    if not found:
        raise AlulaError(f"inputs: no line of {', '.join(map(str, config.inputs))} can be used: give another file")
    return found


def _write(journal: Journal, writer: _Writer, config: SynthConfig, watch: Watch) -> None:
    sources = islice(read_sources(config.inputs, writer.bad), journal.inputs, None)
    barren = 0
    while config.wanted is None or journal.answer_tokens < config.wanted:
        chosen = list(islice(sources, config.batch)) if config.inputs else None
        if chosen == []:
            return
        barren = 0 if writer.write(journal, chosen, watch) else barren + 1
        watch.batch(
            answer_tokens=journal.answer_tokens,
            conversations=journal.conversations,
            inputs=journal.inputs,
            dropped=journal.dropped,
        )
        if chosen is None and barren == PATIENCE:
            raise AlulaError(
                f"{PATIENCE} batches in a row brought nothing ({_reasons(journal.dropped)}): give inputs, or raise "
                "user_tokens where user's turns do not end"
            )


def _reasons(dropped: Counter[str]) -> str:
    return ", ".join(f"{reason}: {number}" for reason, number in dropped.most_common())


class _Writer:
    """Writes one batch after another."""

    def __init__(
        self, tokenizer: Tokenizer, talk: Talk, config: SynthConfig, exclusion: Exclusion, bad: BadLines
    ) -> None:
        self.bad = bad
        self._tokenizer = tokenizer
        self._talk = talk
        self._config = config
        self._exclusion = exclusion

    def write(self, journal: Journal, sources: Sequence[Source] | None, watch: Watch) -> bool:
        """One batch, from sources or from nothing; whether anything of it was kept."""
        dialogues = list(self._dialogues(journal.batch, sources))
        self._talk.hold(dialogues, journal.seen, watch.phase)
        dropped: Counter[str] = Counter()
        records = list(select(dialogues, journal.seen, dropped))
        for dialogue in dialogues:
            if dialogue.source is not None and dialogue.detail:
                self.bad.add(dialogue.source.path, dialogue.source.number, dialogue.detail)
        journal.append(records, inputs=len(sources or ()), dropped=dropped)
        return bool(records)

    def _dialogues(self, batch: int, sources: Sequence[Source] | None) -> Iterator[Dialogue]:
        for index, source in zip(count(), sources or (None,) * self._config.batch, strict=False):
            chance = random.Random(f"{self._config.seed}/{batch}/{index}")
            turns = chance.randint(1, self._config.turns)
            if source is None:
                yield Dialogue(chance, turns, start=chance.choice(STARTS))
            elif source.answered and not self._config.rewrite:
                yield self._kept(chance, source)
            else:
                yield self._asked(chance, turns, source)

    def _asked(self, chance: random.Random, turns: int, source: Source) -> Dialogue:
        dialogue = Dialogue(chance, turns, source=source, messages=source.opening())
        try:
            dialogue.given = deque(source.questions())
        except AlulaError as error:
            dialogue.close("cannot be replayed", str(error))
        return dialogue

    def _kept(self, chance: random.Random, source: Source) -> Dialogue:
        """A conversation whose answers stay as they are."""
        dialogue = Dialogue(chance, 0, source=source, messages=list(source.messages), open=False)
        overlap = next(filter(None, (self._exclusion.overlap(m["content"]) for m in source.messages)), None)
        if overlap:
            dialogue.dropped = f"overlaps with {overlap}"
            return dialogue
        try:
            tokens, spans = find_answers(self._tokenizer, source.messages)
        except AlulaError as error:
            dialogue.close("refused by the chat template", str(error))
            return dialogue
        room = self._config.max_tokens
        dialogue.tokens = tokens[:room]
        dialogue.learned = [(start, min(end, room)) for start, end in spans if start < room]
        if not dialogue.learned:
            dialogue.dropped, dialogue.detail = "prompt too long", f"no answer begins before token {room} (max_tokens)"
        return dialogue
