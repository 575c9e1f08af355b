"""Heads through all three public layouts: the same bits, the same meaning, or a refusal."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file

from alula.cli import main
from alula.config import AlulaError, Rope
from alula.draft.dialects import HeadFiles, read_head
from alula.draft.head_config import HeadConfig, Layout
from alula.draft.head_files import write_folder
from alula.draft.layouts import head_json, layout_tensors
from alula.draft.load import load_drafter, target_provenance
from alula.model.load import LoadedModel, load_model
from alula.train.convert import convert
from tests.draft import test_golden
from tests.draft.heads import VOCAB, head_config, random_weights
from tests.draft.kernel_sets import kernel_set
from tests.engine.tiny import save_tiny_llama

LAYOUTS: tuple[Layout, ...] = get_args(Layout)
TAPS = "eagle_aux_hidden_state_layer_ids"
DEFAULT_TAPS = (2, 6, 9)
"""Of a target with 12 layers."""
LLAMA3 = Rope(5000.0, "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64)

ANYWHERE = {
    "plain": head_config(),
    "taps": head_config(taps=DEFAULT_TAPS),
    "whole vocabulary": head_config(draft_vocab_size=VOCAB),
    "own width": head_config(hidden_size=24, intermediate_size=40, head_dim=6),
    "base and linear": head_config(rope=Rope(10000.0, "linear", 2.0)),
    "own base": head_config(rope=Rope(1e6)),
}
SPECFORGE = {
    "eagle 3.1": head_config(fc_norm=True, norm_output=True, taps=(1, 4, 9)),
    "llama 3 rope": head_config(rope=LLAMA3),
}
SPECULATORS = {
    "one norm": head_config(norm_before_fc=True, norm_before_residual=True),
    "biases": head_config(attention_bias=True),
}


def weights_of(config: HeadConfig, dtype: torch.dtype = torch.float16) -> dict[str, torch.Tensor]:
    weights = random_weights(config)
    weights.pop("t2d", None)
    if config.attention_bias and config.kind == "eagle3":
        weights["midlayer.self_attn.o_proj.bias"] = torch.linspace(-1, 1, config.hidden_size)
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in weights.items()}


def written(
    folder: Path, config: HeadConfig, layout: Layout, provenance: dict[str, Any] | None = None, **more: torch.Tensor
) -> Path:
    """A head as another tool would publish it: without a record of its own."""
    weights = weights_of(config) | {name.replace("__", "."): tensor for name, tensor in more.items()}
    verifier = {"name_or_path": "owner/target", "architectures": ["LlamaForCausalLM"]}
    values = head_json(
        config,
        layout,
        fc_bias="fc.bias" in weights,
        dtype=torch.float16,
        max_position_embeddings=4096,
        verifier=verifier if layout == "speculators" else None,
    )
    write_folder(folder, values, layout_tensors(config, weights, layout), provenance)
    return folder


def same_files(ours: Path, theirs: Path) -> None:
    """Config and tensors alike, to the bit."""
    assert json.loads((ours / "config.json").read_text()) == json.loads((theirs / "config.json").read_text())
    left, right = load_file(ours / "model.safetensors"), load_file(theirs / "model.safetensors")
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype and torch.equal(tensor, right[name]), name


def trips() -> list[Any]:
    cases = []
    for layouts, configs in ((LAYOUTS, ANYWHERE), (LAYOUTS[1:], SPECFORGE), (LAYOUTS[2:], SPECULATORS)):
        for name, config in configs.items():
            cases += [pytest.param(config, a, b, id=f"{name}: {a}, {b}") for a in layouts for b in layouts]
    return cases


@pytest.mark.parametrize(("config", "first", "second"), trips())
def test_there_and_back_is_equal_to_the_bit(tmp_path: Path, config: HeadConfig, first: Layout, second: Layout) -> None:
    start = written(tmp_path / "start", config, first)
    doubtful = first == "specforge" and config.norm_output
    convert(start, tmp_path / "there", second, norm_output="fed-back" if doubtful else None)
    convert(tmp_path / "there", tmp_path / "back", first)
    same_files(start, tmp_path / "back")
    assert (read_head(tmp_path / "there").layout, read_head(tmp_path / "back").layout) == (second, first)
    for folder in ("start", "there", "back"):
        head = read_head(tmp_path / folder)
        assert head.config == config and head.max_position_embeddings == 4096
        for name, tensor in weights_of(config).items():
            assert torch.equal(head.weights[name], tensor)


def test_who_may_read_the_config_may_read_the_weights(tmp_path: Path) -> None:
    folder = written(tmp_path / "head", head_config("eagle1"), "official")
    modes = {(folder / name).stat().st_mode for name in ("config.json", "model.safetensors")}
    assert len(modes) == 1 and modes.pop() & 0o400


def test_an_eagle1_head_stays_official(tmp_path: Path) -> None:
    config = head_config("eagle1", attention_bias=True)
    start = written(tmp_path / "start", config, "official", fc__bias=torch.ones(32).half())
    convert(start, tmp_path / "there", "official")
    same_files(start, tmp_path / "there")
    raw = json.loads((start / "config.json").read_text())
    assert (raw["bias"], raw["qkv_bias"], raw["architectures"]) == (True, True, ["LlamaForCausalLM"])
    for layout in LAYOUTS[1:]:
        with pytest.raises(AlulaError, match="EAGLE-1/2"):
            convert(start, tmp_path / "other", layout)
    assert not (tmp_path / "other").exists()


def test_each_engine_finds_the_taps_where_it_looks(tmp_path: Path) -> None:
    """SGLang reads eagle_config and adds one; vLLM and speculators read the outer key as it is; the original none."""
    start = written(tmp_path / "start", head_config(taps=DEFAULT_TAPS), "official")
    for layout in LAYOUTS:
        convert(start, tmp_path / layout, layout)
    specforge, speculators, official = (
        json.loads((tmp_path / layout / "config.json").read_text())
        for layout in ("specforge", "speculators", "official")
    )
    assert specforge["eagle_config"] == {TAPS: [1, 5, 8], "use_aux_hidden_state": True}
    assert specforge[TAPS] == speculators[TAPS] == official[TAPS] == [2, 6, 9]
    assert specforge["architectures"] == ["LlamaForCausalLMEagle3"]
    assert official["architectures"] == ["LlamaForCausalLM"]
    assert speculators["speculators_config"]["algorithm"] == "eagle3"
    assert "midlayer.hidden_norm.weight" in load_file(tmp_path / "specforge" / "model.safetensors")
    assert "layers.0.hidden_norm.weight" in load_file(tmp_path / "speculators" / "model.safetensors")
    # The original takes the target's embedding only where this key is absent.
    assert "target_hidden_size" not in official


@pytest.mark.parametrize(
    ("config", "layout", "words"),
    [
        (head_config(fc_norm=True), "official", "fc_norm.*specforge"),
        (head_config(norm_output=True), "official", "norm_output.*specforge"),
        (head_config(norm_before_fc=True), "official", "norm_before_fc.*speculators"),
        (head_config(norm_before_fc=True), "specforge", "norm_before_fc.*speculators"),
        (head_config(norm_before_residual=True), "specforge", "norm_before_residual.*speculators"),
        (head_config(taps=(1, 6, 9)), "official", "layers 2, n // 2 and n - 3"),
        (head_config(taps=(2, 5, 9)), "official", "layers 2, n // 2 and n - 3"),
        (head_config(taps=(2, 3)), "official", "layers 2, n // 2 and n - 3"),
        (head_config(rope=LLAMA3), "official", "rope_scaling"),
        (head_config(rope=Rope(5000.0, "linear", 2.0)), "official", "base 5000"),
        (head_config(attention_bias=True), "specforge", "attention biases"),
        (head_config(attention_bias=True), "official", "attention biases"),
    ],
)
def test_what_a_layout_cannot_say_is_refused(tmp_path: Path, config: HeadConfig, layout: Layout, words: str) -> None:
    start = written(tmp_path / "start", config, "speculators")
    with pytest.raises(AlulaError, match=words):
        convert(start, tmp_path / "there", layout)
    assert [path.name for path in tmp_path.iterdir()] == ["start"]


def test_biases_that_a_layout_cannot_say_are_refused(tmp_path: Path) -> None:
    start = written(tmp_path / "start", head_config(), "specforge", fc__bias=torch.ones(32).half())
    convert(start, tmp_path / "there", "specforge")
    same_files(start, tmp_path / "there")
    for layout in ("official", "speculators"):
        with pytest.raises(AlulaError, match=r"fc\.bias"):
            convert(start, tmp_path / layout, layout)  # type: ignore[arg-type]


def test_the_depth_of_the_target_decides_whether_taps_are_the_official_ones(tmp_path: Path) -> None:
    config = head_config(taps=DEFAULT_TAPS)
    start = written(tmp_path / "start", config, "speculators", {"target": {"num_layers": 30}})
    with pytest.raises(AlulaError, match="layers 2, n // 2"):
        convert(start, tmp_path / "there", "official")
    start = written(tmp_path / "start", config, "speculators", {"target": {"num_layers": 12}})
    convert(start, tmp_path / "there", "official")


def test_the_two_meanings_of_norm_output(tmp_path: Path) -> None:
    """True in SpecForge's own trainer was true of every head; in the engines it asks for normed feedback."""
    start = written(tmp_path / "start", head_config(norm_output=True), "specforge")
    with pytest.raises(AlulaError, match="--norm-output"):
        convert(start, tmp_path / "there", "speculators")
    convert(start, tmp_path / "fed", "speculators", norm_output="fed-back")
    convert(start, tmp_path / "plain", "speculators", norm_output="lm-head")
    assert json.loads((tmp_path / "fed" / "config.json").read_text())["norm_output"] is True
    assert json.loads((tmp_path / "plain" / "config.json").read_text())["norm_output"] is False
    convert(tmp_path / "plain", tmp_path / "again", "specforge")
    assert "norm_output" not in json.loads((tmp_path / "again" / "config.json").read_text())
    assert not read_head(tmp_path / "again").config.norm_output
    convert(tmp_path / "fed", tmp_path / "known", "specforge")
    assert read_head(tmp_path / "known").config.norm_output and not read_head(tmp_path / "known").doubtful_norm_output
    with pytest.raises(AlulaError, match="leave it out"):
        convert(tmp_path / "fed", tmp_path / "there", "specforge", norm_output="fed-back")


