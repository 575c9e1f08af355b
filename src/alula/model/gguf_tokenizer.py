"""The tokenizer that a GGUF file describes, as files of a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from alula.config import AlulaError

_BYTE_LEVEL = (
    "default",
    "gpt-2",
    "llama-bpe",
    "llama3",
    "llama-v3",
    "qwen2",
    "deepseek-r1-qwen",
    "tekken",
    "smollm",
)
"""Values of tokenizer.ggml.pre whose way of splitting text is known, here or in transformers."""


def save_tokenizer(gguf: Path, metadata: Mapping[str, Any], folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and the chat template, converted by transformers.

    Raises AlulaError for a kind of tokenizer that is not known to convert faithfully.
    """
    kind, split = (
        metadata.get("tokenizer.ggml.model"),
        metadata.get("tokenizer.ggml.pre", "default"),
    )
    if kind not in ("gpt2", "llama"):
        raise AlulaError(
            f"tokenizer.ggml.model is {kind!r}: alula reads 'gpt2' and 'llama', give a Hugging Face folder"
        )
    if kind == "gpt2" and split not in _BYTE_LEVEL:
        raise AlulaError(
            f"tokenizer.ggml.pre is {split!r}: alula knows {', '.join(_BYTE_LEVEL)}, give the model as a Hugging Face "
            "folder"
        )
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    except Exception as error:  # noqa: BLE001 - whatever the conversion met, the mend is the same
        raise AlulaError(
            f"the tokenizer of {gguf} cannot be converted ({error}): give the model as a Hugging Face folder"
        ) from None
    if split == "smollm":
        _split_digits(tokenizer.backend_tokenizer)
    tokenizer.save_pretrained(str(folder))


def _split_digits(backend: Any) -> None:
    """SmolLM's merges were learned on single digits, split off before everything else."""
    from tokenizers import pre_tokenizers

    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
