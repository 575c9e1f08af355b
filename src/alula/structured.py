"""What a request asks of the form of its output, as plain values. Names and meanings follow vLLM."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast

from alula.config import AlulaError

KINDS = ("json", "regex", "choice", "grammar", "json_object")
LONGEST_SOURCE = 256 * 1024
"""Characters of a schema, regex or grammar."""


@dataclass(frozen=True)
class StructuredOutputsParams:
    """The output, as text, must fit exactly one of `json`, `regex`, `choice`, `grammar` and `json_object`.

    Raises AlulaError for none or several of them, or a value that cannot be one.
    """

    json: str | Mapping[str, Any] | bool | None = None
    """A JSON schema, as text or as an object."""
    regex: str | None = None
    """A regular expression that the whole output matches."""
    choice: tuple[str, ...] | None = None
    """The output is one of these texts."""
    grammar: str | None = None
    """An EBNF grammar whose start rule is `root`."""
    json_object: bool | None = None
    """Any JSON object."""
    disable_any_whitespace: bool = False
    """JSON on one line, with one space after commas and colons and none elsewhere."""
    free_until: str | None = None
    """Tokens are free up to and with this marker, such as `</think>`; what follows it has the form. A prompt that
    ends in the marker has no free part."""

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) not in (None, False) or self._is_schema(name)]
        if len(given) != 1:
            found = " and ".join(given) or "nothing"
            raise AlulaError(f"structured_outputs has {found}: give exactly one of {', '.join(KINDS)}")
        _CHECKS[given[0]](self)
        for name in ("regex", "grammar", "free_until"):
            value = getattr(self, name)
            if value is not None and (not _is_text(value) or (name != "regex" and not value)):
                raise AlulaError(f"structured_outputs.{name} is {str(value)[:80]!r}: give a valid text")
        if not isinstance(self.disable_any_whitespace, bool):
            raise AlulaError(
                f"structured_outputs.disable_any_whitespace is {self.disable_any_whitespace!r}: give True or False"
            )
        if len(self.source) > LONGEST_SOURCE:
            raise AlulaError(
                f"structured_outputs.{self.kind} has {len(self.source)} characters: give at most {LONGEST_SOURCE}"
            )

    @property
    def kind(self) -> str:
        """Which of the five it is."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False) or self._is_schema(name))

    @property
    def source(self) -> str:
        """The one that is given, as canonical text."""
        value = getattr(self, self.kind)
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    def _is_schema(self, name: str) -> bool:
        """`false` is a schema too, if one that nothing fits."""
        return name == "json" and self.json is False


def _check_json(params: StructuredOutputsParams) -> None:
    """Keeps the schema as canonical text: what the caller does to his object later changes nothing."""
    schema: object = params.json
    try:
        schema = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(schema, ensure_ascii=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise AlulaError(f"structured_outputs.json is no JSON ({error}): give a JSON schema") from None
    if not isinstance(schema, (Mapping, bool)) or not _is_text(text):
        raise AlulaError(f"structured_outputs.json is {text[:80]!r}: give a JSON schema, which is an object")
    object.__setattr__(params, "json", text)


def _check_choice(params: StructuredOutputsParams) -> None:
    texts = cast("object", params.choice)
    if not isinstance(texts, Collection) or isinstance(texts, (str, bytes, Mapping)) or not texts:
        raise AlulaError(f"structured_outputs.choice is {texts!r}: give a list of at least one text")
    if not all(_is_text(text) and text for text in texts):
        raise AlulaError(f"structured_outputs.choice is {texts!r}: give valid texts, none of them empty")
    object.__setattr__(params, "choice", tuple(texts))


def _check_json_object(params: StructuredOutputsParams) -> None:
    if params.json_object is not True:
        raise AlulaError(f"structured_outputs.json_object is {params.json_object!r}: give True or None")


def _is_text(value: object) -> bool:
    """Without lone surrogates: no output could ever hold those."""
    return isinstance(value, str) and not any("\ud800" <= char <= "\udfff" for char in value)


_CHECKS = {
    "json": _check_json,
    "regex": lambda params: None,
    "choice": _check_choice,
    "grammar": lambda params: None,
    "json_object": _check_json_object,
}
