"""Where a drafter comes from: target, data, settings and versions, for the file beside its weights."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from alula.draft.load import target_provenance
from alula.model.load import LoadedModel
from alula.model.weights import hash_file
from alula.train.config import TrainConfig
from alula.version import alula_version


def provenance_of(
    config: TrainConfig, model: LoadedModel, files: Sequence[Path], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """All that is known before training, as plain JSON values. facts: of the method, such as its draft vocabulary.

    synth: how data was written, None where it was given.
    """
    return {
        "target": target_provenance(model),
        "data": {file.name: hash_file(file) for file in files},
        **facts,
        "method": {"name": config.method.name, **asdict(config.method)},
        "recipe": asdict(config.recipe),
        "synth": None if config.data else _plain(asdict(config.synth)),
        "device": str(model.device),
        "versions": {"alula": alula_version(), "torch": torch.__version__, "python": sys.version.split()[0]},
        "argv": sys.argv[1:],
    }


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Paths as text."""
    found: dict[str, Any] = json.loads(json.dumps(values, default=str))
    return found
