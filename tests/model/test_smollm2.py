"""The built-in model, loaded by name, against transformers with the same weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from alula.kernels.stack import FINAL
from alula.model.load import load_model


@pytest.mark.real
def test_logits_and_hidden_states_equal_transformers(dense: Callable[..., Any]) -> None:
    model = load_model("smollm2", dtype="float32", kernels="torch")
    messages = [{"role": "user", "content": "What is 17 + 25? Explain briefly."}]
    ids = model.tokenizer.apply_chat_template(messages)
    reference = transformers.LlamaForCausalLM.from_pretrained(model.checkpoint.folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = reference(torch.tensor([ids]), output_hidden_states=True)
        hidden = dense(model.decoder, ids, taps=(2, 15, 27, FINAL), chunk=32)
        logits_TV = model.decoder.logits(hidden.final_TD)
    torch.testing.assert_close(logits_TV, expected.logits[0], atol=2e-3, rtol=0)
    assert torch.equal(logits_TV.argmax(-1), expected.logits[0].argmax(-1))
    taps_TF = torch.cat([expected.hidden_states[index][0] for index in (2, 15, 27, -1)], 1)
    torch.testing.assert_close(hidden.features_TF, taps_TF, atol=2e-2, rtol=1e-4)


@pytest.mark.real
def test_tokenizer_of_the_built_in_model() -> None:
    model = load_model("smollm2", kernels="torch")
    text = "def f(x):\n    return  12 + x  # 日本語 😀"
    ids = model.tokenizer.encode(text)
    assert model.tokenizer.decode(ids) == text
    assert model.eos_ids == (model.tokenizer.eos_id,) == (2,)
    rendered = model.tokenizer.render_chat([{"role": "user", "content": "hi"}])
    assert rendered.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert len(model.identity.weights) == 64
