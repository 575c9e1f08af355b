"""Drafters by name: heads in the package, in folders of $ALULA_HEADS, in a checkout's `heads/`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

SHIPPED = Path(__file__).parents[1] / "heads"
"""Heads that come with the package, one folder each; they are of EAGLE-3, and named after their target."""
VARIABLE = "ALULA_HEADS"
"""Environment variable: folders that hold drafters, one folder each, parted as in PATH."""
_CHECKOUT = Path(__file__).parents[3]


def named_drafters() -> dict[str, Path]:
    """Every drafter that has a name, and its folder; of two with one name the first place's counts.

    A drafter is called as its folder is, `smollm2-medusa` say; one in the package is its target's name and `-eagle3`.
    """
    found: dict[str, Path] = {}
    for name, folder in _all():
        found.setdefault(name, folder)
    return found


def find_named(name: str | Path, target: str) -> Path | None:
    """The folder of the drafter `name`, or of `<target>-<name>`, so that `medusa` is enough; None where there is none.

    target: the model's name. Anything with a slash is a path, not a name.
    """
    if not isinstance(name, str) or "/" in name:
        return None
    known = named_drafters()
    return known.get(name) or known.get(f"{target}-{name}")


def _all() -> Iterator[tuple[str, Path]]:
    yield from ((f"{folder.name}-eagle3", folder) for folder in _folders(SHIPPED))
    for shelf in filter(None, os.environ.get(VARIABLE, "").split(os.pathsep)):
        yield from ((folder.name, folder) for folder in _folders(Path(shelf).expanduser()))
    if (_CHECKOUT / "pyproject.toml").is_file():
        yield from ((folder.name, folder) for folder in _folders(_CHECKOUT / "heads"))


def _folders(shelf: Path) -> list[Path]:
    return sorted(path.parent for path in shelf.glob("*/config.json"))
