"""A head from one public layout into another: the same tensors under other names, the same meaning in other words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from alula.config import AlulaError
from alula.draft.dialects import HeadFiles, read_head
from alula.draft.head_config import Layout
from alula.draft.head_files import HEAD_FILES, read_json, write_folder
from alula.draft.head_record import RECORD, head_record
from alula.draft.layouts import check_expressible, head_json, layout_tensors

NormOutput = Literal["fed-back", "lm-head"]


@dataclass(frozen=True)
class Converted:
    """What was done. head: as read, its `norm_output` settled. verifier: the target's name in a speculators config."""

    head: HeadFiles
    layout: Layout
    verifier: str | None


def convert(
    source: Path,
    dest: Path,
    layout: Layout,
    *,
    norm_output: NormOutput | None = None,
    verifier: str | None = None,
    overwrite: bool = False,
) -> Converted:
    """Write the head of one folder into another, in that layout. Tensors keep their bits and their number format.

    norm_output: what a true `norm_output` of a SpecForge config means, where nothing else says. verifier: folder or hub
    id of the target, which a speculators config names. overwrite: replace a head that `dest` holds.
    Raises AlulaError, naming the field, for a head that cannot be read or that the layout has no words for. `dest`
    appears, or changes, only once everything is written.
    """
    _check_dest(dest, overwrite)
    head = _settled(read_head(source), norm_output)
    trained = (head.provenance or {}).get("target")
    trained = trained if isinstance(trained, dict) else {}
    check_expressible(head.config, head.weights, layout, trained.get("num_layers"))
    target = _verifier(head, trained, verifier)
    values = head_json(
        head.config,
        layout,
        fc_bias="fc.bias" in head.weights,
        dtype=head.weights["fc.weight"].dtype,
        max_position_embeddings=head.max_position_embeddings,
        verifier=target,
    )
    record = {**head_record(head.config, head.weights), **({"verifier": target} if target else {})}
    provenance = {**(head.provenance or {}), RECORD: record}
    write_folder(dest, values, layout_tensors(head.config, head.weights, layout), provenance)
    return Converted(head, layout, target.get("name_or_path"))


def _check_dest(dest: Path, overwrite: bool) -> None:
    if not dest.exists():
        return
    if not dest.is_dir():
        raise AlulaError(f"DEST {dest} is a file: give the path of a folder")
    others = sorted(path.name for path in dest.iterdir() if path.name not in HEAD_FILES)
    if others:
        raise AlulaError(f"DEST {dest} holds {others[0]!r}, which is no file of a head: give another folder")
    if not overwrite:
        raise AlulaError(f"DEST {dest} exists: give another folder, or --overwrite to replace the head in it")


def _settled(head: HeadFiles, norm_output: NormOutput | None) -> HeadFiles:
    """The head with one meaning of `norm_output`."""
    if norm_output is not None and not head.doubtful_norm_output:
        raise AlulaError("--norm-output is given, but what norm_output means in this head is known: leave it out")
    if norm_output is None and head.doubtful_norm_output:
        raise AlulaError(
            "norm_output is true in a SpecForge config, which has had two meanings: give --norm-output fed-back for "
            "what SGLang and vLLM do with it, or lm-head for what SpecForge up to 0.3 trained (a plain EAGLE-3 head)"
        )
    return replace(head, config=replace(head.config, norm_output=head.config.norm_output and norm_output != "lm-head"))


def _verifier(head: HeadFiles, trained: Mapping[str, Any], given: str | None) -> dict[str, Any]:
    """`name_or_path` and `architectures` of the target, as far as anything names them."""
    if given is None and head.verifier is not None:
        return dict(head.verifier)
    name = given or trained.get("name")
    if not isinstance(name, str) or (given is None and "/" not in name):
        return {}  # alula's built-in names mean nothing elsewhere
    config = Path(name).expanduser() / "config.json"
    architectures = read_json(config).get("architectures") if config.is_file() else None
    return {"name_or_path": name, "architectures": architectures or []}
