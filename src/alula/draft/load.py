"""A drafter by name: `none`, `ngram`, `auto`, one of `alula.draft.names`, or the path of a head or smaller model."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from alula.config import AlulaError
from alula.draft.build import TargetParts, build_head
from alula.draft.dialects import is_head_folder, read_head, read_provenance
from alula.draft.drafter import Drafter, NoDrafter
from alula.draft.lm import LanguageModel
from alula.draft.medusa import MedusaDrafter, MedusaHeads
from alula.draft.medusa_files import is_medusa_folder, read_medusa
from alula.draft.names import SHIPPED, VARIABLE, find_named, named_drafters
from alula.draft.neural import NeuralDrafter
from alula.draft.ngram import NgramDrafter
from alula.draft.policy import TreePolicy
from alula.draft.static import StaticTree
from alula.model.decoder import DRAFT_MARGIN
from alula.model.load import LoadedModel, load_model


def load_drafter(
    name: str | Path,
    target: LoadedModel,
    *,
    rule: str = "coupled",
    tree: StaticTree | None = None,
    sampled: bool = False,
    allow_unverified: bool = False,
) -> Drafter:
    """The drafter `name` for this target.

    name: `auto` (the head shipped for this target, else n-gram), `none`, `ngram`, a drafter that has a name (see
    `alula.draft.names`; a folder of such a name is reached by `./name`), the folder of an EAGLE head or of Medusa
    heads, or a smaller model with the same tokenizer (folder, GGUF file, hub id or built-in name).
    rule, tree, sampled: see `TreePolicy`; trees are dynamic by default.
    allow_unverified: accept a head that does not say which target it was trained for.
    Raises AlulaError for what is unknown, cannot be read, or does not fit the target.
    """
    policy = TreePolicy(rule, tree, sampled)
    if not isinstance(name, (str, Path)):
        raise AlulaError(f"drafter is {name!r}: give auto, none, ngram, a name or a path")
    if name == "none":
        return NoDrafter()
    if name == "auto" and (shipped := find_shipped(target, SHIPPED)) is not None:
        return build_head(read_head(shipped), target_parts(target), policy)
    if name in ("auto", "ngram"):
        return NgramDrafter()
    path = find_named(name, target.name) or Path(name).expanduser()
    if path.is_dir() and is_medusa_folder(path):
        return load_medusa(path, target, policy, allow_unverified=allow_unverified)
    if path.is_dir() and is_head_folder(path):
        return load_head(path, target, policy, allow_unverified=allow_unverified)
    if not name or (not path.exists() and "/" not in str(name) and name != "smollm2"):
        raise AlulaError(
            f"drafter is {str(name)!r}: give {', '.join(['auto', 'none', 'ngram', *named_drafters()])}, or the path of "
            f"an EAGLE head, of Medusa heads or of a smaller model (folders in {VARIABLE} add names)"
        )
    return load_language_model(name if not path.exists() else path, target, policy)


def find_shipped(target: LoadedModel, folder: Path) -> Path | None:
    """Of the heads in `folder`, one per sub-folder, the one trained for these very weights, if there is one."""
    for head, provenance in _shipped(folder):
        trained = provenance.get("target", {})
        sizes = (trained.get("vocab_size"), trained.get("hidden_size"))
        fits = sizes == (target.config.vocab_size, target.config.hidden_size)
        if fits and trained.get("weights") == target.weights_hash:
            return head
    return None


def load_head(
    folder: Path, target: LoadedModel, policy: TreePolicy, *, allow_unverified: bool = False
) -> NeuralDrafter:
    """An EAGLE head, checked against the target by its sizes and its provenance."""
    head = read_head(folder)
    drafter = build_head(head, target_parts(target), policy)
    _check_provenance(folder, head.provenance, target, allow_unverified)
    if head.doubtful_norm_output:
        warnings.warn(
            f"the head in {folder} sets norm_output, and its normed states are fed back, as SGLang and vLLM do; "
            "SpecForge up to 0.3 trained heads of this config otherwise: if few drafts are accepted, run "
            "`alula convert` on it with --norm-output lm-head",
            stacklevel=2,
        )
    return drafter


def is_unverified_head(name: str | Path, target: str) -> bool:
    """Whether `name` is a head that does not say which target it was trained for. target: the model's name."""
    folder = find_named(name, target) or Path(name).expanduser()
    return folder.is_dir() and is_head_folder(folder) and not _names_target(read_provenance(folder))


