"""`alula bench`: what speculation gains here, against plain decoding in the same run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alula.cli.options import JsonOption, ModelOptions, SamplingOptions, check_writable
from alula.cli.progress import Progress
from alula.config import AlulaError

if TYPE_CHECKING:
    from alula.bench.session import Session
    from alula.sequence import SamplingParams


@dataclass(frozen=True)
class Bench(JsonOption, SamplingOptions, ModelOptions):
    """Measure acceptance, speed and where the time goes, plain and speculative in turn."""

    prompts: tuple[str, ...] = ()
    """Sets of prompts, measured one after the other: alula's own by name (default, summaries, forms), or files of JSON
    lines with `turns` (the first is asked) or `prompt`. None is default."""
    limit: int | None = None
    """Only the first so many prompts of each set."""
    repeats: int = 2
    """Runs of each kind per prompt."""
    raw: bool = False
    """Continue the prompts as they are, without the chat template."""
    plot: Path | None = None
    """Draw a picture of the result into this file (needs matplotlib)."""
    output: Path | None = None
    """Write the JSON object to this file too."""
    estimate: bool = False
    """Measure no speed, but acceptance in service against what training expects of the same drafter and texts."""
    compare_hf: bool = False
    """Also measure greedy `transformers` generate against plain decoding (loads the model once more)."""

    def run(self) -> int:
        from alula.bench.tasks import read_sets

        params, sets = self.params(), read_sets(self.prompts, self.limit)
        self._check(len(sets))
        report = self._estimate(sets) if self.estimate else self._measure(sets, params)
        if self.output is not None:
            self.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        if self.plot is not None:
            from alula.bench.plot import draw

            draw(report, self.plot)
        print(json.dumps(report))
        return 0

    def _check(self, sets: int) -> None:
        self.engine_config()
        if self.repeats < 1:
            raise AlulaError(f"repeats is {self.repeats}: give a whole number of at least 1")
        if self.compare_hf and self.temperature > 0:
            raise AlulaError("compare_hf measures greedy decoding: leave --temperature at 0")
        if self.estimate and (self.temperature > 0 or self.plot is not None or self.rule != "coupled" or self.raw):
            raise AlulaError("estimate is of greedy chats: leave --temperature at 0, and --plot, --rule and --raw out")
        if self.plot is not None and sets > 1:
            raise AlulaError(f"plot draws one set of prompts, and prompts names {sets}: draw them one by one")
        check_writable("plot", self.plot)
        check_writable("output", self.output)

    def _measure(self, sets: dict[str, list[str]], params: SamplingParams) -> dict[str, Any]:
        """The report of the one set; of several, each under its name."""
        target = self.load_target()
        from alula.bench.report import sets_table
        from alula.bench.session import Session

        session, reports = Session(target, self.rule, self.allow_unverified_head), {}
        with Progress("runs", sum(map(len, sets.values())) * (2 * self.repeats + self.compare_hf)) as progress:
            for name, texts in sets.items():
                if len(sets) > 1:
                    self._say(f"prompts: {name} ({len(texts)})")
                reports[name] = self._measure_set(session, texts, params, progress)
        if len(reports) == 1:
            return {"set": name, **reports[name]}
        self._say(f"\n{sets_table(reports)}")
        return {"sets": reports}

    def _estimate(self, sets: dict[str, list[str]]) -> dict[str, Any]:
        """Served and estimated figures of each set."""
        from alula.bench.report import estimate_table
        from alula.train.config import Served
        from alula.train.estimate import served_and_estimated

        target, reports = self.load_target(), {}
        tree = {name: getattr(self, name) for name in ("nodes", "depth", "branch", "floor", "kv_cache_mib")}
        with Progress("sets", len(sets)) as progress:
            for (name, texts), path in zip(sets.items(), self.prompts or ("default",), strict=True):
                served = Served(held_out=0, prompts=len(texts), sets=(path,), tokens=self.max_tokens, **tree)
                reports[name] = served_and_estimated(target, self.drafter, served)
                progress.tick()
        self._say(estimate_table(reports))
        return {"sets": reports}

    def _measure_set(
        self, session: Session, texts: list[str], params: SamplingParams, progress: Progress
    ) -> dict[str, Any]:
        from alula.bench.offline import Watch, measure, measure_huggingface
        from alula.bench.tasks import as_user_turn

        prompts = [tuple(as_user_turn(session.model.tokenizer, text, raw=self.raw)) for text in texts]
        config, watch = self.engine_config(max_num_seqs=1, prefix_caching=False), Watch(self._say, progress.tick)
        report = measure(session, self.drafter, config, prompts, params, repeats=self.repeats, watch=watch)
        if self.compare_hf:
            report["plain_over_huggingface"] = measure_huggingface(session, config, prompts, params, watch)
        return report

    def _say(self, text: str) -> None:
        if not self.json:
            print(text, flush=True)
