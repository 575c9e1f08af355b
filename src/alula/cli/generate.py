"""`alula generate`: one prompt, one answer."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import tyro

from alula.cli.options import JsonOption, ModelOptions, SamplingOptions, read_stdin

if TYPE_CHECKING:
    from alula.bench.run import Run
    from alula.engine.engine import Engine


@dataclass(frozen=True)
class Generate(JsonOption, SamplingOptions, ModelOptions):
    """Write an answer to a prompt, streamed, with one line of figures at the end."""

    prompt: tyro.conf.Positional[str] = "-"
    """The prompt; `-` reads standard input."""
    raw: bool = False
    """Continue the prompt as it is, instead of asking it as a user's turn in the model's chat template."""

    def run(self) -> int:
        params = self.params()
        self.engine_config()  # refuses a bad value before the model is loaded
        text = read_stdin() if self.prompt == "-" else self.prompt
        from alula.bench.run import run_one
        from alula.bench.tasks import as_user_turn

        llm = self.load_llm()
        prompt = tuple(as_user_turn(llm.tokenizer, text, raw=self.raw))
        run = run_one(llm.engine, prompt, params, None if self.json else write)
        if self.json:
            print(json.dumps(result(llm.engine, run), ensure_ascii=False))
        else:
            print(f"\n\n{figures_line(llm.engine, run)}")
        return 0


def write(text: str) -> None:
    """Stream text to standard output at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def result(engine: Engine, run: Run) -> dict[str, object]:
    from alula.bench.run import request_stats

    completion = run.completion
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "prompt_tokens": len(run.output.prompt_token_ids),
        "completion_tokens": run.tokens,
        "finish_reason": completion.finish_reason,
        "seed": completion.seed,
        "stats": request_stats(engine, run),
    }


def figures_line(engine: Engine, run: Run) -> str:
    stats, completion = run.completion.stats, run.completion
    rate = run.tokens / run.seconds if run.seconds else 0.0
    return (
        f"[{run.tokens} tokens ({completion.finish_reason}), {rate:.1f} tokens/s, "
        f"first after {1e3 * run.ttft_s:.0f} ms; drafter {engine.drafter.name}, rule {engine.config.rule}: "
        f"tau {stats.tau:.2f}, acceptance rate {stats.acceptance_rate:.2f}; seed {completion.seed}]"
    )
