"""What the repository promises of itself: layers, sizes, links, a light command line, documented settings."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

import alula

MAX_FILE, MAX_FUNCTION = 350, 60
NATIVE = (".cpp", ".cc", ".hpp", ".h")


def _sources(root: Path) -> list[Path]:
    return sorted(path for path in (root / "src").rglob("*") if path.suffix in (".py", *NATIVE))


def _tracked(root: Path) -> list[Path]:
    if not (root / ".git").exists():
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True).stdout
    return [root / name for name in listed.split("\0") if name and (root / name).is_file()]


def _text(path: Path) -> str:
    data = path.read_bytes()
    return "" if b"\0" in data else data.decode()


def test_imports_point_one_way(root: Path) -> None:
    command = shutil.which("lint-imports", path=str(Path(sys.executable).parent)) or "lint-imports"
    done = subprocess.run([command], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_files_are_short(root: Path) -> None:
    long = {
        str(path.relative_to(root)): n for path in _sources(root) if (n := len(_text(path).splitlines())) > MAX_FILE
    }
    assert not long


def test_functions_are_short(root: Path) -> None:
    long = []
    for path in (path for path in _sources(root) if path.suffix == ".py"):
        for node in ast.walk(ast.parse(_text(path))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION:
                    long.append(f"{path.relative_to(root)}:{node.lineno} {node.name} has {lines} lines")
    assert not long


def test_nothing_names_a_place_on_one_machine(root: Path) -> None:
    """Absolute paths of somebody's machine do not belong in a public repository."""
    place = re.compile(r"(?<![\w.~$}])/(?:home|root|Users|opt|tmp|work|mnt|data)/\w")
    found = [
        f"{path.relative_to(root)}: {line.strip()}"
        for path in _tracked(root)
        if path != Path(__file__).resolve()
        for line in _text(path).splitlines()
        if place.search(line)
    ]
    assert not found


def _links(page: Path) -> list[str]:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    return re.findall(r"\]\(([^)\s]+)\)", text)


def test_links_between_documents_resolve(root: Path) -> None:
    pages = [*root.glob("*.md"), *(root / "docs").rglob("*.md")]
    links = [(page, link) for page in pages for link in _links(page)]
    assert links
    broken = []
    for page, link in links:
        target, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        file = (page.parent / target) if target else page
        if not file.exists() or (anchor and anchor not in _anchors(file)):
            broken.append(f"{page.relative_to(root)}: {link}")
    assert not broken


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


_MAIN = "import sys; sys.argv = ['alula', '--help']; from alula.cli import main"


def _python(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False).stdout


def test_help_takes_under_a_second_and_loads_no_torch() -> None:
    shown = _python(f"{_MAIN}\ntry: main()\nfinally: print('torch' in sys.modules)")
    assert "generate" in shown
    assert shown.splitlines()[-1] == "False"

    def once() -> float:
        start = time.perf_counter()
        assert "generate" in _python(f"{_MAIN}; main()")
        return time.perf_counter() - start

    assert min(once() for _ in range(5)) < 1.0


def _modules() -> Iterator[str]:
    for module in pkgutil.walk_packages(alula.__path__, "alula."):
        if not module.name.rpartition(".")[2].startswith("_"):
            yield module.name


def _public_configs() -> list[type]:
    named = re.compile(r"[^_].*(Config|Params|Shape|Options|Settings)$")
    found = []
    for name in _modules():
        for kind in vars(importlib.import_module(name)).values():
            own = inspect.isclass(kind) and is_dataclass(kind) and kind.__module__ == name
            if own and named.match(kind.__name__):
                found.append(kind)
    return found


def _documented(kind: type) -> set[str]:
    """Of the class and of those it inherits fields from."""
    return set[str]().union(*(_documented_here(base) for base in kind.__mro__ if is_dataclass(base)))


def _documented_here(kind: type) -> set[str]:
    """Fields followed by a string, and fields that the class docstring names."""
    body = ast.parse(inspect.getsource(kind)).body[0]
    assert isinstance(body, ast.ClassDef)
    named = set(re.findall(r"\w+", kind.__doc__ or ""))
    for field, after in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            assert isinstance(field.target, ast.Name)
            named.add(field.target.id)
    return named


CHECKPOINTS = ("ModelConfig", "HeadConfig")
"""What a checkpoint is; the names are those of its config.json."""
SPEAKING = ("max_tokens", "stop_token_ids", "ignore_eos", "prompt_logprobs", "skip_special_tokens")
"""Settings whose name says all."""


def test_settings_are_documented() -> None:
    configs = [kind for kind in _public_configs() if kind.__name__ not in CHECKPOINTS]
    assert {"EngineConfig", "SamplingParams", "TreeShape", "ModelOptions"} <= {kind.__name__ for kind in configs}
    bare = [
        f"{kind.__module__}.{kind.__name__}.{field.name}"
        for kind in configs
        for field in fields(kind)
        if field.name not in _documented(kind) and field.name not in SPEAKING
    ]
    assert not bare, "\n".join(bare)


def test_public_names_load_on_first_use() -> None:
    assert _python("import sys, alula; print('torch' in sys.modules, 'numpy' in sys.modules)").split() == ["False"] * 2
    assert all(callable(getattr(alula, name)) for name in alula.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Llm'"):
        getattr(alula, "Llm")  # noqa: B009
