"""Regular expressions as the grammar library reads them, or why it would misread them.

The library ignores some constructs with a warning, reads others in its own way, and writes some characters into JSON
strings that JSON must escape. Every expression is written anew in the part that it reads as others do; what has no
such form is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from alula.config import AlulaError

DEEPEST_GROUP = 16
"""Groups within groups; each level multiplies the ways to read a text."""
_NO_CHARACTERS = r"\ud800-\udfff"
"""Half characters: the library counts them as characters, and no text holds them."""
_CODE = r"\\(?:x(?P<x>[0-9a-fA-F]{2})|u(?P<u>[0-9a-fA-F]{4})|u\{(?P<b>[0-9a-fA-F]{1,6})\}|c(?P<c>[A-Za-z]))"
_CODE_AS_ONE = re.sub(r"\?P<\w>", "?:", _CODE)
_PIECES = re.compile(
    r"(?P<escape>" + _CODE_AS_ONE + r"|\\.)"
    r"|(?P<class>\[\^?(?:\\.|[^\]\\])*\])"
    r"|(?P<group>\((?:\?(?::|<[A-Za-z_]\w*>|.?))?)"
    r"|(?P<other>.)",
    re.DOTALL,
)
_CONTROLS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "0": "\0"}
_CLASSES = frozenset("dDwWsS")
_NEGATED = {"D": r"\d", "W": r"\w", "S": r"\s"}

_Pieces = list[tuple[str, str]]


def rewrite_regex(pattern: str, field: str, *, in_json: bool = False) -> str:
    """The expression in the library's terms, to match whole texts. Raises AlulaError where it has none.

    in_json: it is the pattern of a JSON string, which may match anywhere in it, and where quotes, backslashes and
    control characters cannot be written. Where only some alternatives are anchored, all of them are.
    """
    pieces = [(match.lastgroup or "other", match.group()) for match in _PIECES.finditer(pattern)]
    _check_groups(pieces, field)
    if in_json:
        _check_writable(pieces, field)
    written = "".join(_rewrite(kind, text, field) for kind, text in pieces)
    if not in_json:
        return written
    begins, ends = _open_ends(pieces)
    return ("" if begins else ".*") + f"(?:{written})" + ("" if ends else ".*")


def _rewrite(kind: str, text: str, field: str) -> str:
    if kind == "escape":
        return _escape(text, field)
    if kind == "class":
        return _class(text, field)
    if kind == "group":
        return "(?:"
    return {".": f"[^\\n\\r{_NO_CHARACTERS}]", "^": "", "$": ""}.get(text, text)


def _escape(escape: str, field: str) -> str:
    """A code becomes its character: the library reads further digits into a code where they follow."""
    if (char := _coded(escape)) is not None:
        return _written(char)
    if escape[1].isalnum() and escape[1] not in _CLASSES and escape[1] not in _CONTROLS:
        raise AlulaError(f"{field} has {escape!r}, which is not supported: spell out the characters that it stands for")
    return f"[^{_NEGATED[escape[1]]}{_NO_CHARACTERS}]" if escape[1] in _NEGATED else escape


def _class(text: str, field: str) -> str:
    """`\\D` and the like become alternatives beside the rest of the class, since they leave out half characters."""
    pieces = re.findall(_CODE_AS_ONE + r"|\\.|[^\\]+", text[1:-1], re.DOTALL)
    if text.startswith("[^"):
        return f"[{''.join(_class_piece(piece, field) for piece in pieces)}{_NO_CHARACTERS}]"
    apart = [_escape(piece, field) for piece in pieces if _is_negated(piece)]
    rest = "".join(_class_piece(piece, field) for piece in pieces if not _is_negated(piece))
    if not apart:
        return _listed(rest)
    return f"(?:{'|'.join([*apart, _listed(rest)] if rest else apart)})"


def _listed(body: str) -> str:
    """A class of these. The library reads `^` as a negation at the beginning, escaped or not."""
    if not (start := re.match(r"\\?\^", body)):
        return f"[{body}]"
    rest = body[start.end() :]
    if re.match("-.", rest):
        return f"[_{rest}^]"  # the range goes on with the character after `^`
    return f"[{rest}^]" if rest else r"\^"


def _class_piece(piece: str, field: str) -> str:
    is_plain = not piece.startswith("\\") or piece == r"\b" or _is_negated(piece)
    return piece if is_plain else _escape(piece, field)


def _is_negated(piece: str) -> bool:
    return piece.startswith("\\") and piece[1:] in _NEGATED


def _coded(escape: str) -> str | None:
    """The character of a code such as \\x41; None for other escapes."""
    match = re.fullmatch(_CODE, escape)
    if match is None:
        return None
    if match["c"]:
        return chr(ord(match["c"]) & 31)
    return chr(min(int(match["x"] or match["u"] or match["b"], 16), 0x10FFFF))


def _written(char: str) -> str:
    if char < "\x80" and not char.isalnum() and char.isprintable() and char != " ":
        return "\\" + char
    return f"\\u{ord(char):04x}" if "\ud800" <= char <= "\udfff" else char


def _check_groups(pieces: _Pieces, field: str) -> None:
    depth = 0
    for place, (kind, text) in enumerate(pieces):
        if kind == "group":
            if text not in ("(", "(?:") and not (text.startswith("(?<") and text.endswith(">")):
                raise AlulaError(f"{field} has {text!r}: look-around, flags and special groups are not supported")
            if depth == DEEPEST_GROUP:
                raise AlulaError(f"{field} nests groups more than {DEEPEST_GROUP} deep: flatten it")
        depth += _step(kind, text)
        if kind == "other" and text in "^$" and not _is_outermost(pieces, place):
            raise AlulaError(f"{field} has {text!r} inside: anchor the whole expression, or whole alternatives")


def _step(kind: str, text: str) -> int:
    return (kind == "group") - (kind == "other" and text == ")")


def _depth(pieces: _Pieces) -> int:
    return sum(_step(kind, text) for kind, text in pieces)


def _is_outermost(pieces: _Pieces, place: int) -> bool:
    """Whether nothing but groups that open (for `^`), or close (for `$`), is between it and the edge of the whole
    expression, or nothing at all between it and the edge of one of its alternatives."""
    step = -1 if pieces[place][1] == "^" else 1
    at = place + step
    while 0 <= at < len(pieces) and _step(*pieces[at]) == -step:
        at += step
    if not 0 <= at < len(pieces):
        return True
    return at == place + step and pieces[at] == ("other", "|") and _depth(pieces[:place]) == 0


def _open_ends(pieces: _Pieces) -> tuple[bool, bool]:
    """Whether a match must begin, and end, with the string."""
    anchors = [piece for piece in pieces if piece in (("other", "^"), ("other", "$"))]
    alternatives = any(piece == ("other", "|") and _depth(pieces[:i]) == 0 for i, piece in enumerate(pieces))
    begins, ends = pieces[:1] == [("other", "^")], pieces[-1:] == [("other", "$")]
    if anchors and (alternatives or len(anchors) > begins + ends):
        return True, True
    return begins, ends


def _check_writable(pieces: _Pieces, field: str) -> None:
    for kind, text in pieces:
        if kind == "group" or (kind == "class" and text.startswith("[^")):
            continue
        for char in _characters(text[1:-1] if kind == "class" else text):
            if char in '"\\' or char < " ":
                raise AlulaError(
                    f"{field} names {char!r}, which JSON strings only hold in escaped form: leave it out of the pattern"
                )


def _characters(text: str) -> Iterator[str]:
    """The single characters that a piece names, ends of ranges included."""
    for match in re.finditer(_CODE + r"|\\.|.", text, re.DOTALL):
        found = match.group()
        if (char := _coded(found)) is not None:
            yield char
        elif not found.startswith("\\") or found == "\\":
            yield found
        elif found[1] in _CONTROLS or not found[1].isalnum():
            yield _CONTROLS.get(found[1], found[1])
