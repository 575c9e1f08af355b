"""A tiny random Llama with a byte tokenizer, on disk and loaded, and small ways to run it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from alula.draft.drafter import Drafter, NoDrafter
from alula.engine.config import EngineConfig
from alula.engine.engine import Engine
from alula.engine.request import Request, RequestOutput
from alula.model.load import LoadedModel
from alula.sequence import SamplingParams

EOS = 256
VOCAB = 259


def save_tiny_llama(folder: Path, *, seed: int = 0, layers: int = 6, max_len: int = 512) -> Path:
    """Random weights with enough spread that greedy text does not fall into one loop at once."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_len,
        eos_token_id=EOS,
        bos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.25)
    model.save_pretrained(folder)
    _byte_tokenizer().save_pretrained(folder)
    return folder


def _byte_tokenizer() -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>"]})
    fast.chat_template = (
        "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    return fast


def engine_for(model: LoadedModel, drafter: Drafter | None = None, **settings: object) -> Engine:
    defaults: dict[str, object] = {"kv_cache_mib": 8, "check_integrity": True, "page_size": 8}
    return Engine(model, drafter or NoDrafter(), EngineConfig(**(defaults | settings)))  # type: ignore[arg-type]


def run(engine: Engine, requests: Sequence[Request]) -> list[RequestOutput]:
    """Outputs in the order of the requests."""
    ids = [engine.add(request) for request in requests]
    while engine.has_work:
        engine.step()
    return [engine.pop(request_id) for request_id in ids]


def complete(engine: Engine, prompt: Sequence[int], **params: object) -> RequestOutput:
    return run(engine, [Request(tuple(prompt), SamplingParams(**params))])[0]  # type: ignore[arg-type]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (length,), generator=generator).tolist()
