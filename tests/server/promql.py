"""Enough of PromQL to tell which metrics and labels an expression reads. Whatever it does not know is an error."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

FUNCTIONS = {"rate", "increase", "histogram_quantile", "scalar"}
AGGREGATES = {"sum", "max", "min", "avg"}
_TOKEN = re.compile(
    r"""\s*(?:(?P<name>[A-Za-z_:][\w:]*) | (?P<number>\d+(?:\.\d+)?) | (?P<text>"[^"]*")
    | (?P<range>\[[^\]]+\]) | (?P<sign>=~|!~|!=|==|[-+*/(){},=<>]))""",
    re.VERBOSE,
)


@dataclass
class Read:
    """What an expression reads. selectors: metric and labels it is matched by. rated: metrics under rate or increase.

    labels: those the result has, where an aggregate says so, else None. grouped: (labels, metrics) of each aggregate.
    """

    selectors: list[tuple[str, set[str]]] = field(default_factory=list)
    rated: set[str] = field(default_factory=set)
    quantiles: set[str] = field(default_factory=set)
    grouped: list[tuple[set[str], set[str]]] = field(default_factory=list)
    labels: set[str] | None = None

    @property
    def metrics(self) -> set[str]:
        return {name for name, _ in self.selectors}

    def take(self, other: Read) -> None:
        self.selectors += other.selectors
        self.rated |= other.rated
        self.quantiles |= other.quantiles
        self.grouped += other.grouped


def read(text: str) -> Read:
    """Raises ValueError for what it does not know."""
    parser = _Parser(_tokens(text))
    found = parser.expression()
    if parser.left:
        raise ValueError(f"{text!r}: {parser.left[0]!r} is left over")
    return found


def _tokens(text: str) -> list[str]:
    found, place = [], 0
    text = text.rstrip()
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise ValueError(f"{text[place:]!r} is no PromQL")
        found.append(match.group().strip())
        place = match.end()
    return found


class _Parser:
    def __init__(self, tokens: Sequence[str]) -> None:
        self.left = list(tokens)

    def _next(self, wanted: str | None = None) -> str:
        if not self.left or (wanted is not None and self.left[0] != wanted):
            raise ValueError(f"{wanted or 'more'} is wanted before {self.left[:3]}")
        return self.left.pop(0)

    def _at(self, *tokens: str) -> bool:
        return bool(self.left) and self.left[0] in tokens

    def expression(self) -> Read:
        found = self._operand()
        while self._at("+", "-", "*", "/", ">", "<", "=="):
            self._next()
            other = self._operand()
            if found.labels is not None and other.labels is not None and found.labels != other.labels:
                raise ValueError(f"labels {found.labels} and {other.labels} never match")
            labels = other.labels if found.labels is None else found.labels
            found.take(other)
            found.labels = labels
        return found

    def _operand(self) -> Read:
        token = self._next()
        if token == "(":
            found = self.expression()
            self._next(")")
            return found
        if re.fullmatch(r"[\d.]+", token):
            return Read()
        if token in AGGREGATES:
            return self._aggregate()
        if token in FUNCTIONS:
            return self._function(token)
        if not token.startswith("alula:"):
            raise ValueError(f"{token!r} is neither a metric of alula nor a function known here")
        return self._selector(token)

    def _aggregate(self) -> Read:
        labels = set[str]()
        if self._at("by"):
            self._next()
            labels = self._names()
        self._next("(")
        found = self.expression()
        self._next(")")
        found.grouped.append((labels, found.metrics))
        found.labels = labels
        return found

    def _names(self) -> set[str]:
        self._next("(")
        found = {self._next()}
        while self._at(","):
            self._next()
            found.add(self._next())
        self._next(")")
        return found

    def _function(self, name: str) -> Read:
        self._next("(")
        if name == "histogram_quantile":
            self._next()
            self._next(",")
        found = self.expression()
        self._next(")")
        if name in ("rate", "increase"):
            found.rated |= found.metrics
        if name == "histogram_quantile":
            if "le" not in (found.labels or ()):
                raise ValueError("histogram_quantile without le")
            found.labels = (found.labels or set()) - {"le"}
            found.quantiles |= found.metrics
        if name == "scalar":
            found.labels = None
        return found

    def _selector(self, name: str) -> Read:
        labels = set[str]()
        if self._at("{"):
            self._next()
            while not self._at("}"):
                labels.add(self._next())
                if self._next() not in ("=", "=~", "!=", "!~"):
                    raise ValueError(f"{name}: no match of labels")
                self._next()
                if self._at(","):
                    self._next()
            self._next("}")
        if self.left and self.left[0].startswith("["):
            self._next()
        return Read([(name, labels)])
