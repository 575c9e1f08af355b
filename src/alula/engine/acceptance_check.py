"""A head that does not say which target it was trained for is measured before it serves.

Taps in another order, a shifted vocabulary map, another RoPE base or another target leave a head that loads and runs,
and whose drafts are hardly ever accepted. The text stays right, so nobody would notice but for the time lost.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from alula.draft.drafter import Drafter
from alula.draft.load import is_unverified_head
from alula.engine.config import EngineConfig
from alula.engine.engine import Engine
from alula.engine.request import Request
from alula.model.load import LoadedModel
from alula.sequence import SamplingParams
from alula.tree import TreeShape

PROMPTS = 6
TOKENS = 16
NEAR_CHANCE = 0.2
"""A weak head has its first guess right in a third of cases or more."""


@dataclass(frozen=True)
class Acceptance:
    """Greedy steps that had a first guess, and those in which it was the target's choice."""

    guesses: int
    right: int

    @property
    def near_chance(self) -> bool:
        return self.right < NEAR_CHANCE * self.guesses


def warn_if_never_accepted(name: str | Path, model: LoadedModel, drafter: Drafter, config: EngineConfig) -> None:
    """Measure the drafter `name` where it is a head without provenance, and warn where it guesses near chance."""
    if not is_unverified_head(name, model.name):
        return
    found = measure_acceptance(model, drafter, config)
    if found.near_chance:
        warnings.warn(
            f"the head in {name} does not fit {model.name!r}: its first guess was the target's choice in only "
            f"{found.right} of {found.guesses} cases; its target, taps (eagle_aux_hidden_state_layer_ids), vocabulary "
            "map (d2t) or RoPE base may be other than those it was trained with",
            stacklevel=3,
        )


def measure_acceptance(model: LoadedModel, drafter: Drafter, config: EngineConfig) -> Acceptance:
    """A few tokens of a few shipped prompts, greedily, with one guess per step, in an engine of their own.

    config: of the engine that the drafter is meant for; its cache size and rule are used.
    """
    engine = Engine(
        model,
        drafter,
        EngineConfig(
            rule=config.rule,
            shape=TreeShape(nodes=2, depth=1, branch=1),
            max_num_seqs=PROMPTS,
            page_size=config.page_size,
            kv_cache_mib=config.kv_cache_mib,
            enable_prefix_caching=False,
        ),
    )
    tokens = min(TOKENS, engine.max_len // 2)
    for prompt in _prompts(model, engine.max_len - tokens):
        engine.add(Request(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True)))
    while engine.has_work:
        engine.step()
    return Acceptance(engine.totals.checked, engine.totals.accepted)


def _prompts(model: LoadedModel, longest: int) -> Sequence[tuple[int, ...]]:
    """Spread over the shipped set, which is ordered by kind."""
    lines = files("alula").joinpath("prompts", "default.jsonl").read_text(encoding="utf-8").splitlines()
    turns = [json.loads(line)["turns"][0] for line in lines[:: len(lines) // PROMPTS]]
    tokenizer = model.tokenizer
    if tokenizer.chat_template is None:
        return [tuple(tokenizer.encode(turn)[:longest]) for turn in turns]
    chats = [tokenizer.apply_chat_template([{"role": "user", "content": turn}]) for turn in turns]
    return [tuple(chat[-longest:]) for chat in chats]
