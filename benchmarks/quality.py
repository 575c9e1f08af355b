"""What a numeric format costs in quality: each of `--dtypes` against fp32, on the same texts.

    alula synth --output own.jsonl --answer-tokens 20000 --temperatures 0
    python benchmarks/quality.py --data own.jsonl --prompts mt_bench.jsonl gsm8k.jsonl --dtypes bf16 int8 file

On the target's own answers: KL(fp32 || format) per answer token, and how often both have the same most likely token. On
the prompts, which people wrote: a likelihood benchmark, the mean loss per token and how often the token that follows is
the most likely one. Every format reads the same tokens (teacher forcing). Ends in one JSON line.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from alula.bench.tasks import read_sets
from alula.cli.errors import guarded
from alula.cli.progress import Progress
from alula.model.load import LoadedModel, load_model, set_threads
from alula.train.data import read_conversations
from alula.train.target import DecoderTarget

REFERENCE = "fp32"
_ROWS = 256
"""Rows whose logits are made at once."""


@dataclass(frozen=True)
class Text:
    """Token ids, and the places of those that count: each is predicted from the place before it."""

    tokens: tuple[int, ...]
    places: tuple[int, ...]
    own: bool


def read_texts(arguments: argparse.Namespace, model: LoadedModel) -> list[Text]:
    """The target's own answers up to `--tokens` of them, then the prompts."""
    texts, left = [], arguments.tokens
    for found in (
        read_conversations(arguments.data, max_tokens=1024, tokenizer=model.tokenizer) if arguments.data else ()
    ):
        places = found.learned[:left]
        if places:
            texts.append(Text(found.tokens[: places[-1] + 1], places, own=True))
        left -= len(places)
    for prompts in read_sets(arguments.prompts, arguments.limit).values() if arguments.prompts else ():
        for prompt in prompts:
            tokens = tuple(model.tokenizer.encode(prompt))[:1024]
            texts.append(Text(tokens, tuple(range(1, len(tokens))), own=False))
    return texts


def log_probabilities(model: LoadedModel, text: Text) -> Iterator[torch.Tensor]:
    """[rows, V], block by block, at the places that count."""
    with torch.inference_mode():
        ((_, hidden_nD),) = DecoderTarget(model).states([text.tokens], ())
        hidden_MD = hidden_nD[torch.tensor(text.places) - 1].to(model.dtype)
        for part_RD in torch.split(hidden_MD, _ROWS):
            yield model.decoder.logits(part_RD).log_softmax(-1)


@dataclass
class Totals:
    """Sums over tokens of one kind of text."""

    tokens: int = 0
    kl: float = 0.0
    agree: int = 0
    loss: float = 0.0
    right: int = 0

    def add(self, found_RV: torch.Tensor, reference_RV: torch.Tensor, said_R: torch.Tensor) -> None:
        best_R = found_RV.argmax(-1)
        self.tokens += len(said_R)
        self.kl += float((reference_RV.exp() * (reference_RV - found_RV)).sum(dtype=torch.float64))
        self.agree += int((best_R == reference_RV.argmax(-1)).sum())
        self.loss -= float(found_RV.gather(1, said_R[:, None]).sum(dtype=torch.float64))
        self.right += int((best_R == said_R).sum())

    def report(self) -> dict[str, float]:
        count = max(self.tokens, 1)
        shares = {"kl": self.kl, "same_token": self.agree, "loss": self.loss, "accuracy": self.right}
        return {"tokens": self.tokens, **{name: round(value / count, 5) for name, value in shares.items()}}


def measure(models: dict[str, LoadedModel], texts: Sequence[Text]) -> list[dict[str, object]]:
    """All formats, text by text, so that the reference is read once."""
    totals = {(name, own): Totals() for name in models for own in (True, False)}
    with Progress("texts", len(texts)) as progress:
        for text in texts:
            said = torch.tensor([text.tokens[place] for place in text.places]).split(_ROWS)
            reference = list(log_probabilities(models[REFERENCE], text))
            for name, model in models.items():
                for parts in zip(log_probabilities(model, text), reference, said, strict=True):
                    totals[name, text.own].add(*parts)
            progress.tick()
    return [
        {
            "dtype": name,
            "kernels": model.kernels.describe(),
            "own": totals[name, True].report(),
            "prompts": totals[name, False].report(),
        }
        for name, model in models.items()
    ]


def table(results: Sequence[dict[str, object]]) -> str:
    lines = ["| format | own answers: KL | same token | prompts: loss | accuracy |", "|---|---|---|---|---|"]
    for result in results:
        own, prompts = result["own"], result["prompts"]
        assert isinstance(own, dict)
        assert isinstance(prompts, dict)
        lines.append(
            f"| {result['dtype']} | {own['kl']:.4f} | {own['same_token']:.1%} | {prompts['loss']:.4f} | "
            f"{prompts['accuracy']:.2%} |"
        )
    return "\n".join(lines)


def _run(arguments: argparse.Namespace) -> int:
    set_threads(arguments.threads)
    models = {name: load_model(arguments.model, dtype=name) for name in (REFERENCE, *arguments.dtypes)}
    results = measure(models, read_texts(arguments, models[REFERENCE]))
    print(table(results))
    print(json.dumps({"model": arguments.model, "results": results}))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtypes", nargs="+", default=["bf16", "int8", "file"])
    parser.add_argument(
        "--data", nargs="*", type=Path, default=[], help="the target's own conversations, as training reads them"
    )
    parser.add_argument("--tokens", type=int, default=20_000, help="answer tokens of these")
    parser.add_argument("--prompts", nargs="*", default=[], help="sets by name, or files")
    parser.add_argument("--limit", type=int, default=None, help="prompts of each set")
    parser.add_argument("--threads", type=int, default=None)
    return guarded(lambda: _run(parser.parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
