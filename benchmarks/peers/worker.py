"""One engine behind a pipe, for speed.py. Imports nothing but what its own engine needs.

    python worker.py KIND GGUF THREADS SETTINGS

Reads lines {"prompt": [ids], "max_tokens": n} and answers {"answer": {"tokens": n, "seconds": s, "first": s}}: how many
tokens, until the last and until the first. The first line says which version it is.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

Generate = Callable[[Sequence[int], int], tuple[int, float]]
"""(prompt, most tokens) -> (how many came, when the first one was there), greedily, until the model's end."""


def alula(path: str, threads: int, settings: dict[str, str]) -> tuple[str, Generate]:
    """dtype, drafter; nodes, depth, branch and floor of the tree."""
    from alula.engine.config import EngineConfig
    from alula.engine.llm import LLM
    from alula.engine.request import Request
    from alula.sequence import SamplingParams
    from alula.tree import TreeShape
    from alula.version import alula_version

    default = EngineConfig().shape
    shape = TreeShape(*(type(size)(settings.get(name, size)) for name, size in vars(default).items()))
    drafter, dtype = settings.get("drafter", "none"), settings.get("dtype", "bf16")
    config = EngineConfig(shape=shape, enable_prefix_caching=False)
    engine = LLM(path, drafter, dtype=dtype, config=config, threads=threads, allow_unverified_head=True).engine

    def generate(prompt: Sequence[int], most: int) -> tuple[int, float]:
        request = engine.add(Request(tuple(prompt), SamplingParams(max_tokens=most)))
        tokens, first = 0, 0.0
        while engine.has_work:
            tokens += sum(len(output.tokens) for output in engine.step())
            first = first or (time.perf_counter() if tokens else 0.0)
        engine.pop(request)
        return tokens, first

    return alula_version(), generate


def llama_cpp(path: str, threads: int, settings: dict[str, str]) -> tuple[str, Generate]:
    """n_ctx; lookup: tokens drafted from the prompt's own text, 0 for none."""
    from llama_cpp import Llama, __version__
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    lookup = int(settings.get("lookup", "0"))
    model = Llama(
        path,
        n_ctx=int(settings.get("n_ctx", "2048")),
        n_threads=threads,
        n_threads_batch=threads,
        draft_model=LlamaPromptLookupDecoding(num_pred_tokens=lookup) if lookup else None,
        verbose=False,
    )

    def generate(prompt: Sequence[int], most: int) -> tuple[int, float]:
        tokens, first = 0, 0.0
        model.reset()  # or it would not read again what the last prompt began with
        for token in model.generate(list(prompt), temp=0.0, reset=True):
            tokens, first = tokens + 1, first or time.perf_counter()
            if tokens == most or token == model.token_eos():
                break
        return tokens, first

    return __version__, generate


def openvino(path: str, threads: int, settings: dict[str, str]) -> tuple[str, Generate]:
    """Every setting goes to the CPU plugin as it is, PERFORMANCE_HINT for instance."""
    import numpy as np
    import openvino as ov
    import openvino_genai as genai

    pipe = genai.LLMPipeline(path, "CPU", INFERENCE_NUM_THREADS=threads, **settings)
    config = pipe.get_generation_config()
    config.do_sample = False

    def generate(prompt: Sequence[int], most: int) -> tuple[int, float]:
        config.max_new_tokens = most
        begun, ids = time.perf_counter(), ov.Tensor(np.array([prompt], np.int64))
        result = pipe.generate(genai.TokenizedInputs(ids, ov.Tensor(np.ones((1, len(prompt)), np.int64))), config)
        # The tokens are handed over at the end; the pipeline's own account says when the first one was there.
        return len(result.tokens[0]), begun + result.perf_metrics.get_ttft().mean / 1e3

    return ov.__version__, generate


