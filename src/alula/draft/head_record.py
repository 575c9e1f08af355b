"""What provenance.json says of the head itself, so that a config.json edited or misread later is found out.

Taps and `norm_output` are the two facts that layouts write differently (see `alula.draft.head_config`); `fc` is the
tensor that reads the taps in their order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from alula.config import AlulaError
from alula.draft.head_config import HeadConfig
from alula.model.weights import hash_tensor

RECORD = "head"
"""Its key in provenance.json."""


def head_record(config: HeadConfig, weights: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """taps: layers whose inputs the head reads, None for the default. norm_output: normed states are fed back."""
    return {
        "taps": None if config.taps is None else list(config.taps),
        "norm_output": config.norm_output,
        "fc": hash_tensor(weights["fc.weight"]),
    }


def check_record(record: Any, config: HeadConfig, weights: Mapping[str, torch.Tensor]) -> None:
    """Raises AlulaError where config or tensors are not those that were recorded; None has nothing to say."""
    if record is None:
        return
    if not isinstance(record, dict):
        raise AlulaError(f"head is {record!r} in provenance.json: give the file that came with the head")
    ours = head_record(config, weights)
    for key in ("taps", "norm_output"):
        if record.get(key) != ours[key]:
            raise AlulaError(
                f"the head's config.json gives {key} {ours[key]}, but its provenance.json {record.get(key)}: put the "
                "config.json back that the head was written with"
            )
    if record.get("fc") != ours["fc"]:
        raise AlulaError(
            "the head's fc.weight is not the one that its provenance.json describes (are its taps in another order?): "
            "give the tensors that the head was written with"
        )
