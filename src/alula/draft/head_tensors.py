"""Which tensors a head has, by their official names, and the check that they are all there and nothing else is."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

import torch

from alula.config import AlulaError
from alula.draft.head_config import HeadConfig


def expected_shapes(config: HeadConfig, taps: int) -> dict[str, tuple[int, ...]]:
    """Required tensors of a head with that many taps, in official names."""
    hidden, keys = config.hidden_size, config.num_key_value_heads * config.head_dim
    queries, inner = config.num_attention_heads * config.head_dim, config.intermediate_size
    eagle3 = config.kind == "eagle3"
    layer, width = ("midlayer", 2 * hidden) if eagle3 else ("layers.0", hidden)
    features = taps * config.target_hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, features if eagle3 else hidden + features),
        f"{layer}.self_attn.q_proj.weight": (queries, width),
        f"{layer}.self_attn.k_proj.weight": (keys, width),
        f"{layer}.self_attn.v_proj.weight": (keys, width),
        f"{layer}.self_attn.o_proj.weight": (hidden, queries),
        f"{layer}.mlp.gate_proj.weight": (inner, hidden),
        f"{layer}.mlp.up_proj.weight": (inner, hidden),
        f"{layer}.mlp.down_proj.weight": (hidden, inner),
        f"{layer}.post_attention_layernorm.weight": (hidden,),
    }
    if config.attention_bias:
        sizes = {"q": queries, "k": keys, "v": keys}
        shapes |= {f"{layer}.self_attn.{name}_proj.bias": (size,) for name, size in sizes.items()}
    if not eagle3:
        return shapes
    shapes |= {f"midlayer.{name}.weight": (hidden,) for name in ("hidden_norm", "input_layernorm")}
    shapes |= {"norm.weight": (hidden,), "lm_head.weight": (config.draft_vocab_size, hidden)}
    if config.fc_norm:
        shapes |= {f"fc_norm.{tap}.weight": (config.target_hidden_size,) for tap in range(taps)}
    if config.norm_before_fc:
        shapes["input_norm.weight"] = (features,)
    return shapes


def _optional_shapes(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    hidden, vocab = config.hidden_size, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (vocab, hidden), "fc.bias": (hidden,)}
    if config.kind == "eagle3":
        shapes |= {"d2t": (config.draft_vocab_size,), "t2d": (vocab,)}
    if config.attention_bias:
        layer = "midlayer" if config.kind == "eagle3" else "layers.0"
        shapes[f"{layer}.self_attn.o_proj.bias"] = (hidden,)
    return shapes


def check_tensors(config: HeadConfig, weights: Mapping[str, torch.Tensor]) -> None:
    required = expected_shapes(config, _taps_of(config))
    allowed = required | _optional_shapes(config)
    for name in required:
        if name not in weights:
            raise AlulaError(f"the head lacks the tensor {name!r}: {_missing_mend(name, set(weights) - set(allowed))}")
    for name, tensor in weights.items():
        if name not in allowed:
            raise AlulaError(f"the head has the unknown tensor {name!r}: remove it, or set the flag that uses it")
        if tuple(tensor.shape) != allowed[name]:
            raise AlulaError(
                f"the head's {name} has shape {tuple(tensor.shape)}, but its config.json asks for {allowed[name]}:"
                " give the config of these weights"
            )
        if name not in ("d2t", "t2d") and not tensor.is_floating_point():
            raise AlulaError(f"the head's {name} is stored as {tensor.dtype}: give unquantised floats")


def _missing_mend(name: str, unknown: set[str]) -> str:
    alike = difflib.get_close_matches(name, sorted(unknown), n=1, cutoff=0)
    if alike:
        return f"it has the unknown {alike[0]!r}, which may be it under another name; rename it if so"
    return "give a complete checkpoint of this layout"


def _taps_of(config: HeadConfig) -> int:
    if config.kind == "eagle1":
        return 1
    return 3 if config.taps is None else len(config.taps)


def with_vocabulary(config: HeadConfig, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights without t2d, and with d2t (int64) only where it changes anything."""
    found = dict(weights)
    mask, offsets = found.pop("t2d", None), found.pop("d2t", None)
    if offsets is None:
        if config.draft_vocab_size != config.vocab_size:
            raise AlulaError(
                f"the head lacks d2t, though its draft vocabulary has {config.draft_vocab_size} of "
                f"{config.vocab_size} tokens: export it with d2t, without which drafts would be wrong tokens"
            )
        return found
    if offsets.is_floating_point() or offsets.dtype == torch.bool:
        raise AlulaError(f"d2t is stored as {offsets.dtype}: store whole numbers (int64)")
    if config.draft_vocab_size == config.vocab_size:
        if offsets.any():
            raise AlulaError(
                "d2t is not all zero, though the draft vocabulary is the whole one: remove it, or fill it in"
            )
        return found  # the original leaves both tables unused here, t2d even unfilled
    ids_C = offsets.long() + torch.arange(len(offsets))
    if ids_C.min() < 0 or ids_C.max() >= config.vocab_size or len(set(ids_C.tolist())) != len(ids_C):
        raise AlulaError(
            f"d2t does not lead to distinct token ids below vocab_size {config.vocab_size}: it holds offsets, so that"
            " the target id of draft id i is i + d2t[i]"
        )
    if mask is not None and (int(mask.bool().sum()) != len(ids_C) or not mask.bool()[ids_C].all()):
        raise AlulaError("t2d marks other tokens than d2t leads to: export both from the same vocabulary")
    found["d2t"] = offsets.long()
    return found
