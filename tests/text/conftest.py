"""Two tokenizers small enough to read: bytes, and sentencepiece-like words with byte fallback."""

from __future__ import annotations

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

from alula.text import Tokenizer as Wrapped

CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer() -> Wrapped:
    """One id per byte, then 'he', 'llo' and the special <eos>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*alphabet, "he", "ll", "llo"])}
    backend = Tokenizer(models.BPE(vocab, [("h", "e"), ("l", "l"), ("ll", "o")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<eos>", special=True)])
    return Wrapped(backend, CHAT, {"eos_token": "<eos>"})


def piece_tokenizer() -> Wrapped:
    """▁-words as in Llama 2: byte fallback, and a leading space that decoding strips."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "a", "b", "▁a", "ab", "▁▁", "\ufffd"]
    backend = Tokenizer(
        models.BPE(
            {p: i for i, p in enumerate(pieces)},
            [("▁", "a"), ("a", "b"), ("▁", "▁")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    return Wrapped(backend, None, {"eos_token": "</s>"})


TOKENIZERS = {"bytes": byte_tokenizer(), "pieces": piece_tokenizer()}


@pytest.fixture(scope="session")
def tokenizers() -> dict[str, Wrapped]:
    return TOKENIZERS


@pytest.fixture(scope="session")
def byte_level() -> Wrapped:
    return TOKENIZERS["bytes"]
