"""Where the tensors of a GGUF file lie, kept beside its converted weights.

The file's own directory comes after its vocabulary, which takes seconds to read.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from alula.model.gguf_tensors import GgufFile

NAME = "gguf_directory.json"


@dataclass(frozen=True)
class Place:
    """Of one tensor. kind: the name of its type. shape: as torch has it. offset, size: in bytes, in the file."""

    kind: str
    shape: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True)
class Directory:
    """All tensors by their GGUF names, and the architecture that the names belong to."""

    architecture: str
    places: dict[str, Place]

    @classmethod
    def of(cls, file: GgufFile) -> Directory:
        architecture = file.metadata.get("general.architecture", "")
        return cls(architecture, {name: Place(*file.place(name)) for name in file.names()})

    @classmethod
    def read(cls, folder: Path) -> Directory:
        """What `write` left in a converted folder, whose manifest says that it is whole."""
        found = json.loads((folder / NAME).read_text(encoding="utf-8"))
        places = {name: Place(**{**place, "shape": tuple(place["shape"])}) for name, place in found["places"].items()}
        return cls(found["architecture"], places)

    def write(self, folder: Path) -> None:
        (folder / NAME).write_text(json.dumps(asdict(self)), encoding="utf-8")

    def kinds(self) -> list[str]:
        """The types of all matrices."""
        return [place.kind for place in self.places.values() if len(place.shape) > 1]

    def stored(self, path: Path, name: str) -> torch.Tensor:
        """A matrix's rows of bytes as they lie in the file, in GGUF's own layout."""
        place = self.places[name]
        flat = np.fromfile(path, np.uint8, count=place.size, offset=place.offset)
        return torch.from_numpy(flat).view(place.shape[0], -1)
