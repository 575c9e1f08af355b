"""Ctrl-C and SIGTERM while training: the step that runs is finished and saved first; a second one stops at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

_NOTED = (signal.SIGINT, signal.SIGTERM)


class Stopped(Exception):
    """A run ended by a signal, with everything saved. Its text is for the user."""

    def __init__(self, number: int, sentence: str) -> None:
        super().__init__(sentence)
        self.number = number

    @property
    def code(self) -> int:
        """The process's exit code: 130 after Ctrl-C, 143 after SIGTERM."""
        return 128 + self.number


class Interruption:
    """Notes the first signal while it is entered. Signals reach the main thread only; elsewhere it notes nothing.

    speaks: say on standard error that the signal was heard.
    """

    def __init__(self, *, speaks: bool) -> None:
        self.number = 0
        """Of the first signal, 0 as long as there was none."""
        self._speaks = speaks
        self._before: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in _NOTED}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        """Runs between two instructions of the training, so it writes past whatever prints there."""
        self.number = number
        self._restore()
        if self._speaks:
            name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            os.write(2, f"\n{name}: finishing the step and saving; once more stops at once\n".encode())

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}
