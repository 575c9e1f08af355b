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
from alula.train.contamination import Exclusion
from alula.train.dialogue import (
    Dialogue,
    Generate,
    Talk,
    select,
    turn_end,
    vocabulary_hash,
)
from alula.train.journal import Journal
from alula.train.lines import BadLines
from alula.train.making import MakingConfig, at_least
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
class SynthConfig(MakingConfig):
    """What is written, how much of it, and how the target's turns are sampled."""

    answer_tokens: int | None = None
    """Write until so many answer tokens are in the file; None is 300,000 from nothing, and all of the inputs."""
    seed: int = 0
    """Decides the beginnings, the temperatures and the noise."""

    def check(self) -> None:
        """Raises AlulaError, naming the field and the mend."""
        super().check()
        if self.answer_tokens is not None:
            at_least("answer_tokens", self.answer_tokens, 1)

    @property
    def wanted(self) -> int | None:
        """Answer tokens to write; None for as many as the inputs bring."""
        return FROM_NOTHING if self.answer_tokens is None and not self.inputs else self.answer_tokens


@dataclass(frozen=True)
class Written:
    """What the file holds at the end. dropped: conversations left out, by reason. bad_lines: a sentence per file."""

    conversations: int
    answer_tokens: int
    dropped: dict[str, int]
    bad_lines: tuple[str, ...]

    def report(self, path: Path) -> str:
        """For the user. path: the file."""
        lines = [f"{path} holds {self.conversations:,} conversations with {self.answer_tokens:,} answer tokens"]
        if self.dropped:
            reasons = ", ".join(f"{number:,} {reason}" for reason, number in sorted(self.dropped.items()))
            lines.append(f"dropped: {reasons}")
        return "\n".join([*lines, *self.bad_lines])


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
