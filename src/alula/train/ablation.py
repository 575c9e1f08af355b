"""Ablations of the EAGLE-1 paper: what a head reads, and what it is trained for (arXiv 2401.15077, sections 3 and 4).

Heads that differ in one thing are trained on the same data in the same order and compared by n-alpha: the chance that
the head's first choice is the target's when n of the features it has read are its own, in chains whose earlier first
choices were all the text's tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from alula.config import AlulaError
from alula.kernels.stack import FINAL
from alula.model.load import LoadedModel, load_model, set_threads
from alula.model.weights import hash_file
from alula.train.ablation_config import AblationConfig
from alula.train.batch import make_batch
from alula.train.data import read_conversations, split_held_out
from alula.train.eagle1_head import Inputs
from alula.train.evaluate import evaluate
from alula.train.files import write_text
from alula.train.methods.eagle1 import Eagle1Maker
from alula.train.methods.method import Setting
from alula.train.methods.options import Eagle1Options
from alula.train.shards import ShardStore
from alula.train.target import DecoderTarget
from alula.train.trainer import Trainer

STEPS = 5
"""0-alpha to 4-alpha."""


@dataclass(frozen=True)
class Arm:
    """One row of the table."""

    name: str
    options: Eagle1Options
    inputs: Inputs = "advanced"


def input_arms(head: Eagle1Options) -> tuple[Arm, ...]:
    """The paper's figure on feature uncertainty."""
    return (
        Arm("feature", head, "feature"),
        Arm("token", head, "token"),
        Arm("feature + unshifted token", head, "unshifted"),
        Arm("feature + advanced token", head, "advanced"),
    )


def loss_arms(head: Eagle1Options) -> tuple[Arm, ...]:
    """Regression, classification and both, with noise; the published setting without noise too."""
    both = tuple(
        Arm(f"both, lambda {weight:g}", replace(head, regression=1.0, classification=weight))
        for weight in (0.01, 0.1, 1.0)
    )
    return (
        Arm("regression only", replace(head, regression=1.0, classification=0.0)),
        Arm("cross-entropy only", replace(head, regression=0.0, classification=1.0)),
        *both,
        Arm("both, lambda 0.1, no noise", replace(head, regression=1.0, classification=0.1, noise=0.0)),
    )


ARMS: Mapping[str, Callable[[Eagle1Options], tuple[Arm, ...]]] = {"inputs": input_arms, "losses": loss_arms}


@dataclass(frozen=True)
class Result:
    """One head of one seed."""

    arm: str
    seed: int
    alpha: tuple[float, ...]
    """n-alpha by n."""
    top1: tuple[float, ...]
    """The same without the condition on earlier choices."""
    tokens: int
    """Learned tokens."""
    losses: dict[str, float]
    """Of the last step."""


class Watcher(Protocol):
    """Somebody who watches a long table being made."""

    def say(self, sentence: str) -> None:
        """One line: about the data, or the disk that features need."""

    def begin(self, what: str, tokens: int) -> None:
        """A head is about to learn so many tokens."""

    def step(self, tokens: int) -> None:
        """It has learned so many by now."""


def run_ablation(name: str, config: AblationConfig, watcher: Watcher) -> list[Result]:
    """Train what ``output/<name>.json`` does not have yet, adding each result to it as it comes; all results.

    name: a key of ``ARMS``. Raises AlulaError for a file of other settings or data, and for data without answers.
    """
    set_threads(config.threads)
    for file in config.data:
        if not file.is_file():
            raise AlulaError(f"data file {file} does not exist: check the path")
    config.output.mkdir(parents=True, exist_ok=True)
    model = load_model(config.model, dtype=config.dtype, device=config.device)
    path, settings = config.output / f"{name}.json", _settings(config, model)
    results = _known(path, settings)
    made = {(result.arm, result.seed) for result in results}
    # Seed by seed, so that a first full table is there early.
    jobs = [(arm, seed) for seed in config.seeds for arm in ARMS[name](config.head) if (arm.name, seed) not in made]
    bench = _Bench(config, model, watcher) if jobs else None
    for number, (arm, seed) in enumerate(jobs, start=1):
        assert bench is not None
        watcher.begin(f"{arm.name}, seed {seed} ({number} of {len(jobs)})", config.recipe.total_tokens)
        results.append(bench.train(arm, seed, watcher))
        write_text(path, json.dumps({"settings": settings, "results": [asdict(r) for r in results]}, indent=1) + "\n")
    return results


class _Bench:
    """The data and features that all heads of a table share."""

    def __init__(self, config: AblationConfig, model: LoadedModel, watcher: Watcher) -> None:
        found = read_conversations(
            config.data, max_tokens=config.max_tokens, tokenizer=model.tokenizer, tell=watcher.say
        )
        self._train, held = split_held_out(found, one_in=config.held_out_one_in)
        self._held = held[: config.evaluated]
        if not self._train or not self._held:
            raise AlulaError(
                f"data has {len(self._train)} conversations to train on and {len(self._held)} held out: give more of "
                "it, or a smaller held_out_one_in"
            )
        self._config, self._model = config, model
        self._store = ShardStore(
            DecoderTarget(model),
            taps=(FINAL,),
            dtype=model.dtype,
            folder=config.output / "features",
            identity=model.feature_identity,
        )
        self._store.prepare([*self._train, *self._held], watcher.say)

    def train(self, arm: Arm, seed: int, watcher: Watcher) -> Result:
        """One head from its start values to its figures."""
        setting = Setting(self._model, self._store, self._train, seed)
        method = Eagle1Maker(arm.options, arm.inputs).fresh(setting)
        trainer = Trainer(method, self._store, self._config.recipe, lambda: self._train, seed=seed)
        entry: dict[str, float] = {}
        while not trainer.finished:
            entry = trainer.train_step()
            watcher.step(trainer.progress.tokens)
        figures = evaluate(method, [make_batch([c], self._store.get([c])) for c in self._held], steps=STEPS)
        return Result(
            arm=arm.name,
            seed=seed,
            alpha=tuple(round(found.conditional_top1, 4) for found in figures),
            top1=tuple(round(found.top1, 4) for found in figures),
            tokens=trainer.progress.tokens,
            losses={name: round(value, 4) for name, value in entry.items() if name.startswith("loss")},
        )


def _settings(config: AblationConfig, model: LoadedModel) -> dict[str, Any]:
    """All that decides the figures but the seeds, which may grow in number."""
    names = ("max_tokens", "held_out_one_in", "evaluated", "dtype")
    decided = {
        "model": model.weights_hash,
        "data": [hash_file(file) for file in config.data],
        **{name: getattr(config, name) for name in names},
        "recipe": asdict(config.recipe),
        "head": asdict(config.head),
    }
    plain: dict[str, Any] = json.loads(json.dumps(decided))
    return plain


def _known(path: Path, settings: Mapping[str, Any]) -> list[Result]:
    """Results of an earlier run. Raises AlulaError for those of another one."""
    if not path.exists():
        return []
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        theirs, results = found["settings"], [_result(values) for values in found["results"]]
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise AlulaError(f"{path} cannot be read ({error}): remove it, or give another output") from None
    for name, ours in settings.items():
        if theirs.get(name) != ours:
            raise AlulaError(f"{path} was made with another {name}: give the same again, or another output")
    return results


def _result(values: Mapping[str, Any]) -> Result:
    return Result(**{**values, "alpha": tuple(values["alpha"]), "top1": tuple(values["top1"])})
