"""Heads on disk: three dialects in, one out, and every fault named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from alula.config import AlulaError, Rope
from alula.draft.build import build_head
from alula.draft.dialects import is_head_folder, read_head, save_official
from alula.draft.head_config import HeadConfig, default_taps, read_head_config
from alula.draft.policy import TreePolicy
from tests.draft.heads import VOCAB, head_config, random_weights, target_parts

Weights = dict[str, torch.Tensor]
LLAMA3 = Rope(5000.0, "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64)


def saved(folder: Path, config: HeadConfig | None = None) -> Path:
    config = config or head_config()
    save_official(folder / "head", config, random_weights(config), {"target": {"weights": "abc"}})
    return folder / "head"


def unrecorded(folder: Path) -> None:
    """As published elsewhere: nothing says what the config should be."""
    (folder / "provenance.json").unlink()


def edit_config(folder: Path, **changes: Any) -> None:
    """Sets keys; None removes them."""
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


def edit_weights(folder: Path, change: Callable[[Weights], Any]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


@pytest.mark.parametrize(
    "config",
    [
        head_config("eagle1"),
        head_config("eagle1", attention_bias=True),
        head_config(),
        head_config(draft_vocab_size=VOCAB),
        head_config(fc_norm=True, norm_output=True, taps=(1, 4, 9)),
        head_config(norm_before_fc=True, norm_before_residual=True, rope=LLAMA3),
        head_config(hidden_size=24, intermediate_size=40, head_dim=6),
    ],
)
def test_what_is_saved_reads_back(tmp_path: Path, config: HeadConfig) -> None:
    folder, weights = saved(tmp_path, config), random_weights(config)
    head = read_head(folder)
    assert head.config == config
    assert head.provenance == {"target": {"weights": "abc"}}
    weights.pop("t2d", None)
    assert head.weights.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(head.weights[name], tensor if name == "d2t" else tensor.bfloat16())
    assert is_head_folder(folder)


def test_saving_replaces_a_head_as_a_whole_and_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    (folder / "old.txt").write_text("of the old head")
    other = head_config(intermediate_size=16)
    save_official(folder, other, random_weights(other))
    assert read_head(folder).config == other
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    broken = {**random_weights(other), "extra": torch.zeros(1)}
    with pytest.raises(AlulaError, match="extra"):
        save_official(folder, other, broken)
    assert read_head(folder).config == other
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


def test_official_config_without_rope_theta_has_base_ten_thousand(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    edit_config(folder, rope_theta=None)
    assert read_head(folder).config.rope == Rope(10000.0)


def test_pytorch_bin_files_are_read(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert is_head_folder(folder)
    assert read_head(folder).config == head_config()
    (folder / "pytorch_model.bin").write_bytes(b"PK broken")
    with pytest.raises(AlulaError, match=r"pytorch_model\.bin"):
        read_head(folder)


def test_pytorch_bin_files_run_no_code(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    (folder / "model.safetensors").unlink()
    torch.save({"fc.weight": Path("unsafe")}, folder / "pytorch_model.bin")
    with pytest.raises(AlulaError, match=r"pytorch_model\.bin"):
        read_head(folder)


def test_speculators_dialect(tmp_path: Path) -> None:
    """layers.0 in place of midlayer, and the sizes inside transformer_layer_config."""
    config = head_config(norm_before_residual=True, taps=(2, 6, 9))
    folder = saved(tmp_path, config)
    raw = json.loads((folder / "config.json").read_text())
    kept = ("draft_vocab_size", "norm_before_residual", "architectures")
    outer = {key: raw.pop(key) for key in kept}
    outer |= {"speculators_model_type": "eagle3", "speculators_version": "0.5.0", "transformer_layer_config": raw}
    outer |= {"eagle_aux_hidden_state_layer_ids": [2, 6, 9], "speculators_config": {"algorithm": "eagle3"}}
    outer |= {"target_hidden_size": None, "norm_output": False}
    raw.pop("eagle_config")
    raw.pop("eagle_aux_hidden_state_layer_ids")
    (folder / "config.json").write_text(json.dumps(outer))
    weights = {k.replace("midlayer.", "layers.0."): w for k, w in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors")
    head = read_head(folder)
    assert (head.config, head.layout, head.left_out) == (config, "speculators", ())
    assert "midlayer.hidden_norm.weight" in head.weights
    edit_weights(folder, lambda w: w.update({"verifier_norm.weight": torch.ones(32)}))
    assert read_head(folder).left_out == ("verifier_norm.weight",)
    edit_config(folder, norm_before_residual=None)
    with pytest.raises(AlulaError, match="norm_before_residual"):
        read_head(folder)


def test_specforge_dialect(tmp_path: Path) -> None:
    """rope_parameters of newer configs, and the older names of the norms per tap."""
    folder = saved(tmp_path, head_config(fc_norm=True))
    edit_config(folder, fc_norm=None, use_aux_norm=True, rope_theta=None, rope_parameters={"rope_theta": 5e5})
    names = {"fc_norm.0": "aux_norm_low", "fc_norm.1": "aux_norm_mid", "fc_norm.2": "aux_norm_high"}

    def rename(weights: Weights) -> None:
        for new, old in names.items():
            weights[f"{old}.weight"] = weights.pop(f"{new}.weight")

    edit_weights(folder, rename)
    assert read_head(folder).config == head_config(fc_norm=True, rope=Rope(5e5))


TAPS = "eagle_aux_hidden_state_layer_ids"


def test_G9_taps_and_flags_of_eagle_config(tmp_path: Path) -> None:
    """Inside eagle_config layers are named by their outputs, as SGLang reads them, outside by their inputs."""
    folder = saved(tmp_path, head_config(fc_norm=True, taps=(1, 3, 5, 7)))
    edit_config(folder, fc_norm=None, eagle_config={TAPS: [0, 2, 4, 6], "fc_norm": True}, **{TAPS: None})
    config = read_head(folder).config
    assert config.fc_norm and config.tap_layers(8) == (1, 3, 5, 7)
    with pytest.raises(AlulaError, match="layer 7"):
        config.tap_layers(6)
    edit_config(folder, eagle_config=None, **{TAPS: [1, 3, 5, 7]})
    unrecorded(folder)
    edit_config(folder, fc_norm=True)
    assert read_head(folder).config.taps == (1, 3, 5, 7)
    edit_config(folder, eagle_config={TAPS: [1, 3, 5, 7]})
    with pytest.raises(AlulaError, match="make them agree"):
        read_head(folder)


def test_heads_that_alula_wrote_before_it_recorded_taps_keep_them(tmp_path: Path) -> None:
    folder = saved(tmp_path, head_config(taps=(2, 6, 9)))
    edit_config(folder, eagle_config={TAPS: [2, 6, 9]}, **{TAPS: None})
    (folder / "provenance.json").write_text(json.dumps({"versions": {"alula": "0.1.0"}}))
    assert read_head(folder).config.taps == (2, 6, 9)
    unrecorded(folder)
    assert read_head(folder).config.taps == (3, 7, 10)


def swap_taps(weights: Weights) -> None:
    low, mid, high = weights["fc.weight"].split(32, 1)
    weights["fc.weight"] = torch.cat([mid, low, high], 1)


@pytest.mark.parametrize(
    ("config", "change", "words"),
    [
        ({TAPS: [3, 6, 9], "eagle_config": None}, lambda w: None, r"taps \[3, 6, 9\].*\[2, 6, 9\]"),
        ({TAPS: [6, 2, 9], "eagle_config": None}, lambda w: None, "ascending order"),
        ({"norm_output": True}, lambda w: None, "norm_output True"),
        ({}, swap_taps, "fc.weight"),
    ],
)
def test_a_head_that_is_not_what_was_recorded_is_refused(
    tmp_path: Path, config: dict[str, Any], change: Callable[[Weights], Any], words: str
) -> None:
    folder = saved(tmp_path, head_config(taps=(2, 6, 9)))
    edit_config(folder, **config)
    edit_weights(folder, change)
    with pytest.raises(AlulaError, match=words):
        read_head(folder)


def test_norm_output_of_another_trainers_specforge_config_is_doubtful(tmp_path: Path) -> None:
    folder = saved(tmp_path, head_config(norm_output=True))
    assert not read_head(folder).doubtful_norm_output
    unrecorded(folder)
    assert read_head(folder).doubtful_norm_output
    edit_config(folder, norm_output=False)
    assert not read_head(folder).doubtful_norm_output


@pytest.mark.parametrize("layers", range(2, 40))
def test_default_taps_are_three_layers_of_any_target(layers: int) -> None:
    taps = default_taps(layers)
    assert len(set(taps)) == 3 and sorted(taps) == list(taps)
    assert min(taps) >= 0 and max(taps) <= layers
    if layers >= 7:
        assert taps == (2, layers // 2, layers - 3)


def test_a_target_of_one_layer_has_no_three_features() -> None:
    with pytest.raises(AlulaError, match="EAGLE-1"):
        default_taps(1)


FAULTS: dict[str, tuple[dict[str, Any], Callable[[Weights], Any], str]] = {
    "missing d2t": ({}, lambda w: w.pop("d2t"), "d2t"),
    "d2t of ids": ({}, lambda w: w.update(d2t=w["d2t"] + torch.arange(40)), "offsets"),
    "d2t below zero": ({}, lambda w: w.update(d2t=w["d2t"] - 60), "offsets"),
    "d2t twice the same": ({}, lambda w: w.update(d2t=-torch.arange(40)), "distinct"),
    "float d2t": ({}, lambda w: w.update(d2t=w["d2t"].float()), "int64"),
    "other t2d": ({}, lambda w: w.update(t2d=w["t2d"].roll(1)), "t2d"),
    "missing tensor": ({}, lambda w: w.pop("norm.weight"), "norm.weight"),
    "renamed tensor": (
        {},
        lambda w: w.update({"final_norm.weight": w.pop("norm.weight")}),
        "'final_norm.weight', which",
    ),
    "taps out of order": ({TAPS: [9, 6, 2]}, lambda w: None, "ascending"),
    "the same tap twice": ({TAPS: [2, 2, 9]}, lambda w: None, "ascending"),
    "missing fc": ({}, lambda w: w.pop("fc.weight"), "fc.weight"),
    "unknown tensor": ({}, lambda w: w.update(extra=torch.zeros(1)), "extra"),
    "wrong shape": ({}, lambda w: w.update({"lm_head.weight": torch.zeros(41, 32)}), "lm_head.weight"),
    "unknown key": ({"novelty": 3}, lambda w: None, "novelty"),
    "unknown key inside": ({"eagle_config": {"novelty": 1}}, lambda w: None, "novelty"),
    "no taps": ({"eagle_config": {"use_aux_hidden_state": False}}, lambda w: None, "use_aux_hidden_state"),
    "G11 two layers": ({"num_hidden_layers": 2}, lambda w: None, "num_hidden_layers"),
    "scaled logits": ({"logit_scale": 0.5}, lambda w: None, "logit_scale"),
    "sliding window": ({"sliding_window": 512}, lambda w: None, "sliding_window"),
    "negative size": ({"hidden_size": -1}, lambda w: None, "hidden_size"),
    "missing size": ({"intermediate_size": None}, lambda w: None, "intermediate_size"),
    "flag that is none": ({"norm_output": "yes"}, lambda w: None, "norm_output"),
    "two norms of the taps": ({"fc_norm": True, "norm_before_fc": True}, lambda w: None, "both true"),
    "unused flag": ({"fc_norm": True}, lambda w: None, "fc_norm"),
    "taps that are none": ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": "2"}}, lambda w: None, "list of"),
    "count of taps": ({"num_aux_hidden_states": 4}, lambda w: None, "num_aux_hidden_states"),
    "activation": ({"hidden_act": "relu"}, lambda w: None, "hidden_act"),
    "rope": ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, lambda w: None, "rope_type"),
    "rope key": ({"rope_scaling": {"rope_type": "linear", "novelty": 4.0}}, lambda w: None, "novelty"),
    "promised bias": ({"bias": True}, lambda w: None, "fc.bias"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named(tmp_path: Path, fault: str) -> None:
    config, change, words = FAULTS[fault]
    folder = saved(tmp_path)
    edit_config(folder, **config)
    edit_weights(folder, change)
    with pytest.raises(AlulaError, match=words):
        read_head(folder)


def test_damaged_folders_are_named(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(AlulaError, match=r"model\.safetensors"):
        read_head(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(AlulaError, match=r"pytorch_model\.bin"):
        read_head(folder)
    assert is_head_folder(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(AlulaError, match=r"config\.json"):
        read_head(folder)
    (folder / "config.json").unlink()
    assert not is_head_folder(folder)


def build(config: HeadConfig, **extra: torch.Tensor) -> object:
    from alula.draft.dialects import HeadFiles

    weights = {name: w for name, w in random_weights(config).items() if name != "t2d"}
    names = {key.replace("__", "."): tensor for key, tensor in extra.items()}
    return build_head(HeadFiles(config, weights | names, None), target_parts(), TreePolicy())


def test_a_head_for_another_target_is_refused() -> None:
    with pytest.raises(AlulaError, match="vocab_size"):
        build(head_config(vocab_size=VOCAB + 1))
    with pytest.raises(AlulaError, match="target_hidden_size"):
        build(head_config(target_hidden_size=48))
    with pytest.raises(AlulaError, match="hidden_size"):
        build(head_config("eagle1", hidden_size=24, head_dim=6))


def test_G1_a_head_of_another_width_needs_its_own_embedding() -> None:
    config = head_config(hidden_size=24, head_dim=6)
    assert build(config)
    weights = random_weights(config)
    del weights["embed_tokens.weight"], weights["t2d"]
    from alula.draft.dialects import HeadFiles

    with pytest.raises(AlulaError, match=r"embed_tokens\.weight"):
        build_head(HeadFiles(config, weights, None), target_parts(), TreePolicy())


def test_G3_an_embedding_that_is_not_the_targets_is_refused() -> None:
    own = target_parts().embedding_VD.clone()
    drafter = build(head_config(), embed_tokens__weight=own)
    assert drafter.model._pair._pair.embedding_VD is not own  # type: ignore[attr-defined]
    with pytest.raises(AlulaError, match=r"embed_tokens\.weight"):
        build(head_config(), embed_tokens__weight=torch.randn_like(own))


def test_reading_a_config_changes_nothing() -> None:
    raw: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "vocab_size": VOCAB,
        "rope_scaling": {"type": "linear", "factor": 2.0},
    }
    before = json.dumps(raw)
    config = read_head_config(raw, "eagle3")
    assert json.dumps(raw) == before
    assert config.rope == Rope(10000.0, "linear", 2.0)
    assert replace(config, rope=Rope()).draft_vocab_size == VOCAB