def test_a_head_is_replaced_only_when_asked_and_only_as_a_whole(tmp_path: Path) -> None:
    start = written(tmp_path / "start", head_config(), "official")
    there = tmp_path / "there"
    convert(start, there, "specforge")
    with pytest.raises(AlulaError, match="--overwrite"):
        convert(start, there, "speculators")
    assert read_head(there).layout == "specforge"
    convert(start, there, "speculators", overwrite=True)
    assert read_head(there).layout == "speculators"
    other = written(tmp_path / "other", head_config(norm_before_fc=True), "speculators")
    with pytest.raises(AlulaError, match="norm_before_fc"):
        convert(other, there, "specforge", overwrite=True)
    assert read_head(there).layout == "speculators"
    convert(there, there, "specforge", overwrite=True)
    assert read_head(there).layout == "specforge"
    (there / "notes.txt").write_text("of the user")
    with pytest.raises(AlulaError, match=r"notes\.txt"):
        convert(start, there, "specforge", overwrite=True)
    with pytest.raises(AlulaError, match="is a file"):
        convert(start, there / "notes.txt", "specforge")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "start", "there"]


def test_a_failed_write_leaves_the_old_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, there = written(tmp_path / "start", head_config(), "official"), tmp_path / "there"
    convert(start, there, "specforge")
    before = (there / "model.safetensors").read_bytes()

    def full(*arguments: Any, **named: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match="No space"):
        convert(start, there, "speculators", overwrite=True)
    assert (there / "model.safetensors").read_bytes() == before and read_head(there).layout == "specforge"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["start", "there"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(save_tiny_llama(tmp_path_factory.mktemp("target"), layers=8), dtype="float32")


def fitting(target: LoadedModel) -> HeadConfig:
    sizes = target.config
    return head_config(
        hidden_size=sizes.hidden_size,
        target_hidden_size=sizes.hidden_size,
        vocab_size=sizes.vocab_size,
        draft_vocab_size=100,
        head_dim=sizes.head_dim,
        taps=(2, 4, 5),
    )


def test_provenance_travels_along(tmp_path: Path, target: LoadedModel) -> None:
    provenance = {"target": target_provenance(target), "data": {"written_by": "the target"}}
    start = written(tmp_path / "start", fitting(target), "speculators", provenance)
    for layout in LAYOUTS:
        convert(start, tmp_path / layout, layout)
        found = json.loads((tmp_path / layout / "provenance.json").read_text())
        assert {key: found[key] for key in provenance} == provenance
        assert found["head"]["taps"] == [2, 4, 5]
        assert load_drafter(tmp_path / layout, target).taps == (2, 4, 5)
    other = load_model(save_tiny_llama(tmp_path / "other", seed=1, layers=8), dtype="float32")
    with pytest.raises(AlulaError, match="weights"):
        load_drafter(tmp_path / "specforge", other)


def test_a_converted_head_without_provenance_stays_unverified(tmp_path: Path, target: LoadedModel) -> None:
    start = written(tmp_path / "start", fitting(target), "official")
    convert(start, tmp_path / "there", "specforge")
    with pytest.raises(AlulaError, match="--allow-unverified-head"):
        load_drafter(tmp_path / "there", target)


def test_the_verifier_is_named_by_flag_config_or_provenance(tmp_path: Path, target: LoadedModel) -> None:
    folder = target.checkpoint.folder
    local = {"name_or_path": str(folder), "architectures": ["LlamaForCausalLM"]}
    start = written(tmp_path / "start", fitting(target), "official", {"target": {"name": str(folder)}})
    assert convert(start, tmp_path / "a", "speculators").verifier == str(folder)
    assert verifier_in(tmp_path / "a") == local
    convert(start, tmp_path / "b", "speculators", verifier="owner/other")
    assert verifier_in(tmp_path / "b") == {"name_or_path": "owner/other", "architectures": []}
    convert(tmp_path / "b", tmp_path / "c", "specforge")
    convert(tmp_path / "c", tmp_path / "d", "speculators")
    assert verifier_in(tmp_path / "d")["name_or_path"] == "owner/other"


def verifier_in(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text())["speculators_config"]["verifier"]


@pytest.mark.parametrize("name", ["eagle3_full", "eagle3_vocab50", "eagle1_small"])
def test_golden_vectors_hold_in_every_layout(tmp_path: Path, golden: Path, name: str) -> None:
    for layout in LAYOUTS if name.startswith("eagle3") else LAYOUTS[:1]:
        folder = tmp_path / layout
        convert(golden / name, folder, layout)
        for file in ("case.json", "expected.safetensors"):
            shutil.copy(golden / name / file, folder)
        test_golden.test_forward_equals_the_original(test_golden._case(folder, kernel_set("torch")))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.update({"layers.0.attn_norm.weight": w.pop("layers.0.hidden_norm.weight")}), "attn_norm"),
        (lambda w: w.pop("d2t"), "d2t"),
        (lambda w: w.update({"fc.weight": w["fc.weight"].flip(1)}), r"fc\.weight"),
    ],
)
def test_broken_heads_are_refused_with_a_hint(tmp_path: Path, change: Any, words: str) -> None:
    start = written(tmp_path / "start", head_config(taps=DEFAULT_TAPS), "official")
    convert(start, tmp_path / "there", "speculators")
    weights = load_file(tmp_path / "there" / "model.safetensors")
    change(weights)
    save_file(weights, tmp_path / "there" / "model.safetensors")
    with pytest.raises(AlulaError, match=words):
        convert(tmp_path / "there", tmp_path / "back", "official")
    assert not (tmp_path / "back").exists()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = written(tmp_path / "start", head_config(taps=DEFAULT_TAPS), "official")
    there = tmp_path / "there"
    assert main(["convert", str(start), str(there), "--to", "speculators", "--verifier", "owner/name"]) == 0
    shown = capsys.readouterr().out
    assert "from the official to the speculators layout" in shown and "layers 2, 6, 9" in shown
    assert read_head(there).verifier == {"name_or_path": "owner/name", "architectures": []}
    assert main(["convert", str(start), str(there), "--to", "official"]) == 2
    assert capsys.readouterr().err.startswith("alula: error: DEST")
    assert main(["convert", str(start), str(there), "--to", "official", "--overwrite"]) == 0
    assert main(["convert", str(tmp_path / "nothing"), str(tmp_path / "other"), "--to", "official"]) == 2
    assert "config.json" in capsys.readouterr().err


def test_its_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom alula.cli import main\n"
        "try:\n    main(['convert', '--help'])\nexcept SystemExit:\n    pass\n"
        "print([m for m in ('torch', 'transformers', 'numpy', 'safetensors') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines()[-1] == "[]" and "--norm-output" in found.stdout


def test_the_head_in_memory_is_not_changed(tmp_path: Path) -> None:
    start = written(tmp_path / "start", head_config(norm_output=True), "specforge")
    head: HeadFiles = convert(start, tmp_path / "there", "specforge", norm_output="lm-head").head
    assert replace(head.config, norm_output=True) == read_head(start).config
