"""Conversations in the making: the target completes the user's turns that are not given, and answers all of them."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from alula.config import AlulaError
from alula.train.contamination import Exclusion
from alula.train.journal import Record, keys, record_of
from alula.train.masks import Span, turn_ends
from alula.train.sources import Message, Source

if TYPE_CHECKING:
    from alula.sequence import SamplingParams
    from alula.text import Tokenizer

Generate = Callable[[Sequence[Sequence[int]], "Sequence[SamplingParams]"], Sequence[Sequence[int]]]
"""(prompts, how to sample each) -> the output tokens of each, the end-of-turn token included where it was said.

A prompt that is refused has no tokens.
"""

LEAST_ANSWER = 16
"""Tokens an answer must have room for."""

_MARK = "\u241fUSER\u241f"


@dataclass
class Dialogue:
    """One conversation so far.

    given: user's turns still to be asked. turns: how many there shall be. start: first words of a turn the model
    completes. tokens, learned: of the messages so far, as the model read and wrote them. dropped: why it is not kept,
    in a word or two; detail: more of that.
    """

    chance: random.Random
    turns: int
    start: str = ""
    source: Source | None = None
    messages: list[Message] = field(default_factory=list)
    given: deque[str] = field(default_factory=deque)
    tokens: list[int] = field(default_factory=list)
    learned: list[Span] = field(default_factory=list)
    temperatures: list[float] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    open: bool = True
    dropped: str | None = None
    detail: str = ""

    @property
    def asked(self) -> int:
        return sum(message["role"] == "user" for message in self.messages)

    def close(self, reason: str, detail: str = "") -> None:
        """It ends before this turn; if it has no answer yet, it is dropped for that reason."""
        self.open, self.detail = False, detail
        if self.messages and self.messages[-1]["role"] == "user":
            self.messages.pop()
        if not self.learned and not self.records:
            self.dropped = reason

    def take(self, prompt: Sequence[int], answer: Sequence[int], text: str, temperature: float, hash_: str) -> None:
        """The answer to the last user's turn. What was learned before stays only where the prompt repeats it."""
        if self.learned and list(prompt[: len(self.tokens)]) != self.tokens:
            self.finish(hash_)
        self.tokens = [*prompt, *answer]
        self.learned = [*self.learned, (len(prompt), len(self.tokens))]
        self.temperatures = [*self.temperatures, temperature]
        self.messages.append({"role": "assistant", "content": text})

    def finish(self, hash_: str) -> None:
        """Make a record of what is learned."""
        if self.learned:
            answered = self.messages[: 1 + max(i for i, m in enumerate(self.messages) if m["role"] == "assistant")]
            record = record_of(answered, self.tokens, self.learned, hash_, temperatures=self.temperatures)
            self.records.append(record)
        self.tokens, self.learned, self.temperatures = [], [], []


@dataclass(frozen=True)
class Sampling:
    """How turns are sampled; the fields are those of `SynthConfig`."""

    user_tokens: int
    max_answer_tokens: int
    max_tokens: int
    temperatures: tuple[float, ...]
    top_p: float


