"""GGUF files: every type bit by bit, whole models against transformers, the cache, and faulty files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers

from alula.config import AlulaError
from alula.model import cache_dir
from alula.model.gguf_tensors import TYPES, GgufFile
from alula.model.load import LoadedModel, load_model
from tests.model.gguf_files import TOKENS, llama3_divisors, write_model

SMALL: dict[str, Any] = {
    "vocab_size": len(TOKENS),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 0,
    "pad_token_id": None,
}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e6, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ALULA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def model(family: str = "Llama", **extra: Any) -> Any:
    torch.manual_seed(1)
    config_class = getattr(transformers, family + ("TextConfig" if family == "Gemma3" else "Config"))
    made = getattr(transformers, f"{family}ForCausalLM")(config_class(**{**SMALL, **extra})).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return made


def load(path: Path, dtype: str = "float32") -> LoadedModel:
    return load_model(path, dtype=dtype, kernels="torch")


# --- types, against the block layouts of ggml (ggml-org/ggml, src/ggml-common.h) written out as loops


def halves(block: np.ndarray, *offsets: int) -> list[float]:
    return [float(block[at : at + 2].view(np.float16)[0]) for at in offsets]


def nibbles(codes: np.ndarray) -> list[int]:
    """Low nibbles of all bytes, then high nibbles."""
    return [int(byte) & 15 for byte in codes] + [int(byte) >> 4 for byte in codes]


def q4_0(block: np.ndarray) -> list[float]:
    (scale,) = halves(block, 0)
    return [scale * (code - 8) for code in nibbles(block[2:])]


def q4_1(block: np.ndarray) -> list[float]:
    scale, least = halves(block, 0, 2)
    return [scale * code + least for code in nibbles(block[4:])]


def q5_0(block: np.ndarray) -> list[float]:
    (scale,) = halves(block, 0)
    high = int(block[2:6].view(np.uint32)[0])
    return [scale * ((code | (high >> index & 1) << 4) - 16) for index, code in enumerate(nibbles(block[6:]))]


def q8_0(block: np.ndarray) -> list[float]:
    (scale,) = halves(block, 0)
    return [scale * int(code) for code in block[2:].view(np.int8)]


def q4_k(block: np.ndarray) -> list[float]:
    scale, least = halves(block, 0, 2)
    packed, codes = [int(byte) for byte in block[4:16]], block[16:]
    values = []
    for sub in range(8):
        if sub < 4:
            s, m = packed[sub] & 63, packed[sub + 4] & 63
        else:
            s = packed[sub + 4] & 15 | packed[sub - 4] >> 6 << 4
            m = packed[sub + 4] >> 4 | packed[sub] >> 6 << 4
        chunk = codes[sub // 2 * 32 : sub // 2 * 32 + 32]
        values += [scale * s * (int(byte) >> 4 * (sub % 2) & 15) - least * m for byte in chunk]
    return values


def q6_k(block: np.ndarray) -> list[float]:
    low, high, scales = block[:128], block[128:192], block[192:208].view(np.int8)
    (scale,) = halves(block, 208)
    values = []
    for index in range(256):
        half, rest = divmod(index, 128)
        quarter, lane = divmod(rest, 32)
        four = int(low[half * 64 + quarter % 2 * 32 + lane]) >> 4 * (quarter // 2) & 15
        two = int(high[half * 32 + lane]) >> 2 * quarter & 3
        values.append(scale * int(scales[index // 16]) * ((four | two << 4) - 32))
    return values


REFERENCES: dict[str, tuple[Callable[[np.ndarray], list[float]], tuple[int, ...]]] = {
    "Q4_0": (q4_0, (0,)),
    "Q4_1": (q4_1, (0, 2)),
    "Q5_0": (q5_0, (0,)),
    "Q8_0": (q8_0, (0,)),
    "Q4_K": (q4_k, (0, 2)),
    "Q6_K": (q6_k, (208,)),
    "F32": (lambda block: [float(block.view(np.float32)[0])], ()),
    "F16": (lambda block: halves(block, 0), ()),
    "BF16": (lambda block: [float(np.array([0, block.view(np.uint16)[0]], np.uint16).view(np.float32)[0])], ()),
}


@pytest.mark.parametrize("kind", TYPES)
def test_every_type_reads_as_specified(kind: str, tmp_path: Path) -> None:
    reference, scales = REFERENCES[kind]
    qtype = gguf.GGMLQuantizationType[kind]
    block_values, block_bytes = gguf.GGML_QUANT_SIZES[qtype]
    rows, blocks = 3, 2 if block_values > 1 else 64
    random = np.random.default_rng(5)
    data = random.integers(0, 256, (rows, blocks, block_bytes), dtype=np.uint8)
    for offset in scales:  # random bits make NaN scales
        data[..., offset : offset + 2] = random.normal(size=(rows, blocks)).astype(np.float16)[..., None].view(np.uint8)
    if block_values == 1:
        floats = random.normal(size=(rows, blocks)).astype(np.float32)
        data = gguf.quantize(floats, qtype).view(np.uint8).reshape(rows, blocks, block_bytes)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("x", data.reshape(rows, -1), raw_shape=(rows, blocks * block_bytes), raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read = GgufFile(tmp_path / "x.gguf").read("x", torch.float32)
    expected = [[value for block in row for value in reference(block)] for row in data]
    assert read.shape == (rows, blocks * block_values)
    torch.testing.assert_close(read, torch.tensor(expected), rtol=1e-6, atol=1e-6)


def test_large_tensors_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "m.gguf", model(), "llama", kind="Q8_0")
    whole = GgufFile(tmp_path / "m.gguf").read("token_embd.weight", torch.bfloat16)
    monkeypatch.setattr("alula.model.gguf_tensors._CHUNK", 7 * SMALL["hidden_size"])
    assert torch.equal(GgufFile(tmp_path / "m.gguf").read("token_embd.weight", torch.bfloat16), whole)


# --- whole models

GEMMA = {"head_dim": 16, "sliding_window": 5, "num_hidden_layers": 7, "query_pre_attn_scalar": 16}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "llama", {}),
    "llama_tied_biases": ("Llama", "llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "mistral": ("Mistral", "llama", {"sliding_window": None}),
    "qwen2": ("Qwen2", "qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", "qwen3", {"head_dim": 16}),
    "gemma3": ("Gemma3", "gemma3", GEMMA),
}
IDS = [5, 9, 200, 31, 7, 8, 9, 10, 250, 77, 3, 4]


def assert_same_logits(reference: Any, loaded: LoadedModel, dense: Callable[..., Any]) -> None:
    with torch.inference_mode():
        expected = reference(torch.tensor([IDS])).logits[0]
        logits = loaded.decoder.logits(dense(loaded.decoder, IDS).final_TD)
    assert expected.abs().max() > 0.3
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("case", MODELS)
def test_model_equals_transformers(case: str, tmp_path: Path, dense: Callable[..., Any]) -> None:
    family, architecture, extra = MODELS[case]
    reference = model(family, **extra)
    loaded = load(write_model(tmp_path / "m.gguf", reference, architecture))
    assert_same_logits(reference, loaded, dense)
    assert loaded.eos_ids == (0,)


def test_llama3_rope_comes_from_its_divisors(tmp_path: Path, dense: Callable[..., Any]) -> None:
    reference = model(rope_parameters=LLAMA3, head_dim=16)
    plain = 1 / 1e6 ** (torch.arange(0, 16, 2) / 16)
    divisors = llama3_divisors(reference.model.rotary_emb.inv_freq, plain)
    path = write_model(tmp_path / "m.gguf", reference, "llama", tensors={"rope_freqs.weight": divisors})
    loaded = load(path)
    assert loaded.config.rope.scaling == "llama3"
    assert_same_logits(reference, loaded, dense)
    wrong = write_model(tmp_path / "w.gguf", reference, "llama", tensors={"rope_freqs.weight": divisors**0.5})
    with pytest.raises(AlulaError, match="no llama3"):
        load(wrong)


def test_window_of_a_mistral_file(tmp_path: Path, dense: Callable[..., Any]) -> None:
    reference = model("Mistral", sliding_window=5)
    path = write_model(tmp_path / "m.gguf", reference, "llama", extra=lambda writer: writer.add_sliding_window(5))
    assert_same_logits(reference, load(path), dense)


def test_quantised_model_equals_its_dequantised_weights(tmp_path: Path, dense: Callable[..., Any]) -> None:
    reference = model()
    path = write_model(tmp_path / "m.gguf", reference, "llama", kind="Q4_0")
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.ndim > 1:
                q4 = gguf.GGMLQuantizationType.Q4_0
                parameter.copy_(torch.from_numpy(gguf.dequantize(gguf.quantize(parameter.numpy(), q4), q4)))
    assert_same_logits(reference, load(path), dense)


def test_tokenizer_and_template(tmp_path: Path) -> None:
    tokenizer = load(write_model(tmp_path / "m.gguf", model(), "llama")).tokenizer
    hello = tokenizer.encode("hello")
    assert [TOKENS[i] for i in hello] == ["he", "llo"]
    assert tokenizer.encode("<|user|>hello<|end|>") == [1, *hello, 0]
    assert tokenizer.decode([1, *hello, 0]) == "hello"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hello"}]) == [1, *hello]
    assert tokenizer.eos_id == 0


def test_smollm_splits_digits_before_spaces(tmp_path: Path) -> None:
    """Two spaces before a digit are one token, as in SmolLM's own tokenizer.json; GPT-2's rule would split them."""
    smollm = load(write_model(tmp_path / "s.gguf", model(), "llama", pre="smollm")).tokenizer
    plain = load(write_model(tmp_path / "p.gguf", model(), "llama")).tokenizer
    assert [TOKENS[i] for i in smollm.encode("a  12")] == ["a", "ĠĠ", "1", "2"]
    assert [TOKENS[i] for i in plain.encode("a  12")] == ["a", "Ġ", "Ġ", "1", "2"]


# --- the cache


def test_conversion_happens_once_per_file_and_dtype(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path / "m.gguf", model(), "llama")
    first = load(path)
    assert load(path, "bfloat16").checkpoint.folder != first.checkpoint.folder
    assert len(list(cache.iterdir())) == 2
    monkeypatch.setattr("alula.model.gguf.GgufFile", None)
    again = load(path.rename(tmp_path / "renamed.gguf"))
    assert again.checkpoint == replace(first.checkpoint, gguf=tmp_path / "renamed.gguf")
    assert again.identity == first.identity


@pytest.mark.parametrize("damage", ["flip", "cut", "drop", "manifest"])
def test_damaged_cache_is_made_anew(damage: str, tmp_path: Path, dense: Callable[..., Any]) -> None:
    reference = model()
    path = write_model(tmp_path / "m.gguf", reference, "llama")
    folder = load(path).checkpoint.folder
    weights = folder / "model-00000.safetensors"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 64
    if damage == "flip":
        weights.write_bytes(data)
    elif damage == "cut":
        weights.write_bytes(data[:-4])
    elif damage == "drop":
        (folder / "tokenizer.json").unlink()
    else:
        (folder / "alula_manifest.json").write_text("[]")
    assert_same_logits(reference, load(path), dense)


def test_disk_without_room(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_model(tmp_path / "m.gguf", model(), "llama")
    usage = type("Usage", (), {"free": 1 << 20})()
    monkeypatch.setattr(cache_dir.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(AlulaError, match="ALULA_CACHE"):
        load(path)
    assert list(cache.iterdir()) == []


def test_disk_that_fills_up_meanwhile(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_model(tmp_path / "m.gguf", model(), "llama")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("alula.model.gguf._save", full)
    with pytest.raises(AlulaError, match="No space left"):
        load(path)
    assert list(cache.iterdir()) == []


# --- faulty files


@pytest.mark.parametrize("kept", [3, 20, 400, 0.5, 0.9, -1])
def test_truncated_file(kept: float, tmp_path: Path, cache: Path) -> None:
    path = write_model(tmp_path / "m.gguf", model(), "llama")
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * kept) if isinstance(kept, float) else kept])
    with pytest.raises(AlulaError, match="truncated"):
        load(path)
    assert list(cache.iterdir()) == []


def test_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"PK\x03\x04" * 100)
    with pytest.raises(AlulaError, match="no GGUF file"):
        load(tmp_path / "m.gguf")
    (tmp_path / "m.gguf").write_bytes(b"")
    with pytest.raises(AlulaError, match="no GGUF file"):
        load(tmp_path / "m.gguf")


def test_unread_type_is_named(tmp_path: Path, cache: Path) -> None:
    path = write_model(tmp_path / "m.gguf", model(), "llama", kind="Q5_1")
    with pytest.raises(AlulaError, match=r"stored as Q5_1: alula reads F32.*Q6_K"):
        load(path)
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN), "'yarn'"),
        (lambda w: w.add_expert_count(8), r"'llama\.expert_count' is 8"),
        (lambda w: w.add_logit_scale(0.5), "logit_scale"),
        (lambda w: w.add_value_length(4), "value_length"),
    ],
)
def test_metadata_that_cannot_be_run_is_named(extra: Any, words: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", model(), "llama", extra=extra)
    with pytest.raises(AlulaError, match=words):
        load(path)


def test_architecture_tensor_and_tokenizer_unknown(tmp_path: Path) -> None:
    with pytest.raises(AlulaError, match=r"general\.architecture is 'falcon'"):
        load(write_model(tmp_path / "a.gguf", model(), "falcon"))
    with pytest.raises(AlulaError, match=r"'blk\.0\.attn_sinks\.weight'"):
        load(
            write_model(
                tmp_path / "t.gguf", model(), "llama", tensors={"blk.0.attn_sinks.weight": np.ones(4, np.float32)}
            )
        )
    with pytest.raises(AlulaError, match=r"tokenizer\.ggml\.pre is 'chatglm-bpe'"):
        load(write_model(tmp_path / "p.gguf", model(), "llama", pre="chatglm-bpe"))
