"""A finished drafter in service beside what training expects of it: the same trees, the same texts.

Training makes this comparison at every evaluation; here it is made for whatever folder serves.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from alula.config import AlulaError
from alula.draft.dialects import is_head_folder, read_head
from alula.draft.head_config import HeadConfig
from alula.draft.head_files import read_json
from alula.draft.load import find_shipped
from alula.draft.medusa_files import is_medusa_folder, read_medusa
from alula.draft.names import SHIPPED, find_named
from alula.model.load import LoadedModel
from alula.train.config import Served
from alula.train.features import FeatureStore
from alula.train.methods.method import Setting
from alula.train.methods.options import Eagle1Options, Eagle3Options, LMOptions, MedusaOptions, MethodOptions
from alula.train.methods.select import maker
from alula.train.served import ServedEvaluation
from alula.train.target import DecoderTarget


def served_and_estimated(model: LoadedModel, drafter: str, config: Served) -> dict[str, Any]:
    """Figures of the drafter in service, and of the same one in training, as plain JSON values.

    drafter: `auto`, a name or a folder. config: prompts (of ``sets`` only) and tree. Raises AlulaError for a drafter
    that was not trained, such as prompt lookup, or that does not fit the model.
    """
    folder = drafter_folder(drafter, model)
    making = maker(options_of(folder, model))
    store = FeatureStore(DecoderTarget(model), taps=making.taps(model.config.num_layers), dtype=model.dtype)
    method = making.continued(Setting(model, store, (), seed=0), folder)
    return ServedEvaluation(model, (), config).run(folder, method, store)


def drafter_folder(name: str, model: LoadedModel) -> Path:
    """Where the files of a drafter lie. Raises AlulaError for one that has none."""
    found = find_shipped(model, SHIPPED) if name == "auto" else find_named(name, model.name)
    folder = found or Path(name).expanduser()
    if not (folder / "config.json").is_file():
        raise AlulaError(f"drafter is {name!r}, which training knows nothing of: give a trained one, by name or folder")
    return folder


def options_of(folder: Path, model: LoadedModel) -> MethodOptions:
    """The settings with which training would make a drafter of these sizes."""
    if is_medusa_folder(folder):
        sizes = model.config
        found = read_medusa(folder, hidden_size=sizes.hidden_size, vocab_size=sizes.vocab_size).config
        return MedusaOptions(heads=found.heads, layers=found.layers)
    if is_head_folder(folder):
        return _eagle(read_head(folder).config)
    raw = read_json(folder / "config.json")
    if raw.get("model_type") != "llama":
        raise AlulaError(f"drafter {folder} is of model type {raw.get('model_type')!r}: give one that alula trained")
    return LMOptions(
        hidden_size=raw["hidden_size"],
        layers=raw["num_hidden_layers"],
        heads=raw["num_attention_heads"],
        kv_heads=raw["num_key_value_heads"],
        intermediate_size=raw["intermediate_size"],
    )


def _eagle(config: HeadConfig) -> Eagle1Options | Eagle3Options:
    if config.kind == "eagle1":
        return Eagle1Options(intermediate_size=config.intermediate_size, rope_theta=config.rope.theta)
    return Eagle3Options(
        draft_vocab_size=config.draft_vocab_size,
        intermediate_size=config.intermediate_size,
        rope_theta=config.rope.theta,
        fc_norm=config.fc_norm,
        norm_output=config.norm_output,
    )