class Talk:
    """Writes the dialogues of a batch, all their turns at a time."""

    def __init__(self, tokenizer: Tokenizer, generate: Generate, sampling: Sampling, exclusion: Exclusion) -> None:
        self._tokenizer = tokenizer
        self._generate = generate
        self._sampling = sampling
        self._exclusion = exclusion
        self._stop_ids, self._stop = turn_end(tokenizer)
        self._ends = turn_ends(tokenizer)
        self._hash = vocabulary_hash(tokenizer)

    def hold(self, dialogues: Sequence[Dialogue], seen: Container[bytes], phase: Callable[[str], None]) -> None:
        """Fill all dialogues. seen: keys (`keys`) of conversations that are not wanted again."""
        asked: set[bytes] = set()
        while active := [dialogue for dialogue in dialogues if dialogue.open]:
            phase("questions")
            self._ask(active)
            for dialogue in active:
                self._check_question(dialogue, seen, asked)
            phase("answers")
            self._answer([dialogue for dialogue in active if dialogue.open])
        for dialogue in dialogues:
            dialogue.finish(self._hash)

    def _ask(self, dialogues: Sequence[Dialogue]) -> None:
        """Each gets its next user's turn as last message, the given ones first; without one it is closed."""
        writing = [dialogue for dialogue in dialogues if not dialogue.given]
        for dialogue in dialogues:
            if dialogue.given:
                dialogue.messages.append({"role": "user", "content": dialogue.given.popleft()})
        prompts = [user_prompt(self._tokenizer, d.start, d.messages) for d in writing]
        turns = self._generate(prompts, [self._asking(dialogue) for dialogue in writing]) if writing else []
        for dialogue, turn in zip(writing, turns, strict=True):
            text, ended = self._user_text(turn)
            question = (dialogue.start + text).strip()
            dialogue.start = ""
            if ended and question:
                dialogue.messages.append({"role": "user", "content": question})
            else:
                dialogue.close("user's turn empty" if ended else "user's turn not ended")

    def _user_text(self, turn: Sequence[int]) -> tuple[str, bool]:
        """(text, whether the turn was ended) of generated tokens."""
        text = self._tokenizer.decode(turn)
        ended = bool(turn) and turn[-1] in self._ends
        for stop in self._stop:
            text, found, _ = text.partition(stop)
            ended = ended or bool(found)
        return text, ended

    def _check_question(self, dialogue: Dialogue, seen: Container[bytes], asked: set[bytes]) -> None:
        if not dialogue.open:
            return
        *before, last = [m["content"] for m in dialogue.messages if m["role"] == "user"]
        (key,) = keys(dialogue.messages) if not before else (b"",)
        overlap = self._exclusion.overlap(last)
        if last in before or (key and (key in seen or key in asked)):
            dialogue.close("repeats")
        elif overlap:
            dialogue.close(f"overlaps with {overlap}")
        elif key:
            asked.add(key)

    def _answer(self, dialogues: Sequence[Dialogue]) -> None:
        prompts, params, ready = [], [], []
        for dialogue in dialogues:
            prompt = self._prompt(dialogue)
            if prompt is not None:
                ready.append(dialogue)
                prompts.append(prompt)
                params.append(self._answering(dialogue, len(prompt)))
        answers = self._generate(prompts, params) if ready else []
        for dialogue, prompt, answer, wanted in zip(ready, prompts, answers, params, strict=True):
            self._take(dialogue, prompt, answer, wanted.temperature)

    def _prompt(self, dialogue: Dialogue) -> list[int] | None:
        """Closes the dialogue where there is none."""
        try:
            prompt = self._tokenizer.apply_chat_template(dialogue.messages)
        except AlulaError as error:
            dialogue.close("refused by the chat template", str(error))
            return None
        if len(prompt) + LEAST_ANSWER > self._sampling.max_tokens:
            room = self._sampling.max_tokens - LEAST_ANSWER
            dialogue.close("prompt too long", f"it has {len(prompt)} tokens, and max_tokens leaves room for {room}")
            return None
        return prompt

    def _take(self, dialogue: Dialogue, prompt: list[int], answer: Sequence[int], temperature: float) -> None:
        text = self._tokenizer.decode(answer)
        overlap = self._exclusion.overlap(text)
        if not answer or not text.strip():
            dialogue.close("answer empty")
        elif overlap:
            dialogue.close(f"overlaps with {overlap}")
        else:
            dialogue.take(prompt, answer, text, temperature, self._hash)
            more = dialogue.given or dialogue.asked < dialogue.turns
            # An answer that was cut off has no end of turn, so nothing can follow it.
            dialogue.open = bool(more) and answer[-1] in self._ends

    def _asking(self, dialogue: Dialogue) -> SamplingParams:
        from alula.sequence import SamplingParams

        return SamplingParams(
            temperature=1.0,
            top_p=self._sampling.top_p,
            max_tokens=self._sampling.user_tokens,
            seed=dialogue.chance.getrandbits(62),
            stop=self._stop,
            stop_token_ids=self._stop_ids,
        )

    def _answering(self, dialogue: Dialogue, prompt: int) -> SamplingParams:
        from alula.sequence import SamplingParams

        temperature = dialogue.chance.choice(self._sampling.temperatures)
        return SamplingParams(
            temperature=temperature,
            top_p=self._sampling.top_p if temperature else 1.0,
            max_tokens=min(self._sampling.max_answer_tokens, self._sampling.max_tokens - prompt),
            seed=dialogue.chance.getrandbits(62),
        )


def select(dialogues: Sequence[Dialogue], seen: Container[bytes], dropped: Counter[str]) -> Iterator[Record]:
    """Records of the dialogues that are kept, in order; the others are counted by reason."""
    taken: set[bytes] = set()
    for dialogue in dialogues:
        names = keys(dialogue.messages) if dialogue.records else []
        if dialogue.dropped is not None:
            dropped[dialogue.dropped] += 1
        elif any(name in seen or name in taken for name in names):
            dropped["repeats"] += 1
        else:
            taken.update(names)
            yield from dialogue.records


def vocabulary_hash(tokenizer: Tokenizer) -> str:
    """What token ids mean: 16 hex digits, the same for tokenizers with the same vocabulary."""
    return tokenizer.hashes["vocabulary"][:16]


def user_prompt(tokenizer: Tokenizer, start: str, history: Sequence[Message] = ()) -> list[int]:
    """The chat template up to the middle of the user's turn that follows ``history`` and begins with ``start``."""
    before, _ = _around_user(tokenizer, history, add_generation_prompt=False)
    return tokenizer.encode(before + start, add_special_tokens=False)


def turn_end(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """(token ids, texts) that end a user's turn in the chat template, whatever the model's own end tokens are."""
    _, after = _around_user(tokenizer, (), add_generation_prompt=True)
    ids = tokenizer.encode(after.strip(), add_special_tokens=False)
    special = next((i for i, token in enumerate(ids) if token in tokenizer.special_ids), len(ids))
    text = tokenizer.decode(ids[:special]).strip()
    return tuple(ids[:1] if special == 0 else ()), (text,) if text else ()


def _around_user(tokenizer: Tokenizer, history: Sequence[Message], *, add_generation_prompt: bool) -> tuple[str, str]:
    messages = [*history, {"role": "user", "content": _MARK}]
    text = tokenizer.render_chat(messages, add_generation_prompt=add_generation_prompt)
    before, found, after = text.partition(_MARK)
    if not found:
        raise AlulaError(
            "the model's chat template does not show the user's text, so it cannot write its own questions"
        )
    return before, after
