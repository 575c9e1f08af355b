"""Compiled grammars: made beside the step loop, and kept."""

from __future__ import annotations

import json
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import TYPE_CHECKING, Any

from alula.config import AlulaError
from alula.grammar.regex import DEEPEST_GROUP, rewrite_regex
from alula.grammar.schema import rewrite_schema
from alula.grammar.state import GrammarState
from alula.grammar.vocabulary import read_vocabulary
from alula.structured import StructuredOutputsParams
from alula.text import Tokenizer

if TYPE_CHECKING:
    import xgrammar

AT_ONCE = 2
"""Grammars compiled at the same time: a slow one does not hold up all others."""
LONGEST_GAP = 12
"""Whitespace characters in a row in JSON; without a limit, models have been seen to write nothing else."""
_SOME_RAW = r"[^\"\\\r\n]"
"""How the library writes a character of a string with a length: of the control characters only two are left out."""
_NONE_RAW = r"[^\"\\\x00-\x1f\ud800-\udfff]"


class TooManyForms(AlulaError):
    """So many grammars are being compiled that no more are begun for now."""


class Grammars:
    """Compiles what requests ask for, each on a thread of its own, and keeps the ones used last.

    vocab_size, stop_ids: of the model. capacity and max_bytes bound what is kept: the least recently used go first.
    Safe to call from any thread.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        stop_ids: Sequence[int],
        *,
        capacity: int = 128,
        max_bytes: int = 256 * 2**20,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._stop_ids = tuple(stop_ids)
        self._capacity, self._max_bytes = capacity, max_bytes
        self._lock = threading.RLock()
        self._turns = threading.Semaphore(AT_ONCE)
        self._kept: OrderedDict[object, Future[xgrammar.CompiledGrammar]] = OrderedDict()

    def submit(
        self, wanted: StructuredOutputsParams, most_waiting: int | None = None
    ) -> Future[xgrammar.CompiledGrammar]:
        """The compiled grammar, now or later; or the AlulaError that says why there is none.

        Raises TooManyForms for a new one where `most_waiting` are on their way already.
        """
        key = (wanted.kind, wanted.source, wanted.disable_any_whitespace, wanted.free_until)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
            waiting = sum(not kept.done() for kept in self._kept.values())
            if most_waiting is not None and waiting >= most_waiting:
                raise TooManyForms(f"structured_outputs: {waiting} forms are being compiled: try again later")
            future: Future[xgrammar.CompiledGrammar] = Future()
            future.set_running_or_notify_cancel()  # others may wait for it too, so nobody cancels it
            threading.Thread(target=self._work, args=(key, wanted, future), name="alula-grammar", daemon=True).start()
            self._kept[key] = future
        return future

    def compile(self, wanted: StructuredOutputsParams) -> xgrammar.CompiledGrammar:
        """Waits for it. Raises AlulaError for what cannot be compiled."""
        return self.submit(wanted).result()

    def state(self, compiled: xgrammar.CompiledGrammar) -> GrammarState:
        """The beginning of an output."""
        return GrammarState(compiled, self._stop_ids)

    @property
    def size(self) -> tuple[int, int]:
        """Grammars kept, and their bytes."""
        with self._lock:
            return len(self._kept), sum(map(_bytes_of, self._kept.values()))

    def _work(self, key: object, wanted: StructuredOutputsParams, future: Future[xgrammar.CompiledGrammar]) -> None:
        try:
            with self._turns:
                compiled = self._compile(wanted)
        except BaseException as error:  # noqa: BLE001 (whoever waits gets it)
            with self._lock:
                del self._kept[key]
            future.set_exception(error)
            return
        with self._lock:  # whoever sees the result sees the others shrunk
            future.set_result(compiled)
            self._shrink()

    def _shrink(self) -> None:
        """Drops finished ones, the least recently used first."""
        with self._lock:
            for key in [key for key, future in self._kept.items() if future.done()][:-1]:
                count, size = self.size
                if count <= self._capacity and size <= self._max_bytes:
                    return
                del self._kept[key]

    def _compile(self, wanted: StructuredOutputsParams) -> xgrammar.CompiledGrammar:
        compiler = self._compiler
        try:
            return compiler.compile_grammar(self._grammar(wanted))
        except AlulaError:
            raise
        except RecursionError:
            raise AlulaError(f"structured_outputs.{wanted.kind} nests or refers too deep: flatten it") from None
        except Exception as error:  # noqa: BLE001 (a library in another language: most are RuntimeError, not all)
            reason = _reason(error)
            raise AlulaError(f"structured_outputs.{wanted.kind} cannot be compiled ({reason}): correct it") from None

    def _grammar(self, wanted: StructuredOutputsParams) -> xgrammar.Grammar:
        import xgrammar

        grammar = _MAKERS[wanted.kind](wanted)
        if wanted.free_until is None:
            return grammar
        return xgrammar.Grammar.concat(self._free_part(wanted.free_until), grammar)

    def _free_part(self, marker: str) -> xgrammar.Grammar:
        """Anything but a stop token, up to and with the marker: a special token, or a text wherever tokens cut it."""
        import xgrammar

        ids = self._tokenizer.encode(marker, add_special_tokens=False)
        content: dict[str, Any] = {"type": "any_text"}
        end: object = marker
        if len(ids) == 1 and ids[0] in self._tokenizer.special_ids:
            content = {"type": "any_tokens", "exclude_tokens": ids}
            end = {"type": "token", "token": ids[0]}
        tag = {"type": "tag", "begin": "", "content": content, "end": end}
        return xgrammar.Grammar.from_structural_tag({"type": "structural_tag", "format": tag})

    @cached_property
    def _compiler(self) -> xgrammar.GrammarCompiler:
        """Reads the vocabulary on first use, which takes a while for a large one."""
        import xgrammar

        vocabulary = read_vocabulary(self._tokenizer, self._vocab_size, self._stop_ids)
        threads = max(1, (os.cpu_count() or 2) // 2)
        return xgrammar.GrammarCompiler(vocabulary, max_threads=threads, cache_enabled=False)


def _json(wanted: StructuredOutputsParams) -> xgrammar.Grammar:
    import xgrammar

    source = wanted.source if wanted.kind == "json" else '{"type": "object"}'
    schema = json.dumps(rewrite_schema(source), ensure_ascii=False)
    spaced = not wanted.disable_any_whitespace
    grammar = xgrammar.Grammar.from_json_schema(
        schema, any_whitespace=spaced, max_whitespace_cnt=LONGEST_GAP if spaced else None
    )
    text = str(grammar)
    return xgrammar.Grammar.from_ebnf(text.replace(_SOME_RAW, _NONE_RAW)) if _SOME_RAW in text else grammar


def _regex(wanted: StructuredOutputsParams) -> xgrammar.Grammar:
    import xgrammar

    return xgrammar.Grammar.from_regex(rewrite_regex(wanted.source, "structured_outputs.regex"))


def _choice(wanted: StructuredOutputsParams) -> xgrammar.Grammar:
    import xgrammar

    texts = [{"type": "const_string", "value": text} for text in wanted.choice or ()]
    return xgrammar.Grammar.from_structural_tag({"type": "structural_tag", "format": {"type": "or", "elements": texts}})


def _ebnf(wanted: StructuredOutputsParams) -> xgrammar.Grammar:
    import xgrammar

    depth = deepest = 0
    for bracket in re.findall(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*|[()]', wanted.source):
        depth += (bracket == "(") - (bracket == ")")
        deepest = max(deepest, depth)
    if deepest > DEEPEST_GROUP:
        raise AlulaError(f"structured_outputs.grammar nests groups more than {DEEPEST_GROUP} deep: name some as rules")
    return xgrammar.Grammar.from_ebnf(wanted.source)


_MAKERS = {
    "json": _json,
    "regex": _regex,
    "choice": _choice,
    "grammar": _ebnf,
    "json_object": _json,
}


def _bytes_of(future: Future[xgrammar.CompiledGrammar]) -> int:
    done = future.done() and future.exception() is None
    return future.result().memory_size_bytes if done else 0


def _reason(error: Exception) -> str:
    """What the library says, without its time stamp and its place in the source."""
    text = " ".join(str(error).split())
    return re.sub(r"^\[[\d:]+\] \S+?:\d+: ", "", text)[:300].rstrip(".")
