"""Writes small GGUF files as llama.cpp's converter does, from Hugging Face models."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import pre_tokenizers

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA_NAMES = {
    **LAYER_NAMES,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
TOP_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}

SPECIAL = ["<|end|>", "<|user|>"]
TOKENS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "ll", "llo", "ĠĠ"]
MERGES = ["h e", "l l", "ll o", "Ġ Ġ"]
TEMPLATE = "{% for m in messages %}<|user|>{{ m['content'] }}{% endfor %}"


def gguf_name(name: str, architecture: str) -> str:
    table = GEMMA_NAMES if architecture == "gemma3" else LAYER_NAMES
    stem, kind = name.rsplit(".", 1)
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
    return f"blk.{layer[1]}.{table[layer[2]]}.{kind}" if layer else f"{TOP_NAMES[stem]}.{kind}"


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """Row i of the first half of a head goes to 2 i, of the second half to 2 i + 1."""
    size = len(rows) // heads
    order = [head * size + (index // 2) + (index % 2) * (size // 2) for head in range(heads) for index in range(size)]
    return rows[order]


def write_metadata(writer: gguf.GGUFWriter, architecture: str, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if head_dim * config.num_attention_heads != config.hidden_size:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if architecture == "llama":
        writer.add_rope_dimension_count(head_dim)
    if architecture == "gemma3":
        writer.add_sliding_window(config.sliding_window)
        writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    else:
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])


def write_tokenizer(writer: gguf.GGUFWriter, pre: str = "gpt-2") -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def write_model(
    path: Path,
    model: Any,
    architecture: str,
    *,
    kind: str = "F32",
    pre: str = "gpt-2",
    extra: Callable[[gguf.GGUFWriter], None] = lambda _: None,
    tensors: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """The model as a GGUF file: norms and biases in F32, matrices as `kind`."""
    writer = gguf.GGUFWriter(path, architecture)
    config = model.config
    write_metadata(writer, architecture, config)
    write_tokenizer(writer, pre)
    extra(writer)
    for name, parameter in model.named_parameters():
        values = parameter.detach().float().numpy()
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            values = interleave(values, heads)
        if architecture == "gemma3" and "norm" in name:
            values = values + 1
        qtype = gguf.GGMLQuantizationType[kind if values.ndim > 1 else "F32"]
        data = values if kind == "F32" or values.ndim == 1 else gguf.quantize(values, qtype)
        writer.add_tensor(gguf_name(name, architecture), np.ascontiguousarray(data), raw_dtype=qtype)
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama3_divisors(scaled: torch.Tensor, plain: torch.Tensor) -> np.ndarray:
    """What llama.cpp stores as rope_freqs.weight."""
    return (plain / scaled).float().numpy()
