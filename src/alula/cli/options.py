"""Flags shared by the commands, and what they stand for. Imports nothing heavy: `--help` must be quick."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from alula.config import AlulaError

if TYPE_CHECKING:
    from alula.engine.config import EngineConfig
    from alula.engine.llm import LLM
    from alula.model.load import LoadedModel
    from alula.sequence import SamplingParams

_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


@dataclass(frozen=True)
class ModelOptions:
    """Which model runs, how it drafts, and on what."""

    model: str = "smollm2"
    """Built-in name (smollm2), Hugging Face folder or hub id, or GGUF file."""
    drafter: str = "auto"
    """What proposes tokens: auto (the head shipped for the model, else ngram), none, ngram, a name (eagle1, medusa and
    lm for smollm2, from a checkout's heads/ or $ALULA_HEADS), or the path of an EAGLE head, of Medusa heads or of a
    smaller model with the same tokenizer."""
    rule: Literal["coupled", "rejection"] = "coupled"
    """How drafts are verified: coupled keeps the text of plain decoding, rejection its distribution."""
    nodes: int = 4
    """Rows verified per step: the draft tree with its root."""
    depth: int = 2
    """Levels of the draft tree."""
    branch: int = 3
    """Children tried per node."""
    floor: float = 0.0
    """Least probability that the drafter gives the whole path to a node (llama.cpp's --draft-p-min is the like for
    single tokens); less likely nodes are neither drafted nor verified. 0 is none; static trees and ngram have none."""
    dtype: Literal["auto", "bf16", "fp32", "int8", "file", "bfloat16", "float32"] = "bf16"
    """Number format of weights, activations and cache. int8 and file are for weights, with bf16 for the rest (native
    kernels); file takes the blocks of a GGUF file as they are. auto measures which
    is fastest here, and says so."""
    threads: int | None = None
    """CPU threads; None leaves torch's choice."""
    kernels: Literal["auto", "native", "torch"] = "auto"
    """Kernel set: native (C++, CPU), torch (reference, any device), or auto."""
    device: str = "cpu"
    """Where the model lies, as torch names it."""
    max_model_len: int | None = None
    """Longest prompt plus output, in tokens; None takes the model's own limit."""
    max_num_batched_tokens: int = 256
    """Rows of one target forward; longer prompts are read in chunks."""
    kv_cache_mib: int = 384
    """Memory of the KV cache, MiB, the drafter's part included."""
    allow_unverified_head: bool = False
    """Accept a head that does not say which target it was trained for."""

    def engine_config(self, *, max_num_seqs: int = 16, prefix_caching: bool = True) -> EngineConfig:
        from alula.engine.config import EngineConfig
        from alula.tree import TreeShape

        try:
            shape = TreeShape(self.nodes, self.depth, self.branch, self.floor)
        except ValueError as error:
            raise AlulaError(str(error)) from None
        return EngineConfig(
            rule=self.rule,
            shape=shape,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            kv_cache_mib=self.kv_cache_mib,
            enable_prefix_caching=prefix_caching,
        )

    def load_llm(self, *, max_num_seqs: int = 16) -> LLM:
        """The model with its drafter, ready to generate."""
        config = self.engine_config(max_num_seqs=max_num_seqs)
        from alula.engine.llm import LLM

        llm = LLM(
            self.model,
            self.drafter,
            dtype=self.dtype_name,
            kernels=self.kernels,
            device=self.device,
            threads=self.threads,
            config=config,
            allow_unverified_head=self.allow_unverified_head,
        )
        _announce(llm.engine.model)
        return llm

    def load_target(self) -> LoadedModel:
        """The model alone, for commands that build several engines on it."""
        from alula.model.load import load_model, set_threads

        set_threads(self.threads)
        model = load_model(
            self.model, dtype=self.dtype_name, kernels=self.kernels, device=self.device, max_len=self.max_model_len
        )
        _announce(model)
        return model

    @property
    def dtype_name(self) -> str:
        return _DTYPES.get(self.dtype, self.dtype)


def _announce(model: LoadedModel) -> None:
    if model.picked is not None:
        print(f"dtype auto takes {model.picked}", file=sys.stderr)


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen and when an answer ends."""

    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches this."""
    top_k: int = 0
    """Keep this many of the most likely tokens; 0 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this times the most likely one."""
    repetition_penalty: float = 1.0
    """Above 1 makes tokens of prompt and output less likely."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token already written."""
    frequency_penalty: float = 0.0
    """Subtracted for each time a token was written."""
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Text that ends the output."""
    ignore_eos: bool = False
    """Write on past the model's end token."""
    min_tokens: int = 0
    """No end before this many tokens."""
    max_tokens: int = 128
    """Longest output, in tokens."""
    seed: int | None = None
    """Same seed, same text; None draws a fresh one and reports it."""

    def params(self) -> SamplingParams:
        """Raises AlulaError, naming the field and the mend."""
        from alula.sequence import SamplingParams

        names = list(SamplingOptions.__dataclass_fields__)
        try:
            return SamplingParams(**{name: getattr(self, name) for name in names})
        except ValueError as error:
            raise AlulaError(str(error)) from None


@dataclass(frozen=True)
class JsonOption:
    json: bool = False
    """Print one JSON object and nothing else on standard output."""


def read_stdin() -> str:
    """All of standard input. Raises AlulaError for anything but UTF-8."""
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise AlulaError(f"standard input is not valid UTF-8 (byte {error.start}): re-encode it as UTF-8") from None


def check_writable(name: str, path: Path | None) -> None:
    """Before hours of work, not after. Raises AlulaError where the folder of a result file does not exist."""
    if path is not None and not path.absolute().parent.is_dir():
        raise AlulaError(f"{name}: the folder {path.parent} does not exist: create it first")
