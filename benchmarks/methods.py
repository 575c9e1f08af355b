"""The methods of the papers beside each other: same target and prompts, each with its best tree, beside plain.

    python benchmarks/methods.py --output runs/methods --prompts mt_bench.jsonl gsm8k.jsonl summaries forms \
        --tune default --methods ngram lm medusa eagle1 eagle2 eagle3

A method is `kind` or `kind=drafter`, where the drafter is a name or a folder as `--drafter` takes it. Kinds: `plain`,
`ngram`, `lm`, `medusa` and `eagle1` (static trees), `eagle2` (the head of EAGLE-1 with dynamic trees), `eagle3`
(dynamic trees). Two of a kind have tags: `eagle3 eagle3:long=runs/long/head`.

First every method tries the trees of `--trees` on the tune set; the one with the most tokens per second is kept, for
each temperature. Then each cell (set, method, temperature, rule) is measured, one request at a time: for every prompt
plain decoding and all methods take turns, and who begins changes from prompt to prompt. Above temperature 0 both rules
have that same tree; with `rejection` a static tree's children are drawn, and a dynamic tree proposes point masses.
Every cell is a JSON file in OUTPUT/cells, written whole: the same command goes on with what is missing, and refuses
what was measured with other settings or weights. Temperature by temperature the sets come in the order of `--prompts`.

Figures are those of docs/benchmarks.md; `low` and `high` are the 10th and 90th percentile over prompts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from methods_table import draw, markdown

from alula.bench.harness import Pair, pooled_stats, quantile, spread
from alula.bench.report import side
from alula.bench.run import Run, run_one
from alula.bench.tasks import as_user_turn, read_sets
from alula.cli.errors import guarded
from alula.cli.progress import Progress
from alula.config import AlulaError
from alula.draft.load import find_shipped, load_drafter
from alula.draft.names import SHIPPED, find_named
from alula.draft.static import StaticTree, default_static_tree
from alula.engine.config import EngineConfig
from alula.engine.engine import Engine
from alula.model.load import LoadedModel, load_model, set_threads
from alula.model.weights import hash_files
from alula.sequence import SamplingParams
from alula.train.files import write_text
from alula.tree import TreeShape

DRAFTERS = {
    "plain": "none",
    "ngram": "ngram",
    "lm": "lm",
    "medusa": "medusa",
    "eagle1": "eagle1",
    "eagle2": "eagle1",
    "eagle3": "auto",
}
STATIC = ("medusa", "eagle1")
"""Methods with static trees: the published tree of EAGLE-1, cut to each of the limits tried."""
TREES = ("2,1,1", "3,2,2", "4,2,3", "6,3,3", "10,4,4", "16,5,4")
"""Rows, depth and branch, and a floor where there is one."""
PLAIN = TreeShape(1, 0, 1)


@dataclass(frozen=True)
class Method:
    """One row of the table."""

    kind: str
    drafter: str
    tag: str = ""

    @property
    def label(self) -> str:
        return f"{self.kind}-{self.tag}" if self.tag else self.kind

    @property
    def static(self) -> bool:
        return self.kind in STATIC


@dataclass(frozen=True)
class Cell:
    """What is measured at one time."""

    group: str
    method: Method
    temperature: float
    rule: str

    @property
    def name(self) -> str:
        return f"{self.group}-{self.method.label}-t{self.temperature:g}-{self.rule}"


class Table:
    """The model, the prompts and the cells on disk."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.methods = [_method(text) for text in arguments.methods]
        self.shapes = [_shape(text) for text in arguments.trees]
        self.folder = arguments.output / "cells"
        sets = read_sets(arguments.prompts, arguments.limit)
        tune = read_sets([arguments.tune], arguments.tune_limit)
        self.cells = list(_cells(list(sets), self.methods, arguments.temperatures))
        set_threads(arguments.threads)
        self.model = load_model(arguments.model, dtype=arguments.dtype, device=arguments.device)
        self.prompts = {name: self._encoded(texts) for name, texts in sets.items()}
        self.tuning = self._encoded(next(iter(tune.values())))
        self.folder.mkdir(parents=True, exist_ok=True)

    def run(self) -> list[dict[str, Any]]:
        """Every cell's figures, measured or as they were."""
        tuned = [(m, t) for m in self.methods if m.label != "plain" for t in self.arguments.temperatures]
        with Progress("trees", len(tuned) + len(self.cells)) as progress:
            trees = {}
            for method, temperature in tuned:
                trees[method.label, temperature] = self._best_tree(method, temperature)
                progress.tick()
            progress.announce("cells")
            rows = []
            for cells in _blocks(self.cells):
                shapes = [trees.get((cell.method.label, cell.temperature), PLAIN) for cell in cells]
                rows += self._block(cells, shapes)
                for _ in cells:
                    progress.tick()
        return rows

    def _best_tree(self, method: Method, temperature: float) -> TreeShape:
        """The one with the best ratio of tokens per second to plain decoding on the tune set."""
        cell = Cell("tune", method, temperature, "coupled")

        def measure() -> dict[str, Any]:
            engines = [self._engine(cell, shape) for shape in self.shapes]
            pairs = self._pairs(cell, engines, self.tuning, repeats=1)
            names = [",".join(map(str, shape.report().values())) for shape in self.shapes]
            return {"ratios": {name: round(spread(p).pooled, 4) for name, p in zip(names, pairs, strict=True)}}

        settings = {**self._settings(cell, None), "trees": self.arguments.trees, "prompts": len(self.tuning)}
        ratios = self._kept(cell.name, settings, measure)["ratios"]
        return _shape(max(ratios, key=ratios.get))

    def _block(self, cells: Sequence[Cell], shapes: Sequence[TreeShape]) -> list[dict[str, Any]]:
        """All methods of one set, temperature and rule; those that are missing are measured together."""
        settings = [self._settings(cell, shape) for cell, shape in zip(cells, shapes, strict=True)]
        missing = [place for place, cell in enumerate(cells) if not self._path(cell.name).exists()]
        figures = {}
        if missing:
            engines = [self._engine(cells[place], shapes[place]) for place in missing]
            prompts, repeats = self.prompts[cells[0].group], self.arguments.repeats
            pairs = self._pairs(cells[0], engines, prompts, repeats=repeats)
            for place, engine, found in zip(missing, engines, pairs, strict=True):
                figures[place] = self._figures(cells[place], engine, found)
        return [
            self._kept(cell.name, settings[place], partial(figures.__getitem__, place))
            for place, cell in enumerate(cells)
        ]

    def _figures(self, cell: Cell, engine: Engine, pairs: Sequence[Pair]) -> dict[str, Any]:
        runs = [run for pair in pairs for run in pair.speculative]
        taus = [pooled_stats(pair.speculative).tau for pair in pairs]
        rates = [pooled_stats(pair.speculative).acceptance_rate for pair in pairs]
        figures = side(runs, engine)
        return {
            **{name: figures[name] for name in ("tau", "acceptance_rate", "acceptance_by_depth", "tokens_per_second")},
            "tau_spread": _spread(taus),
            "acceptance_spread": _spread(rates),
            "ratio": spread(pairs).report(),
            "plain_tokens_per_second": side([run for pair in pairs for run in pair.plain], engine)["tokens_per_second"],
            "draft_ms_per_step": figures["step_ms"]["draft"],
            "identical": sum(pair.identical for pair in pairs) if cell.rule == "coupled" else None,
            "prompts": len(pairs),
            **trained(cell.method, self.model),
        }

    def _engine(self, cell: Cell, shape: TreeShape) -> Engine:
        tree = StaticTree.of(default_static_tree().within(shape)) if cell.method.static else None
        sampled = tree is not None and cell.rule == "rejection"
        drafter = load_drafter(cell.method.drafter, self.model, rule=cell.rule, tree=tree, sampled=sampled)
        config = EngineConfig(
            rule=cell.rule,
            shape=shape,
            max_num_seqs=1,
            kv_cache_mib=self.arguments.kv_cache_mib,
            enable_prefix_caching=False,
        )
        return Engine(self.model, drafter, config)

    def _pairs(
        self, cell: Cell, engines: Sequence[Engine], prompts: Sequence[tuple[int, ...]], *, repeats: int
    ) -> list[list[Pair]]:
        """Per engine and prompt, beside the same plain runs; each engine is warmed up by a short one."""
        params = SamplingParams(
            max_tokens=self.arguments.max_tokens, temperature=cell.temperature, seed=self.arguments.seed
        )
        plain = self._engine(Cell(cell.group, Method("plain", DRAFTERS["plain"]), cell.temperature, cell.rule), PLAIN)
        everyone = [plain, *engines]
        for engine in everyone:
            run_one(engine, prompts[0], SamplingParams(max_tokens=8, temperature=cell.temperature, seed=0))
        found: list[list[Pair]] = [[] for _ in engines]
        for number, prompt in enumerate(prompts):
            runs = _in_turn(everyone, prompt, params, repeats=repeats, first=number)
            for pairs, speculative in zip(found, runs[1:], strict=True):
                pairs.append(Pair(runs[0], speculative))
        return found

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def _kept(self, name: str, settings: dict[str, Any], measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The figures in the file of that name, measured where there is none.

        Raises AlulaError for those of other settings.
        """
        path, plain = self._path(name), json.loads(json.dumps(settings))
        if not path.exists():
            write_text(path, json.dumps({"settings": plain, "figures": measure()}, indent=1) + "\n")
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["settings"] != plain:
            raise AlulaError(f"{path} was measured with other settings or weights: remove it, or give another output")
        return {**found["settings"], **found["figures"]}

    def _settings(self, cell: Cell, shape: TreeShape | None) -> dict[str, Any]:
        """What a cell's figures hold for."""
        names = ("model", "dtype", "device", "threads", "max_tokens", "limit", "repeats", "seed")
        return {
            "set": cell.group,
            "method": cell.method.label,
            "drafter": cell.method.drafter,
            "weights": weights(_folder(cell.method, self.model)),
            "temperature": cell.temperature,
            "rule": cell.rule,
            "tree": None if shape is None else list(shape.report().values()),
            **{name: getattr(self.arguments, name) for name in names},
        }

    def _encoded(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        return [tuple(as_user_turn(self.model.tokenizer, text)) for text in texts]


def _in_turn(
    engines: Sequence[Engine], prompt: tuple[int, ...], params: SamplingParams, *, repeats: int, first: int
) -> list[list[Run]]:
    """Per engine its runs; number `first`, modulo how many there are, begins, and with each repeat the next one."""
    runs: list[list[Run]] = [[] for _ in engines]
    for repeat in range(repeats):
        for place in range(len(engines)):
            index = (first + repeat + place) % len(engines)
            runs[index].append(run_one(engines[index], prompt, params))
    return runs


def _cells(groups: Sequence[str], methods: Sequence[Method], temperatures: Sequence[float]) -> Iterator[Cell]:
    for temperature in temperatures:
        for group in groups:
            for rule in ("coupled", "rejection") if temperature else ("coupled",):
                yield from (Cell(group, method, temperature, rule) for method in methods)


def _blocks(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Cells that differ by the method only."""
    blocks: dict[tuple[str, float, str], list[Cell]] = {}
    for cell in cells:
        blocks.setdefault((cell.group, cell.temperature, cell.rule), []).append(cell)
    return list(blocks.values())


def _method(text: str) -> Method:
    name, _, drafter = text.partition("=")
    kind, _, tag = name.partition(":")
    if kind not in DRAFTERS:
        raise AlulaError(f"methods names {kind!r}: give some of {', '.join(DRAFTERS)}, each alone or as kind=drafter")
    return Method(kind, drafter or DRAFTERS[kind], tag)


def _shape(text: str) -> TreeShape:
    try:
        nodes, depth, branch, *floor = text.split(",")
        return TreeShape(int(nodes), int(depth), int(branch), *map(float, floor))
    except (ValueError, TypeError):
        raise AlulaError(f"trees has {text!r}: give rows, depth and branch, perhaps a floor, as in 6,3,3,0.2") from None


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {name: round(quantile(values, share), 4) for name, share in (("low", 0.1), ("high", 0.9))}


def _folder(method: Method, model: LoadedModel) -> Path:
    """Where a drafter lies; no folder for those that are not made of files."""
    shipped = find_shipped(model, SHIPPED) if method.drafter == "auto" else find_named(method.drafter, model.name)
    return shipped or Path(method.drafter).expanduser()


@cache
def weights(folder: Path) -> str | None:
    """A hash of a drafter's weights, so that figures of others are not taken for theirs."""
    files = sorted(folder.glob("*.safetensors"))
    return hash_files(files) if files else None


def trained(method: Method, model: LoadedModel) -> dict[str, int | None]:
    """What is known of a drafter's training by its folder; None for what is not."""
    path = _folder(method, model) / "provenance.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    training = known.get("training", {})
    phases = sum(phase.get("tokens", 0) for phase in training.get("phases", ()))
    return {"parameters": known.get("trainable_parameters"), "training_tokens": training.get("tokens", phases or None)}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _arguments(argv)
    return guarded(lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> int:
    rows = Table(arguments).run()
    text = markdown(rows)
    write_text(arguments.output / "methods.json", json.dumps(rows, indent=1) + "\n")
    write_text(arguments.output / "methods.md", text)
    draw(rows, arguments.output / "methods.png")
    print(text, end="")
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--output", type=Path, required=True, help="folder of cells/, methods.json, methods.md and methods.png")
    add("--model", default="smollm2")
    add("--methods", nargs="+", default=["plain", "ngram", "lm", "medusa", "eagle1", "eagle2", "eagle3"])
    add("--prompts", nargs="+", default=["default", "summaries", "forms"], help="sets by name, or files")
    add("--limit", type=int, default=20, help="the first so many prompts of each set")
    add("--tune", default="default", help="the set on which trees are chosen")
    add("--tune-limit", type=int, default=6)
    add("--trees", nargs="+", default=list(TREES), help="rows,depth,branch of each tree tried, and floor if any")
    add("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    add("--max-tokens", type=int, default=128)
    add("--repeats", type=int, default=1, help="runs of each kind per prompt")
    add("--seed", type=int, default=0)
    add("--dtype", default="bfloat16")
    add("--device", default="cpu")
    add("--threads", type=int)
    add("--kv-cache-mib", type=int, default=128, help="of each engine; there is one for each method")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
