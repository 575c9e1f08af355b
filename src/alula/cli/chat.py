"""`alula chat`: a conversation. Earlier turns stay in the prefix cache, so each answer starts at once."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from alula.cli.generate import figures_line, result, write
from alula.cli.options import JsonOption, ModelOptions, SamplingOptions
from alula.config import AlulaError

if TYPE_CHECKING:
    from alula.engine.llm import LLM
    from alula.sequence import SamplingParams

_HELP = "/reset starts anew, /exit (or Ctrl-D) ends, Ctrl-C stops an answer."


@dataclass(frozen=True)
class Chat(JsonOption, SamplingOptions, ModelOptions):
    """Talk with the model, turn by turn. With --json each answer is one JSON object in a line of its own."""

    max_tokens: int = 512
    """Longest answer, in tokens."""
    system: str | None = None
    """System message."""
    figures: bool = False
    """A line of figures after each answer."""

    def run(self) -> int:
        params = self.params()
        self.engine_config()
        llm = self.load_llm()
        if llm.tokenizer.chat_template is None:
            raise AlulaError(f"model {self.model} has no chat template: use `alula generate --raw`")
        if sys.stdin.isatty():
            print(_HELP, file=sys.stderr)
        Conversation(llm, params, self).talk()
        return 0


class Conversation:
    """The turns so far, and the loop around them."""

    def __init__(self, llm: LLM, params: SamplingParams, options: Chat) -> None:
        self._llm = llm
        self._params = params
        self._options = options
        self._start = [] if options.system is None else [{"role": "system", "content": options.system}]
        self._turns = list(self._start)

    def talk(self) -> None:
        """Read lines until /exit or the end of the input."""
        while (line := _read_line()) is not None and line != "/exit":
            if line == "/reset":
                self._turns = list(self._start)
            elif line:
                self._try_answer(line)

    def _try_answer(self, line: str) -> None:
        """A turn that is refused or stopped leaves the conversation as it was."""
        asked = [*self._turns, {"role": "user", "content": line}]
        try:
            self._turns = [*asked, {"role": "assistant", "content": self._answer(asked)}]
        except AlulaError as error:
            print(f"alula: error: {error}", file=sys.stderr)
        except KeyboardInterrupt:
            print("\n[stopped]", file=sys.stderr)

    def _answer(self, turns: list[dict[str, str]]) -> str:
        from alula.bench.run import run_one

        engine, as_json = self._llm.engine, self._options.json
        run = run_one(engine, tuple(self._llm.render(turns)), self._params, None if as_json else write)
        if as_json:
            write(json.dumps(result(engine, run), ensure_ascii=False))
        write("\n")
        if self._options.figures:
            print(figures_line(engine, run), file=sys.stderr if as_json else sys.stdout)
        return run.completion.text


def _read_line() -> str | None:
    """The next line without its end, None at the end of the input. A stopped line is an empty one."""
    if sys.stdin.isatty():
        try:
            return input("> ").strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            print(file=sys.stderr)
            return ""
    line = sys.stdin.buffer.readline()
    try:
        return line.decode("utf-8").strip() if line else None
    except UnicodeDecodeError as error:
        raise AlulaError(f"standard input is not valid UTF-8 (byte {error.start}): re-encode it as UTF-8") from None
