"""What may change without changing the text: the factors of a proof, one at a time and combined at random."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from alula.tree import TreeShape

SHAPES = (TreeShape(6, 5, 1), TreeShape(4, 2, 2), TreeShape(12, 3, 8), TreeShape(24, 6, 3))
BATCHES = (1, 3, 8)
CHUNKS = (16, 48)
RARELY = 24
"""New tokens between forced preemptions of a sequence, where outputs are long enough for several."""


@dataclass(frozen=True)
class Setting:
    """One configuration of the engine.

    batch: sequences running at once. chunk: rows of one forward, which cuts long prompts. warm: the prompts
    are run twice and the second run, on the filled prefix cache, is the one compared. preempt_every: each
    sequence loses its cache after so many new tokens; 0 is never.
    """

    drafter: str
    shape: TreeShape
    batch: int = 4
    chunk: int = 256
    warm: bool = False
    preempt_every: int = 0

    def report(self) -> dict[str, object]:
        return asdict(self) | {"shape": self.shape.report()}


@dataclass(frozen=True)
class Cell:
    """One comparison with plain decoding, over the first `prompts` prompts."""

    factor: str
    setting: Setting
    prompts: int


def cells(
    base: Setting,
    drafters: Sequence[str],
    *,
    prompts: int,
    cell_prompts: int,
    combinations: int,
    max_tokens: int,
    seed: int,
) -> list[Cell]:
    """Every drafter on all prompts; each other factor, with the first drafter, on a few; random combinations.

    max_tokens: of one output; forced preemptions come at least about three times in it.
    """
    base, rarely = replace(base, drafter=drafters[0]), max(1, min(RARELY, max_tokens // 4))
    few = min(prompts, cell_prompts)
    varied = [("tree", replace(base, shape=shape)) for shape in _shapes(base) if shape != base.shape]
    varied += [("batch", replace(base, batch=batch)) for batch in BATCHES if batch != base.batch]
    varied += [("chunk", replace(base, chunk=chunk)) for chunk in CHUNKS if chunk != base.chunk]
    varied += [("prefix hit", replace(base, warm=True)), ("preemption", replace(base, preempt_every=rarely))]
    chosen = random.Random(seed)
    varied += [("combination", _random_setting(chosen, base, drafters, rarely)) for _ in range(combinations)]
    return [
        *(Cell("drafter", replace(base, drafter=drafter), prompts) for drafter in drafters),
        *(Cell(factor, setting, few) for factor, setting in varied),
    ]


def _shapes(base: Setting) -> list[TreeShape]:
    """All under the floor that is asked for, so that it is proved with each of them."""
    return [replace(shape, floor=base.shape.floor) for shape in SHAPES]


def _random_setting(chosen: random.Random, base: Setting, drafters: Sequence[str], rarely: int) -> Setting:
    return Setting(
        drafter=chosen.choice(list(drafters)),
        shape=chosen.choice((base.shape, *_shapes(base))),
        batch=chosen.choice((base.batch, *BATCHES)),
        chunk=chosen.choice((base.chunk, *CHUNKS)),
        warm=chosen.random() < 0.5,
        preempt_every=chosen.choice((0, max(1, rarely // 3), rarely)),
    )
