"""How conversations are made. Imports nothing heavy: `alula synth --help` and `alula train --help` must be quick."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from alula.bench.tasks import prompt_file
from alula.config import AlulaError
from alula.train.contamination import SHORTEST
from alula.train.dialogue import LEAST_ANSWER, Sampling


@dataclass(frozen=True)
class MakingConfig:
    """What the target is asked, and how its turns are sampled."""

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

    def check(self) -> None:
        """Raises AlulaError, naming the field and the mend."""
        for name, least in (("batch", 1), ("turns", 1), ("user_tokens", 1), ("max_answer_tokens", 1)):
            at_least(name, getattr(self, name), least)
        at_least("ngram", self.ngram, SHORTEST)
        at_least("max_tokens", self.max_tokens, 2 * LEAST_ANSWER)
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
    def sampling(self) -> Sampling:
        return Sampling(self.user_tokens, self.max_answer_tokens, self.max_tokens, self.temperatures, self.top_p)


def at_least(name: str, value: int, least: int) -> None:
    """Raises AlulaError for a value below ``least``."""
    if value < least:
        raise AlulaError(f"{name} is {value}: give a whole number of at least {least}")
