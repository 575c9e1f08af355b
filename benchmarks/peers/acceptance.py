"""An EAGLE-3 head's chain in alula and in vLLM: the same weights, prompts and chain, greedily, side by side.

Each engine has an environment of its own, so this is run once in each. It imports nothing that the other lacks:

    python acceptance.py alula --target TARGET --head HEAD --prompts a.jsonl b.jsonl --limit 10 --output ours.json
    python acceptance.py vllm --target TARGET --head HEAD --like ours.json --output theirs.json

TARGET is a Hugging Face folder, HEAD a head in the SpecForge or the speculators layout. The second run takes its
prompts (as token ids), chain and length from the first one's file, and prints both figures. The mean acceptance length
is vLLM's: one plus the accepted tokens per step that had a draft, pooled over steps.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def main() -> None:
    arguments = _arguments()
    report = run_alula(arguments) if arguments.engine == "alula" else run_vllm(arguments)
    arguments.output.write_text(json.dumps(report) + "\n", encoding="utf-8")
    print(f"{arguments.engine}: mean acceptance length {length(report):.3f}, {rates(report)}")
    if arguments.like is not None:
        compare(json.loads(arguments.like.read_text(encoding="utf-8")), report)


def run_alula(arguments: argparse.Namespace) -> dict[str, Any]:
    """One request at a time, so that every prompt has figures of its own."""
    from alula.bench.tasks import as_user_turn, read_prompts
    from alula.engine.config import EngineConfig
    from alula.engine.llm import LLM
    from alula.sequence import SamplingParams
    from alula.tree import TreeShape

    config = EngineConfig(shape=TreeShape(nodes=arguments.chain + 1, depth=arguments.chain, branch=1))
    llm = LLM(
        arguments.target,
        arguments.head,
        dtype=arguments.dtype,
        config=config,
        threads=arguments.threads,
        allow_unverified_head=True,
    )
    texts = [text for path in arguments.prompts for text in read_prompts(path, arguments.limit)]
    params = SamplingParams(max_tokens=arguments.tokens, ignore_eos=True)
    results = []
    for text in texts:
        prompt = as_user_turn(llm.tokenizer, text)
        sample = llm.generate(prompt, params)[0].outputs[0]
        stats = sample.stats
        accepted = [stats.accepted_by_depth[depth] for depth in range(1, arguments.chain + 1)]
        results.append(_result(prompt, sample.token_ids, stats.tried_by_depth[1], accepted))
    return {"engine": "alula", "chain": arguments.chain, "tokens": arguments.tokens, "results": results}


def run_vllm(arguments: argparse.Namespace) -> dict[str, Any]:
    """vLLM counts over all requests; the differences between requests, run one by one, are each one's own."""
    from vllm import LLM, SamplingParams

    like = json.loads(arguments.like.read_text(encoding="utf-8"))
    drafting = {"method": "eagle3", "model": arguments.head, "num_speculative_tokens": like["chain"]}
    llm = LLM(
        arguments.target,
        dtype=arguments.dtype,
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=1,
        gpu_memory_utilization=0.5,  # on a CPU, of the memory that there is, whatever its name says
        speculative_config=drafting,
        disable_log_stats=False,
    )
    params = SamplingParams(temperature=0.0, max_tokens=like["tokens"], ignore_eos=True)
    results = []
    drafts, accepted = _counters(llm, like["chain"])
    for entry in like["results"]:
        output = llm.generate({"prompt_token_ids": entry["prompt"]}, params, use_tqdm=False)[0].outputs[0]
        new_drafts, new_accepted = _counters(llm, like["chain"])
        gained = [new - old for new, old in zip(new_accepted, accepted, strict=True)]
        results.append(_result(entry["prompt"], list(output.token_ids), new_drafts - drafts, gained))
        drafts, accepted = new_drafts, new_accepted
    return {"engine": "vllm", "chain": like["chain"], "tokens": like["tokens"], "results": results}


def _counters(llm: Any, chain: int) -> tuple[int, list[int]]:
    """Steps with a draft, and accepted tokens by position, since the start."""
    drafts, accepted = 0, [0] * chain
    for metric in llm.get_metrics():
        if metric.name == "vllm:spec_decode_num_drafts":
            drafts += metric.value
        if metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
            accepted = [old + new for old, new in zip(accepted, metric.values, strict=True)]
    return drafts, accepted


def _result(prompt: Sequence[int], tokens: Sequence[int], drafts: int, accepted: Sequence[int]) -> dict[str, Any]:
    """drafts: steps that had one. accepted: tokens, by position in the chain."""
    return {"prompt": list(prompt), "tokens": list(tokens), "drafts": drafts, "accepted": list(accepted)}


def length(report: dict[str, Any]) -> float:
    drafts = sum(result["drafts"] for result in report["results"])
    return 1 + sum(sum(result["accepted"]) for result in report["results"]) / drafts


def rates(report: dict[str, Any]) -> str:
    """Share of the steps in which each position was accepted."""
    drafts = sum(result["drafts"] for result in report["results"])
    totals = [sum(counts) for counts in zip(*(result["accepted"] for result in report["results"]), strict=True)]
    return "by position " + " / ".join(f"{total / drafts:.3f}" for total in totals) + f", {drafts} steps"


def compare(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Both figures over all prompts, and over those whose texts agree, where nothing but the engines differs."""
    pairs = list(zip(ours["results"], theirs["results"], strict=True))
    same = [pair for pair in pairs if pair[0]["tokens"] == pair[1]["tokens"]]
    for name, chosen in (("all prompts", pairs), (f"the {len(same)} of {len(pairs)} whose texts agree", same)):
        if chosen:
            first, second = (length({"results": [pair[side] for pair in chosen]}) for side in (0, 1))
            print(f"{name}: {ours['engine']} {first:.3f}, {theirs['engine']} {second:.3f} ({second / first - 1:+.1%})")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=("alula", "vllm"))
    parser.add_argument("--target", required=True, help="Hugging Face folder of the target")
    parser.add_argument("--head", required=True, help="folder of the head")
    parser.add_argument("--prompts", nargs="+", type=Path, default=[None], help="files of prompts, JSON lines (alula)")
    parser.add_argument("--limit", type=int, default=10, help="prompts per file (alula)")
    parser.add_argument("--tokens", type=int, default=128, help="tokens per prompt (alula)")
    parser.add_argument("--chain", type=int, default=3, help="drafted tokens per step (alula)")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads (alula)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of both models")
    parser.add_argument("--like", type=Path, help="the file of the first run (vllm)")
    parser.add_argument("--output", required=True, type=Path, help="JSON file to write")
    arguments = parser.parse_args()
    if (arguments.engine == "vllm") != (arguments.like is not None):
        parser.error("--like names the first run's file, for vllm and nothing else")
    return arguments


if __name__ == "__main__":
    main()
