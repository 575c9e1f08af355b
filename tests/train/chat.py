"""A byte tokenizer with chat templates of several make, and a made-up model to write with."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from alula.sequence import SamplingParams
from alula.text import Tokenizer

PLAIN = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] }}<|end|>{% endgeneration %}{% else %}{{ m['content'] }}<|end|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
SPACED = (
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] | trim }} [/INST]"
    "{% else %} {{ m['content'] | trim }} {{ eos_token }}{% endif %}{% endfor %}"
)
"""As in Llama 2: a space before the end token, contents trimmed, no generation prompt."""
CLOSED = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% else %}<|eos|>{% endif %}"
)
"""As in Phi 3: one more token where no generation prompt is wanted, so a shorter conversation is no prefix."""
THINKING = (
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% set parts = m['content'].split('</think>') %}{% if loop.last %}{% if parts | length > 1 %}{{ m['content'] }}"
    "{% else %}<think></think>{{ m['content'] }}{% endif %}{% else %}{{ parts[-1] }}{% endif %}"
    "{% else %}{{ m['content'] }}{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
"""As in Qwen 3: reasoning is kept in the last turn only, and an empty one is put in."""
BLIND = "{% for m in messages %}<|start|>{{ m['content'] | upper }}<|end|>{% endfor %}"
"""Answers look different in the text, so they cannot be found."""


def chat_tokenizer(template: str | None = PLAIN, *, special_end: bool = True) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({token: index for index, token in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    added = [AddedToken(name, special=special_end or name != "<|end|>") for name in ("<|start|>", "<|end|>", "<|eos|>")]
    backend.add_tokens(added)
    return Tokenizer(backend, template, {"eos_token": "<|end|>"})


class Parrot:
    """A model whose turns are a few made-up words, a function of prompt and seed alone; most end by themselves."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int = 40) -> None:
        self.tokenizer = tokenizer
        self.vocabulary = vocabulary
        self.prompts: list[str] = []
        self.params: list[SamplingParams] = []

    def __call__(self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]) -> list[list[int]]:
        self.prompts += [self.tokenizer.decode(prompt, skip_special_tokens=False) for prompt in prompts]
        self.params += params
        return [self._turn(prompt, wanted) for prompt, wanted in zip(prompts, params, strict=True)]

    def _turn(self, prompt: Sequence[int], wanted: SamplingParams) -> list[int]:
        seed = wanted.seed if wanted.temperature else None
        chance = random.Random(f"{list(prompt)}/{seed}")
        text = "".join(f" w{chance.randrange(self.vocabulary)}" for _ in range(chance.randint(1, 6)))
        end = [self.tokenizer.eos_id or 0] if chance.random() < 0.8 else self.tokenizer.encode(" and so on" * 99)
        return [*self.tokenizer.encode(text), *end][: wanted.max_tokens]
