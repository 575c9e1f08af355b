"""The decoder against Hugging Face transformers on tiny random models of every family, fp32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from alula.kernels.stack import FINAL

SMALL: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SLIDING = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True}),
    "llama_biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "llama3_rope": ("Llama", {"rope_parameters": LLAMA3}),
    "llama_linear_rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0}}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "mistral_window": ("Mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2_window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3_bias": ("Qwen3", {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True}),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 16,
            "sliding_window": 6,
            "layer_types": SLIDING,
            "rope_parameters": GEMMA_ROPE,
            "query_pre_attn_scalar": 24,
            "final_logit_softcapping": 3.0,
        },
    ),
}


def build(case: str, folder: Path) -> Any:
    """A random model of that family, saved to the folder. Norms and biases are random: at 1 or 0 nothing shows."""
    family, extra = CASES[case]
    suffix = "TextConfig" if family == "Gemma3" else "Config"
    torch.manual_seed(len(case))
    config = getattr(transformers, family + suffix)(**{**SMALL, **extra})
    config._attn_implementation = "eager"
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("case", CASES)
def test_logits_and_taps_equal_transformers(
    case: str, tmp_path: Path, dense: Callable[..., Any], load_folder: Callable[..., Any]
) -> None:
    reference, decoder = build(case, tmp_path), load_folder(tmp_path)
    ids = torch.randint(3, SMALL["vocab_size"], (70,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.inference_mode():
        expected = reference(torch.tensor([ids]), output_hidden_states=True)
        hidden = dense(decoder, ids, taps=(2, 0, 3, FINAL), chunk=13)
        logits_TV = decoder.logits(hidden.final_TD)
    assert logits_TV.dtype == torch.float32
    assert expected.logits.abs().max() > 0.5
    torch.testing.assert_close(logits_TV, expected.logits[0], atol=1e-4, rtol=0)
    taps = torch.cat([expected.hidden_states[index][0] for index in (2, 0, 3, -1)], 1)
    torch.testing.assert_close(hidden.features_TF, taps, atol=1e-4, rtol=1e-5)


def test_tap_past_the_last_layer_is_not_normed(
    tmp_path: Path, dense: Callable[..., Any], load_folder: Callable[..., Any]
) -> None:
    reference, decoder = build("llama", tmp_path), load_folder(tmp_path)
    outputs: list[torch.Tensor] = []
    reference.model.layers[-1].register_forward_hook(lambda _m, _i, output: outputs.append(output))
    with torch.inference_mode():
        reference(torch.tensor([[5, 6, 7]]))
        features = dense(decoder, [5, 6, 7], taps=(4,)).features_TF
    torch.testing.assert_close(features, outputs[0][0], atol=1e-4, rtol=1e-5)


def test_attention_softcap_follows_the_config(
    tmp_path: Path, dense: Callable[..., Any], load_folder: Callable[..., Any]
) -> None:
    """transformers ignores Gemma 3's attn_logit_softcapping, so its scores are capped here by hand."""
    reference = build("gemma3", tmp_path)
    reference.config.attn_logit_softcapping = 0.5
    reference.config.save_pretrained(tmp_path)
    decoder = load_folder(tmp_path)

    def capped(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, **_: Any) -> tuple[torch.Tensor, None]:
        k, v = (x.repeat_interleave(module.num_key_value_groups, 1) for x in (k, v))
        scores = 0.5 * torch.tanh(q @ k.transpose(2, 3) * scaling / 0.5) + mask
        return (scores.softmax(-1) @ v).transpose(1, 2), None

    transformers.AttentionInterface.register("alula_test_capped", capped)
    transformers.AttentionMaskInterface.register("alula_test_capped", transformers.masking_utils.eager_mask)
    reference.set_attn_implementation("alula_test_capped")
    ids = list(range(10, 30))
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0]
        logits = decoder.logits(dense(decoder, ids).final_TD)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_bf16_stays_near_fp32(tmp_path: Path, dense: Callable[..., Any], load_folder: Callable[..., Any]) -> None:
    build("gemma3", tmp_path)
    exact, rounded = load_folder(tmp_path), load_folder(tmp_path, torch.bfloat16)
    ids = list(range(10, 40))
    with torch.inference_mode():
        a, b = (decoder.logits(dense(decoder, ids).final_TD) for decoder in (exact, rounded))
    assert b.dtype == torch.float32
    assert not torch.equal(a, b)
    torch.testing.assert_close(a, b, atol=0.5, rtol=0)
