"""Who is told how the writing of data goes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping


class Watch:
    """Told what happens; this one passes on only what the user should know, as warnings."""

    def tell(self, sentence: str) -> None:
        """Something that was left out or mended."""
        warnings.warn(sentence, stacklevel=2)

    def begin(self, *, answer_tokens: int, wanted: int | None, inputs: int | None) -> None:
        """answer_tokens: in the file already, of the ``wanted`` ones. inputs: lines to go through, if there are any."""

    def phase(self, name: str) -> None:
        """What is being generated: ``questions`` or ``answers``."""

    def tokens(self, count: int) -> None:
        """So many tokens were generated."""

    def batch(self, *, answer_tokens: int, conversations: int, inputs: int, dropped: Mapping[str, int]) -> None:
        """A batch is in the file, which now holds so much; ``inputs`` lines are used up, ``dropped`` left out."""
