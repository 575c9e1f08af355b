"""GGUF tensors under their Hugging Face names, in Hugging Face layout, dequantised a few rows at a time."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from alula.config import AlulaError

TYPES = ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q6_K")

ROPE_FREQS = "rope_freqs.weight"

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_LAYER = {
    **_LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_CHUNK = 1 << 23
"""Elements dequantised at once: 32 MiB in fp32."""


class GgufFile:
    """An open GGUF file: metadata and tensors. Raises AlulaError for a damaged one or a type alula does not read."""

    def __init__(self, path: Path) -> None:
        import gguf

        self.path = path
        try:
            reader = gguf.GGUFReader(path)
            self.metadata: dict[str, Any] = {key: field.contents() for key, field in reader.fields.items()}
        except (ValueError, KeyError, IndexError, OverflowError, TypeError) as error:
            raise AlulaError(f"{path} is truncated or no GGUF file ({error}): download it again") from None
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._check(path.stat().st_size)

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """As torch has it: GGUF lists dimensions from the innermost."""
        return tuple(int(size) for size in reversed(self._tensors[name].shape.tolist()))

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The tensor dequantised to fp32, then rounded to `dtype`, in GGUF's own layout."""
        import gguf

        tensor, shape = self._tensors[name], self.shape(name)
        rows = tensor.data if len(shape) > 1 else tensor.data[None]
        result = torch.empty((len(rows), shape[-1]), dtype=dtype)
        step = max(1, _CHUNK // shape[-1])
        for start in range(0, len(rows), step):
            part = gguf.dequantize(rows[start : start + step], tensor.tensor_type)
            result[start : start + step] = torch.from_numpy(part.copy()).view(-1, shape[-1])
        return result.view(shape)

    def place(self, name: str) -> tuple[str, tuple[int, ...], int, int]:
        """The name of its type, its shape as torch has it, and its offset and size in bytes."""
        tensor = self._tensors[name]
        return tensor.tensor_type.name, self.shape(name), int(tensor.data_offset), int(tensor.n_bytes)

    def _check(self, size: int) -> None:
        for name, tensor in self._tensors.items():
            if tensor.tensor_type.name not in TYPES:
                raise AlulaError(
                    f"tensor {name!r} is stored as {tensor.tensor_type.name}: alula reads {', '.join(TYPES)}, so give "
                    "a file quantised to one of these"
                )
            if tensor.data_offset + tensor.n_bytes > size:
                raise AlulaError(f"{self.path} is truncated: tensor {name!r} ends after the file, download it again")


def hf_name(name: str, architecture: str) -> str:
    """Hugging Face's name of a GGUF tensor. Raises AlulaError for one alula does not know."""
    table = _GEMMA_LAYER if architecture == "gemma3" else _LAYER
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if layer and layer[2] in table:
        return f"model.layers.{layer[1]}.{table[layer[2]]}.{layer[3]}"
    stem, _, kind = name.partition(".")
    if stem in _TOP and kind == "weight":
        return f"{_TOP[stem]}.weight"
    raise AlulaError(f"GGUF tensor {name!r} is none that a {architecture} model has: convert the file anew")


def to_hf_layout(tensor: torch.Tensor, name: str, architecture: str, heads: int, kv_heads: int) -> torch.Tensor:
    """Undoes what llama.cpp's converter does to a tensor of that (GGUF) name.

    llama: rows of the query and key heads lie pair by pair instead of half by half. gemma3: 1 was added to norms.
    """
    kind = name.rsplit(".", 2)[-2]
    if architecture == "gemma3" and kind.endswith("norm"):
        return tensor - 1.0
    if architecture == "llama" and kind in ("attn_q", "attn_k"):
        count = heads if kind == "attn_q" else kv_heads
        pairs = tensor.view(count, len(tensor) // count // 2, 2, -1)
        return pairs.transpose(1, 2).reshape(tensor.shape)
    return tensor
