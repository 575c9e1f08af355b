"""`alula synth`: training data, written by the model itself."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from alula.cli.options import JsonOption, ModelOptions, check_writable
from alula.config import AlulaError
from alula.model.progress import Pace
from alula.train.synth import SynthConfig
from alula.train.watch import Watch

if TYPE_CHECKING:
    from alula.text import Tokenizer
    from alula.train.data import Conversation
    from alula.train.synth import Written


@dataclass(frozen=True, kw_only=True)
class Synth(JsonOption, SynthConfig, ModelOptions):
    """Write conversations to train a head on: from nothing, from prompts, or from conversations.

    The same command, given again, goes on where it was interrupted.
    """

    output: Path
    """JSON lines of conversations: messages, token ids, and which of those are learned. Continued if it is there."""
    inspect: int = 0
    """Write nothing; show so many conversations, tokens coloured by what is learned: those of --output, or if it is not
    there those of --inputs."""
    drafter: str = "none"
    """What proposes tokens; many conversations at once fill the processor without."""
    max_num_batched_tokens: int = 512
    """Rows of one target forward; longer prompts are read in chunks."""
    kv_cache_mib: int = 1536
    """Memory of the KV cache, MiB; sequences that do not fit wait or are computed again."""

    def run(self) -> int:
        self.check()
        check_writable("output", self.output)
        if self.inspect:
            return self._inspect()
        self.engine_config(max_num_seqs=self.batch)  # refuses a bad value before the model is loaded
        written = self._write()
        print(json.dumps(asdict(written) | {"output": str(self.output)}) if self.json else written.report(self.output))
        return 0

    def _write(self) -> Written:
        from alula.train.generate import engine_generate
        from alula.train.synth import write_conversations

        llm = self.load_llm(max_num_seqs=self.batch)
        with Bar() as bar:
            generate = engine_generate(llm.engine, bar.tokens)
            return write_conversations(self.output, llm.tokenizer, generate, self, bar)

    def _inspect(self) -> int:
        from rich.console import Console

        from alula.model.load import resolve_dtype
        from alula.model.sources import resolve
        from alula.text import Tokenizer
        from alula.train.inspection import show

        tokenizer = Tokenizer.from_folder(resolve(self.model, resolve_dtype(self.dtype_name)).folder)
        shown = list(islice(self._conversations(tokenizer), self.inspect))
        if not shown:
            raise AlulaError(f"inspect: neither {self.output} nor the inputs hold a conversation with an answer")
        show(shown, tokenizer, Console())
        return 0

    def _conversations(self, tokenizer: Tokenizer) -> Iterator[Conversation]:
        from alula.train.data import read_conversations

        files = (self.output,) if self.output.exists() else self.inputs
        yield from read_conversations(files, max_tokens=self.max_tokens, tokenizer=tokenizer)


class Bar(Watch):
    """Answer tokens and tokens per second on standard error: a bar on a terminal, else a line per batch and minute."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self._console = Console(stderr=True)
        columns = (BarColumn(), TextColumn("{task.fields[figures]}"), TimeElapsedColumn(), TimeRemainingColumn())
        self._bar = Progress(
            TextColumn("{task.description}"),
            *columns,
            console=self._console,
            disable=not self._console.is_terminal,
            transient=True,
        )
        self._task = self._bar.add_task("starting", total=None, figures="")
        self._pace, self._phase = Pace(), "starting"
        self._kept = self._pending = self._generated = 0
        self._wanted: int | None = None
        self._inputs: int | None = None
        self._start = time.monotonic()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def tell(self, sentence: str) -> None:
        self._console.print(f"alula: warning: {sentence}", markup=False, highlight=False, soft_wrap=True)

    def begin(self, *, answer_tokens: int, wanted: int | None, inputs: int | None) -> None:
        self._kept, self._wanted, self._inputs = answer_tokens, wanted, inputs
        self._start = time.monotonic()
        self._bar.update(self._task, total=wanted or inputs)
        self._show(0)

    def phase(self, name: str) -> None:
        self._phase = name
        self._bar.update(self._task, description=name)

    def tokens(self, count: int) -> None:
        self._generated += count
        self._pending += count if self._phase == "answers" else 0
        self._show(0)

    def batch(self, *, answer_tokens: int, conversations: int, inputs: int, dropped: Mapping[str, int]) -> None:
        self._kept, self._pending = answer_tokens, 0
        self._show(inputs)
        if not self._console.is_terminal:
            line = f"{conversations:,} conversations, {self._figures()}, {sum(dropped.values()):,} dropped"
            self._console.print(line, highlight=False, soft_wrap=True)

    def _show(self, inputs: int) -> None:
        done = min(self._kept + self._pending, self._wanted) if self._wanted else inputs
        self._bar.update(self._task, completed=done, figures=self._figures())
        if not self._console.is_terminal and self._pace.is_due():
            self._console.print(f"{self._phase}: {self._figures()}", highlight=False, soft_wrap=True)

    def _figures(self) -> str:
        of = f" of {self._wanted:,}" if self._wanted else ""
        rate = self._generated / max(time.monotonic() - self._start, 1e-3)
        return f"{self._kept + self._pending:,}{of} answer tokens, {rate:,.0f} tokens/s"