def load_medusa(
    folder: Path, target: LoadedModel, policy: TreePolicy, *, allow_unverified: bool = False
) -> MedusaDrafter:
    """Medusa heads, checked against the target by their sizes and their provenance."""
    files = read_medusa(folder, hidden_size=target.config.hidden_size, vocab_size=target.config.vocab_size)
    _check_provenance(folder, files.provenance, target, allow_unverified)
    weights = {name: tensor.to(target.device, target.dtype) for name, tensor in files.weights.items()}
    heads = MedusaHeads(files.config, weights, target.decoder.logits, target.kernels)
    return MedusaDrafter(heads, policy, target.kernels, target.config.vocab_size)


def load_language_model(name: str | Path, target: LoadedModel, policy: TreePolicy) -> NeuralDrafter:
    """A smaller model as drafter, in the target's dtype. It stops drafting at its own context limit."""
    from alula.model.hf_config import read_hf_config
    from alula.model.sources import resolve

    try:
        checkpoint = resolve(name, target.dtype)
        limit = min(read_hf_config(checkpoint.folder).max_position_embeddings, target.decoder.max_positions)
        model = load_model(name, dtype=target.dtype, kernels=target.kernels, device=target.device, max_len=limit)
    except AlulaError as error:
        raise AlulaError(f"drafter {str(name)!r}: {error}") from None
    if model.tokenizer.hashes["vocabulary"] != target.tokenizer.hashes["vocabulary"]:
        raise AlulaError(
            f"the drafter {str(name)!r} has another tokenizer than the target {target.name!r}: give a model that "
            "shares the target's vocabulary, or use ngram"
        )
    lm = LanguageModel(model.decoder, target.config.vocab_size)
    return NeuralDrafter("lm", lm, (), policy, target.kernels, target.config.vocab_size, limit=limit)


def target_parts(target: LoadedModel) -> TargetParts:
    decoder = target.decoder
    return TargetParts(
        embedding_VD=decoder.embedding_VD,
        logits=decoder.logits,
        layers=target.config.num_layers,
        positions=decoder.max_positions + DRAFT_MARGIN,
        kernels=target.kernels,
    )


def target_provenance(target: LoadedModel) -> dict[str, Any]:
    """The `target` entry of a head's provenance.json: what `load_head` and `find_shipped` compare."""
    names = ("vocab_size", "hidden_size", "num_layers")
    return {
        "name": target.name,
        **{name: getattr(target.config, name) for name in names},
        **target.identity.as_dict(),
    }


def _check_provenance(
    folder: Path, provenance: Mapping[str, Any] | None, target: LoadedModel, allow_unverified: bool
) -> None:
    if provenance is None or not _names_target(provenance):
        if allow_unverified:
            return
        raise AlulaError(
            f"{folder} has no provenance.json that names its target: pass --allow-unverified-head if you know that the"
            f" head was trained for {target.name!r}"
        )
    trained = provenance["target"]
    weights, dtype = target.weights_hash, target.format
    if trained["weights"] != weights:
        raise AlulaError(
            f"the head in {folder} was trained for {trained.get('name', 'another model')!r} with weights "
            f"{str(trained['weights'])[:12]}, but the target's weights are {weights[:12]}: give its own target"
        )
    if trained.get("dtype", dtype) != dtype:
        warnings.warn(
            f"the head in {folder} was trained on features in {trained['dtype']}, and the target runs in {dtype}: "
            "fewer drafts may be accepted",
            stacklevel=3,
        )


def _names_target(provenance: Mapping[str, Any] | None) -> bool:
    trained = (provenance or {}).get("target")
    return isinstance(trained, dict) and "weights" in trained


def _shipped(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in sorted(folder.glob("*/provenance.json")):
        values = json.loads(path.read_text(encoding="utf-8"))
        yield path.parent, values
