"""Which regular expressions mean here what they mean elsewhere.

The grammar library ignores some constructs with a warning, and writes some characters into JSON strings that JSON must
escape. What it would not follow is refused, so that an output never breaks its pattern.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from alula.config import AlulaError

DEEPEST_GROUP = 16
"""Groups within groups; each level multiplies the ways to read a text."""
_PIECES = re.compile(
    r"(?P<escape>\\(?:x[0-9a-fA-F]{2}|u\{[0-9a-fA-F]+\}|u[0-9a-fA-F]{4}|c[A-Za-z]|.))"
    r"|(?P<class>\[\^?(?:\\.|[^\]\\])*\])"
    r"|(?P<group>\((?:\?(?::|<[A-Za-z_]\w*>|.?))?)"
    r"|(?P<other>.)",
    re.DOTALL,
)
_KNOWN_ESCAPES = frozenset("dDwWsSntrfv0xuc")
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "0": "\0"}


_Pieces = list[tuple[str, str]]


def check_regex(pattern: str, field: str, *, in_json: bool = False) -> None:
    """Raises AlulaError where an output could differ from what the pattern says.

    in_json: it is the pattern of a JSON string, where quotes, backslashes and control characters cannot be written.
    """
    depth, pieces = 0, _pieces(pattern)
    for place, (kind, text) in enumerate(pieces):
        if kind == "escape":
            _check_escape(text, field)
        elif kind == "class":
            for escape in re.findall(r"\\.", text[1:], re.DOTALL):
                if escape != r"\b":
                    _check_escape(escape, field)
        elif kind == "group":
            depth = _enter(text, depth, field)
        elif text == ")":
            depth -= 1
        elif text in "^$" and not _is_outermost(pieces, place):
            raise AlulaError(f"{field} has {text!r} inside: anchor the whole expression, or whole alternatives")
    if in_json:
        _check_writable(pieces, field)


def anywhere(pattern: str) -> str:
    """For the library, which matches whole texts: the pattern of a JSON schema may match anywhere in its string.

    Where only some alternatives are anchored all of them stay so, which is stricter than the schema.
    """
    pieces = _pieces(pattern)
    anchors = [piece for piece in pieces if piece in (("other", "^"), ("other", "$"))]
    alternatives = any(piece == ("other", "|") and _depth(pieces[:i]) == 0 for i, piece in enumerate(pieces))
    if alternatives and anchors:
        return pattern
    begins, ends = pieces[:1] == [("other", "^")], pieces[-1:] == [("other", "$")]
    if len(anchors) > begins + ends:
        return pattern
    body = pattern[begins : len(pattern) - ends]
    return ("" if begins else ".*") + f"(?:{body})" + ("" if ends else ".*")


def _pieces(pattern: str) -> _Pieces:
    return [(match.lastgroup or "other", match.group()) for match in _PIECES.finditer(pattern)]


def _enter(text: str, depth: int, field: str) -> int:
    is_named = text.startswith("(?<") and text.endswith(">")
    if text not in ("(", "(?:") and not is_named:
        raise AlulaError(f"{field} has {text!r}: look-around, flags and special groups are not supported")
    if depth == DEEPEST_GROUP:
        raise AlulaError(f"{field} nests groups more than {DEEPEST_GROUP} deep: flatten it")
    return depth + 1


def _check_escape(escape: str, field: str) -> None:
    if escape[1].isalnum() and escape[1] not in _KNOWN_ESCAPES:
        raise AlulaError(f"{field} has {escape!r}, which is not supported: spell out the characters that it stands for")


def _is_outermost(pieces: _Pieces, place: int) -> bool:
    """Whether nothing but groups that open (for `^`), or close (for `$`), is between it and the edge of an alternative
    of the whole expression."""
    step = -1 if pieces[place][1] == "^" else 1
    open_groups = 0
    at = place + step
    while 0 <= at < len(pieces) and (pieces[at][0] == "group" if step < 0 else pieces[at] == ("other", ")")):
        open_groups += 1
        at += step
    if not 0 <= at < len(pieces):
        return True
    return open_groups == 0 and pieces[at] == ("other", "|") and _depth(pieces[:place]) == 0


def _depth(pieces: _Pieces) -> int:
    return sum((kind == "group") - (piece == ")" and kind == "other") for kind, piece in pieces)


def _check_writable(pieces: _Pieces, field: str) -> None:
    for kind, text in pieces:
        if kind == "class" and text.startswith("[^"):
            continue
        inner = text[1:-1] if kind == "class" else text
        for char in _characters(inner) if kind in ("class", "escape", "other") else ():
            if char in '"\\' or char < " ":
                raise AlulaError(
                    f"{field} names {char!r}, which JSON strings only hold in escaped form: leave it out of the pattern"
                )


def _characters(text: str) -> Iterator[str]:
    """The single characters that a piece names, ends of ranges included."""
    for match in re.finditer(r"\\(?:(x|u)\{?([0-9a-fA-F]+)\}?|c([A-Za-z])|(.))|(.)", text, re.DOTALL):
        _, code, control, escaped, plain = match.groups()
        if code is not None:
            yield chr(min(int(code, 16), 0x10FFFF))
        elif control is not None:
            yield chr(ord(control) & 31)
        elif escaped is not None:
            if not escaped.isalnum() or escaped in _CONTROLS:
                yield _CONTROLS.get(escaped, escaped)
        else:
            yield plain