def transformers(path: str, threads: int, settings: dict[str, str]) -> tuple[str, Generate]:
    """dtype; model: the folder of the same weights, which is read instead of the file."""
    import torch
    from transformers import AutoModelForCausalLM, __version__
    from transformers.generation.streamers import BaseStreamer

    torch.set_num_threads(threads)
    path = settings.get("model", path)
    folder, _, name = path.rpartition("/")
    where = {"gguf_file": name} if name.endswith(".gguf") else {}
    dtype = getattr(torch, settings.get("dtype", "bfloat16"))
    model: Any = AutoModelForCausalLM.from_pretrained(folder if where else path, dtype=dtype, **where).eval()

    class Clock(BaseStreamer):  # type: ignore[misc]
        def __init__(self) -> None:
            self.times = list[float]()

        def put(self, value: object) -> None:
            self.times.append(time.perf_counter())

        def end(self) -> None:
            pass

    def generate(prompt: Sequence[int], most: int) -> tuple[int, float]:
        clock, ids = Clock(), torch.tensor([prompt])
        with torch.inference_mode():
            model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=most, do_sample=False, streamer=clock
            )
        return len(clock.times) - 1, clock.times[1]  # the prompt is put first

    return __version__, generate


def vllm(path: str, threads: int, settings: dict[str, str]) -> tuple[str, Generate]:
    """model: the folder of the same weights in Hugging Face's layout, which is read instead of the file; dtype; eager:
    1 leaves out torch.compile, which takes minutes at first."""
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}"
    from vllm import LLM, SamplingParams, __version__

    model = LLM(
        settings["model"],
        dtype=settings.get("dtype", "bfloat16"),
        enforce_eager={"0": False, "1": True}[settings.get("eager", "0")],
        max_model_len=2048,
        max_num_seqs=1,
        gpu_memory_utilization=0.25,  # on a CPU, of the memory that there is, whatever its name says
        enable_prefix_caching=False,
        disable_log_stats=False,
    )

    def generate(prompt: Sequence[int], most: int) -> tuple[int, float]:
        begun = time.perf_counter()
        params = SamplingParams(temperature=0.0, max_tokens=most)
        found = model.generate({"prompt_token_ids": list(prompt)}, params, use_tqdm=False)[0]
        return len(found.outputs[0].token_ids), begun + found.metrics.first_token_latency

    return __version__, generate


SETTINGS = {
    "alula": {"nodes", "depth", "branch", "floor", "drafter", "dtype"},
    "llama_cpp": {"n_ctx", "lookup"},
    "transformers": {"model", "dtype"},
    "vllm": {"model", "dtype", "eager"},
}
"""What each kind knows; OpenVINO's plugin checks its own."""
PR_SET_PDEATHSIG = 1
KINDS = {"alula": alula, "llama_cpp": llama_cpp, "openvino": openvino, "transformers": transformers, "vllm": vllm}


def timed(generate: Generate, prompt: Sequence[int], most: int) -> dict[str, float]:
    begun = time.perf_counter()
    tokens, first = generate(prompt, most)
    return {"tokens": tokens, "seconds": time.perf_counter() - begun, "first": first - begun}


def end_with_parent() -> None:
    """A stopped process would not notice that nobody is left to wake it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    end_with_parent()
    kind, path, threads, settings = sys.argv[1:]
    if kind not in KINDS:
        sys.exit(f"kind is {kind!r}: give one of {', '.join(KINDS)}")
    given = json.loads(settings)
    if unknown := set(given) - SETTINGS.get(kind, set(given)):
        sys.exit(f"engine {kind} has settings {', '.join(sorted(unknown))}: give {', '.join(sorted(SETTINGS[kind]))}")
    try:
        version, generate = KINDS[kind](path, int(threads), given)
    except ValueError as error:
        sys.exit(f"engine {kind} with settings {settings}: {error}")
    answer({"version": version})
    for line in sys.stdin:
        asked = json.loads(line)
        answer(timed(generate, asked["prompt"], asked["max_tokens"]))


def answer(found: dict[str, Any]) -> None:
    print(json.dumps({"answer": found}), flush=True)


if __name__ == "__main__":
    main()
