"""Where one output stands in its grammar, and what may follow any path of tokens below it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from xgrammar import CompiledGrammar


class GrammarState:
    """Masks for the nodes of a tree, each on the node's own path; the state itself moves with committed tokens only.

    One matcher serves the whole tree: it goes from path to path by taking back what is not shared and accepting the
    rest, so walking a tree depth first takes one step per edge. Masks are kept until the next commit, since drafting
    and verification ask for the same nodes.

    After a stop token only stop tokens are allowed: an output that goes on regardless (`ignore_eos`) has nothing more
    to say. The matcher never sees them, so there is nothing to take back across the end.
    """

    def __init__(self, compiled: CompiledGrammar, stop_ids: Sequence[int]) -> None:
        from xgrammar import GrammarMatcher

        self.compiled = compiled
        self._matcher = GrammarMatcher(compiled)
        self._words = -(-compiled.tokenizer_info.vocab_size // 32)
        self._stop_ids = frozenset(stop_ids)
        self._ended = False
        self._path: list[int] = []
        self._masks: dict[tuple[int, ...], torch.Tensor] = {}

    def mask(self, path: Sequence[int]) -> torch.Tensor:
        """int32 words of 32 ids each, for the tokens that may follow this path of allowed tokens."""
        key = tuple(path)
        if key not in self._masks:
            self._masks[key] = self._only_stops() if self._ends(key) else self._fill(key)
        return self._masks[key]

    def advance(self, tokens: Sequence[int]) -> None:
        """These tokens were committed, so paths begin after them."""
        self._masks = {}
        if not self._ends(tokens):
            self._go(tokens)
        elif not self._ended:
            self._go(tokens[: next(i for i, token in enumerate(tokens) if token in self._stop_ids)])
            self._ended = True
        self._path = []

    def _ends(self, path: Sequence[int]) -> bool:
        return self._ended or any(token in self._stop_ids for token in path)

    def _fill(self, path: Sequence[int]) -> torch.Tensor:
        import torch

        self._go(path)
        mask = torch.full((1, self._words), -1, dtype=torch.int32)
        self._matcher.fill_next_token_bitmask(mask)
        return mask[0]

    def _go(self, path: Sequence[int]) -> None:
        """Bring the matcher to the end of this path."""
        shared = 0
        while shared < min(len(path), len(self._path)) and path[shared] == self._path[shared]:
            shared += 1
        if shared < len(self._path):
            self._matcher.rollback(len(self._path) - shared)
            del self._path[shared:]
        for token in path[shared:]:
            if not self._matcher.accept_token(token):
                raise RuntimeError(f"the grammar was asked about token {token} after a path that does not allow it")
            self._path.append(token)

    def _only_stops(self) -> torch.Tensor:
        import numpy as np
        import torch

        allowed = np.zeros(32 * self._words, np.uint8)
        allowed[list(self._stop_ids)] = 1
        return torch.from_numpy(np.packbits(allowed, bitorder="little").view("<i4").astype(np.int32))
