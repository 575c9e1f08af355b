"""Features on disk: shards of many conversations, each written whole, each conversation with a checksum.

A folder holds ``features.json``, which says what they are features of, and ``shard-*.safetensors``. What is there is
used, what is missing is computed, and what does not have its checksum is not believed: it is computed again.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from alula.config import AlulaError
from alula.model.progress import Bar, progress_bar
from alula.train.data import Conversation
from alula.train.features import Features, FeatureStore, FeatureTarget, forwards
from alula.train.files import write_text, write_whole

SHARD_BYTES = 64 * 2**20
"""Size of one shard, about."""
_CHECKSUMS = "checksums"


class ShardStore(FeatureStore):
    """Features computed once and read from ``folder`` afterwards.

    identity: what decides the numbers (the target's weights, say); a folder of another identity, taps or dtype is
    refused with an AlulaError. part: (i, n) computes the i-th of n parts only, for n processes that share a folder.
    """

    def __init__(
        self,
        target: FeatureTarget,
        *,
        taps: Sequence[int],
        dtype: torch.dtype,
        folder: Path,
        identity: Mapping[str, Any],
        part: tuple[int, int] = (0, 1),
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        super().__init__(target, taps=taps, dtype=dtype)
        self.folder, self._part, self._shard_bytes = folder, part, shard_bytes
        self._known: dict[str, Conversation] = {}
        folder.mkdir(parents=True, exist_ok=True)
        _claim(folder, {**identity, "taps": list(taps), "dtype": str(dtype).removeprefix("torch.")})
        self._shard_of = _scan(folder)

    def prepare(self, conversations: Sequence[Conversation], say: Callable[[str], None]) -> None:
        """Compute what is missing. Raises AlulaError, before computing anything, where the disk has no room for it."""
        self._known |= {c.key: c for c in conversations}
        self._shard_of = _scan(self.folder)
        missing = [c for c in conversations if c.key not in self._shard_of]
        if not missing:
            return
        self._check_room(missing, say)
        mine = self._cut([c for c in missing if self._is_mine(c)])
        with progress_bar("features", sum(self._size(c) for shard in mine for c in shard)) as bar:
            done = 0
            for shard in mine:
                self._write(self._path(shard), shard, bar, done)
                done += sum(map(self._size, shard))
        self._shard_of = _scan(self.folder)

    def get(self, conversations: Sequence[Conversation]) -> list[Features]:
        """Stored ones as stored; others are computed and not kept."""
        self._known |= {c.key: c for c in conversations}
        found = {c.key: self._stored(c) for c in conversations if c.key in self._shard_of}
        others = [c for c in conversations if c.key not in found]
        found |= {c.key: features for c, features in zip(others, self.compute(others), strict=True)}
        return [found[c.key] for c in conversations]

    def _is_mine(self, conversation: Conversation) -> bool:
        """By the key, so that processes that look at different times still agree."""
        part, parts = self._part
        return int(conversation.key[8:16], 16) % parts == part

    def _size(self, conversation: Conversation) -> int:
        """Bytes on disk, but for a few of the header."""
        learned, width = len(conversation.learned), len(self.target.norm_D)
        numbers = len(conversation.tokens) * len(self.taps) * width + learned * width
        return numbers * self.dtype.itemsize + learned * torch.int64.itemsize

    def _check_room(self, missing: Sequence[Conversation], say: Callable[[str], None]) -> None:
        needed, free = sum(map(self._size, missing)), shutil.disk_usage(self.folder).free
        say(
            f"features of {len(missing)} conversations need {_readable(needed)} in {self.folder}, "
            f"where {_readable(free)} are free"
        )
        if needed > free:
            raise AlulaError(
                f"features: {_readable(needed)} are needed in {self.folder} and {_readable(free)} are free: "
                "give output on a larger disk, fewer or shorter conversations (max_tokens), or features on-the-fly"
            )

    def _cut(self, conversations: Sequence[Conversation]) -> list[list[Conversation]]:
        shards: list[list[Conversation]] = []
        room = 0
        for conversation in conversations:
            size = self._size(conversation)
            if not shards or size > room:
                shards.append([])
                room = self._shard_bytes
            shards[-1].append(conversation)
            room -= size
        return shards

    def _path(self, shard: Sequence[Conversation]) -> Path:
        content = hashlib.sha256("".join(c.key for c in shard).encode()).hexdigest()[:24]
        return self.folder / f"shard-{content}.safetensors"

    def _write(self, path: Path, shard: Sequence[Conversation], bar: Bar | None = None, done: int = 0) -> None:
        from safetensors.torch import save_file

        tensors: dict[str, torch.Tensor] = {}
        checksums: dict[str, str] = {}
        for group in forwards(shard):
            for conversation, features in zip(group, self.compute(group), strict=True):
                parts = {name: tensor.cpu().contiguous() for name, tensor in _parts(features).items()}
                tensors |= {f"{conversation.key}.{name}": tensor for name, tensor in parts.items()}
                checksums[conversation.key] = _checksum(features)
                done += self._size(conversation)
            if bar is not None:
                bar.set(done)
        write_whole(path, lambda file: save_file(tensors, file, metadata={_CHECKSUMS: json.dumps(checksums)}))

    def _stored(self, conversation: Conversation) -> Features:
        path = self._shard_of[conversation.key]
        features = _read(path, conversation.key, self.target.norm_D.device)
        if features is None:
            warnings.warn(f"{path} is damaged: its features are computed again", stacklevel=2)
            self._repair(path)
            (features,) = self.compute([conversation])
        return features

    def _repair(self, path: Path) -> None:
        """Write the shard anew, but for conversations that are no longer among the data."""
        keys = [key for key, shard in self._shard_of.items() if shard == path]
        self._write(path, [self._known[key] for key in keys if key in self._known])
        for key in keys:
            if key not in self._known:
                del self._shard_of[key]


def _claim(folder: Path, identity: Mapping[str, Any]) -> None:
    """Say what the folder holds. Raises AlulaError where it holds something else."""
    path, wanted = folder / "features.json", json.loads(json.dumps(identity))
    if not path.exists():
        write_text(path, json.dumps(wanted, indent=1) + "\n")
        return
    try:
        there = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        there = None
    if not isinstance(there, dict):
        raise AlulaError(f"{path} is no JSON object: remove the folder, its features are then computed again")
    for name in wanted.keys() | there.keys():
        if wanted.get(name) != there.get(name):
            raise AlulaError(
                f"{folder} holds features for {name} {there.get(name)!r}, and this run's is {wanted.get(name)!r}: "
                "remove the folder, or give another output"
            )


def _scan(folder: Path) -> dict[str, Path]:
    """The shard of each stored conversation. Damaged files are removed, with a warning."""
    shard_of: dict[str, Path] = {}
    for path in sorted(folder.glob("shard-*.safetensors")):
        checksums = _checksums(path)
        if checksums is None:
            warnings.warn(f"{path} is damaged: its features are computed again", stacklevel=3)
            path.unlink(missing_ok=True)
        else:
            shard_of |= dict.fromkeys(checksums, path)
    return shard_of


def _checksums(path: Path) -> dict[str, str] | None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            found = json.loads(file.metadata()[_CHECKSUMS])
    except (SafetensorError, OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, dict) else None


def _read(path: Path, key: str, device: torch.device) -> Features | None:
    """On a device; None for anything that is not what was written."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            features = Features(*(file.get_tensor(f"{key}.{name}") for name in ("taps", "hidden", "choice")))
            wanted = json.loads(file.metadata()[_CHECKSUMS])[key]
    except (SafetensorError, OSError, ValueError, KeyError, TypeError):
        return None
    if _checksum(features) != wanted:
        return None
    return Features(*(tensor.to(device) for tensor in _parts(features).values()))


def _parts(features: Features) -> dict[str, torch.Tensor]:
    return {"taps": features.taps_nF, "hidden": features.hidden_MD, "choice": features.choice_M}


def _checksum(features: Features) -> str:
    total = hashlib.blake2b(digest_size=16)
    for tensor in _parts(features).values():
        total.update(tensor.cpu().contiguous().view(torch.uint8).numpy().data)
    return total.hexdigest()


def _readable(size: int) -> str:
    return f"{size / 2**20:.1f} MiB" if size < 2**30 else f"{size / 2**30:.1f} GiB"
