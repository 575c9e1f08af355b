"""A small Llama as student of the target: made, started by least squares, written as a Hugging Face folder.

Its embedding, which is its LM head too, is the target's LM head on the directions that matter most, so the state it
should have is known: the target's own, on the same directions. Each projection that writes to the residual stream is
fitted in turn to what is left to that state.

Shapes: V vocabulary, D target hidden, E student hidden, M learned tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from alula.config import AlulaError
from alula.draft.head_files import read_json, read_tensors, write_folder
from alula.model.load import LoadedModel
from alula.train.batch import Batch
from alula.train.features import FeatureTarget
from alula.train.head import HeadConfig
from alula.train.initial import draw_normal, place_attention, ridge
from alula.train.methods.options import LMOptions
from alula.train.vocabulary import expected_counts

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)


def student_config(options: LMOptions, target: LoadedModel) -> dict[str, Any]:
    """The config.json of the student."""
    sizes = target.config
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": sizes.vocab_size,
        "hidden_size": options.hidden_size,
        "intermediate_size": options.intermediate_size,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.heads,
        "num_key_value_heads": options.kv_heads,
        "head_dim": options.hidden_size // options.heads,
        "max_position_embeddings": sizes.max_position_embeddings,
        "rms_norm_eps": sizes.norm_eps,
        "rope_theta": 10_000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": sizes.bos_id,
        "eos_token_id": list(sizes.eos_ids) or None,
        "torch_dtype": "bfloat16",
    }


def blank_student(config: Mapping[str, Any], *, train_embedding: bool) -> nn.Module:
    """With whatever weights; ``model`` is the decoder, ``lm_head`` shares its embedding."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.random.fork_rng(devices=[]):
        student: nn.Module = LlamaForCausalLM(LlamaConfig(**{**config, "torch_dtype": "float32"}))
    student.get_parameter("model.embed_tokens.weight").requires_grad_(train_embedding)
    return student


def start_student(
    student: nn.Module, options: LMOptions, target: FeatureTarget, samples: Sequence[Batch], *, seed: int
) -> None:
    """Start values, fitted to the learned tokens of the samples."""
    generator = torch.Generator().manual_seed(seed)
    directions_DE = _directions(target, samples, options.hidden_size)
    wanted_ME = torch.cat([batch.hidden_MD for batch in samples]) @ directions_DE
    with torch.no_grad():
        student.get_parameter("model.embed_tokens.weight").copy_(target.lm_head_VD @ directions_DE)
        layers = student.get_submodule("model.layers")
        for name, weight in layers.named_parameters():
            if weight.ndim == 2:
                outward = name.endswith(("o_proj.weight", "down_proj.weight"))
                weight.zero_() if outward else draw_normal(weight, weight.shape[1] ** -0.5, generator)
        for index, layer in enumerate(layers.children()):
            if not index:
                normed_ME = _seen(student, samples, layer, "self_attn.q_proj")
                place_attention(_sizes(options), layer.get_submodule("self_attn"), normed_ME, wanted_ME)
            _fit(student, samples, layer, "input_layernorm", "self_attn.o_proj", wanted_ME)
            _fit(student, samples, layer, "post_attention_layernorm", "mlp.down_proj", wanted_ME)
        state_ME = _seen(student, samples, student.get_submodule("model"), "norm")
        student.get_parameter("model.norm.weight").fill_(state_ME.square().mean().sqrt().item())


def read_student(folder: Path, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of an exported student, fp32. Raises AlulaError, naming the field, for one of other sizes."""
    theirs = read_json(folder / "config.json")
    for name, ours in config.items():
        if name.startswith(("num_", "head_dim", "hidden", "intermediate", "vocab")) and theirs.get(name) != ours:
            raise AlulaError(
                f"start_from {folder}: its {name} is {theirs.get(name)}, and this run's is {ours}: give one of the same"
            )
    return {name: tensor.float() for name, tensor in read_tensors(folder).items()}


def write_student(
    folder: Path,
    student: nn.Module,
    config: Mapping[str, Any],
    target: LoadedModel,
    provenance: Mapping[str, Any] | None,
) -> None:
    """A Hugging Face folder in bf16 with the target's tokenizer; it appears whole or not at all."""
    tensors = {
        name: p.detach().cpu().to(torch.bfloat16) for name, p in student.named_parameters() if "lm_head" not in name
    }
    beside = [target.checkpoint.folder / name for name in _TOKENIZER_FILES]
    write_folder(folder, config, tensors, provenance, copies=[file for file in beside if file.is_file()])


def _directions(target: FeatureTarget, samples: Sequence[Batch], count: int) -> Tensor:
    """Orthonormal [D, E]: where the rows of the target's LM head differ most, each as often as the target says it."""
    counts_V = expected_counts((batch.hidden_MD for batch in samples), target.lm_head_VD)
    rows_VD = target.lm_head_VD.float()
    if count > rows_VD.shape[1]:
        raise AlulaError(f"hidden_size is {count}: give at most the target's, {rows_VD.shape[1]}")
    share_V1 = (counts_V / counts_V.sum())[:, None]
    centred_VD = rows_VD - (rows_VD * share_V1).sum(0)
    vectors_DD: Tensor = torch.linalg.eigh(centred_VD.T @ (centred_VD * share_V1)).eigenvectors
    return vectors_DD[:, -count:].flip(1).contiguous()


def _sizes(options: LMOptions) -> HeadConfig:
    """The student's attention in the words of `place_attention`."""
    return HeadConfig(
        hidden_size=options.hidden_size,
        intermediate_size=options.intermediate_size,
        heads=options.heads,
        kv_heads=options.kv_heads,
        head_dim=options.hidden_size // options.heads,
        vocab_size=1,
        draft_vocab_size=1,
        taps=(),
    )


def _fit(
    student: nn.Module, samples: Sequence[Batch], layer: nn.Module, norm: str, projection: str, wanted_ME: Tensor
) -> None:
    """Fit a projection to what the stream, as it enters ``norm``, lacks of the wanted state."""
    stream_ME, inputs_MI = _seen(student, samples, layer, norm), _seen(student, samples, layer, projection)
    layer.get_submodule(projection).get_parameter("weight").copy_(ridge(inputs_MI, wanted_ME - stream_ME))


def _seen(student: nn.Module, samples: Iterable[Batch], parent: nn.Module, name: str) -> Tensor:
    """What a module reads at the tokens before the learned ones [M, width]."""
    found: list[Tensor] = []
    hook = parent.get_submodule(name).register_forward_pre_hook(lambda _, inputs: found.append(inputs[0]))
    rows = []
    try:
        for batch in samples:
            student.get_submodule("model")(input_ids=batch.texts_BX, use_cache=False)
            text_M, token_M = (batch.learned_BX >= 0).nonzero(as_tuple=True)
            rows.append(found.pop()[text_M, token_M - 1])
    finally:
        hook.remove()
    return torch.cat(rows)
