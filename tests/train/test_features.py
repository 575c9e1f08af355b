"""Features: computed on the fly, or stored in shards that are whole, checked and about the right target."""

from __future__ import annotations

import shutil
import warnings
from collections import namedtuple
from pathlib import Path

import pytest
import torch

from alula.config import AlulaError
from alula.train.data import Conversation
from alula.train.features import FORWARD_TOKENS, Features, FeatureStore, forwards
from alula.train.shards import ShardStore
from tests.train.support import SIZES, FakeTarget, conversations

IDENTITY = {"weights": "abc"}


def shards(target: FakeTarget, folder: Path, **settings: object) -> ShardStore:
    defaults: dict[str, object] = {"identity": IDENTITY, "shard_bytes": 4000, "taps": SIZES.taps}
    return ShardStore(target, dtype=torch.bfloat16, folder=folder, **(defaults | settings))  # type: ignore[arg-type]


def filled(folder: Path, data: list[Conversation]) -> list[Path]:
    shards(FakeTarget(), folder).prepare(data, lambda text: None)
    return sorted(folder.glob("shard-*"))


def prepared(target: FakeTarget, folder: Path, data: list[Conversation]) -> list[Features]:
    store = shards(target, folder)
    store.prepare(data, lambda text: None)
    return store.get(data)


def same(one: Features, other: Features) -> bool:
    return all(torch.equal(mine, theirs) for mine, theirs in zip(vars(one).values(), vars(other).values(), strict=True))


def expected(data: list[Conversation]) -> list[Features]:
    return FeatureStore(FakeTarget(), taps=SIZES.taps, dtype=torch.bfloat16).get(data)


def test_forwards_stay_within_the_limit_and_keep_the_order() -> None:
    data = [Conversation((1,) * length, (True,) * length) for length in (5, FORWARD_TOKENS, 900, 1000, 1500, 3000, 9)]
    groups = forwards(data)
    assert [c for group in groups for c in group] == data
    assert [len(group) for group in groups] == [1, 1, 2, 1, 1, 1]
    assert all(len(group) == 1 or max(len(c.tokens) for c in group) * len(group) <= FORWARD_TOKENS for group in groups)


def test_shards_are_computed_once_and_are_what_was_computed(tmp_path: Path) -> None:
    target, data, said = FakeTarget(), conversations(30), list[str]()
    first = shards(target, tmp_path)
    first.prepare(data, said.append)
    assert target.calls == 30 and len(list(tmp_path.glob("shard-*"))) > 3
    (told,) = said
    size = sum(path.stat().st_size for path in tmp_path.glob("shard-*"))
    needed = float(told.split(" need ")[1].split(" MiB")[0]) * 2**20
    assert "30 conversations" in told and needed == pytest.approx(size, abs=0.2 * 2**20)
    again = shards(target, tmp_path)
    again.prepare(data[::-1], said.append)
    found = again.get(data[::-1])[::-1]
    assert target.calls == 30 and len(said) == 1
    assert all(same(one, other) for one, other in zip(found, expected(data), strict=True))
    assert not list(tmp_path.glob(".*"))


def test_what_was_not_prepared_is_computed_and_new_data_gets_shards_of_its_own(tmp_path: Path) -> None:
    target, data = FakeTarget(), conversations(20)
    store = shards(target, tmp_path)
    store.prepare(data[:10], lambda text: None)
    before = set(tmp_path.glob("shard-*"))
    assert all(same(one, other) for one, other in zip(store.get(data), expected(data), strict=True))
    assert set(tmp_path.glob("shard-*")) == before and target.calls == 20
    store.prepare(data, lambda text: None)
    assert set(tmp_path.glob("shard-*")) > before and target.calls == 30
    store.get(data)
    assert target.calls == 30


def test_an_interrupted_store_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, data = FakeTarget(), conversations(20)
    states = target.states

    def failing(*arguments: object) -> object:
        if target.calls > 10:
            raise RuntimeError("killed")
        return states(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(target, "states", failing)
    with pytest.raises(RuntimeError, match="killed"):
        shards(target, tmp_path).prepare(data, lambda text: None)
    finished = len(list(tmp_path.glob("shard-*")))
    assert finished and not list(tmp_path.glob(".*"))
    monkeypatch.undo()
    target.calls = 0
    shards(target, tmp_path).prepare(data, lambda text: None)
    assert 0 < target.calls < 20 and len(list(tmp_path.glob("shard-*"))) > finished


@pytest.mark.parametrize("where", ["header", "data", "end", "all"])
def test_a_damaged_shard_is_computed_again_with_a_warning(where: str, tmp_path: Path) -> None:
    data = conversations(12)
    path = filled(tmp_path, data)[1]
    content = bytearray(path.read_bytes())
    if where == "header":
        content[20] ^= 255
    elif where == "data":
        content[-40] ^= 1
    path.write_bytes(content[:-9] if where == "end" else b"" if where == "all" else content)
    target = FakeTarget()
    with pytest.warns(UserWarning, match=f"{path.name} is damaged"):
        found = prepared(target, tmp_path, data)
    assert all(same(one, other) for one, other in zip(found, expected(data), strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        target.calls = 0
        mended = prepared(target, tmp_path, data)
    assert all(same(one, other) for one, other in zip(mended, expected(data), strict=True))
    assert target.calls == 0


@pytest.mark.parametrize("change", [{"identity": {"weights": "xyz"}}, {"taps": (0, 1, 2)}])
def test_features_of_something_else_are_refused(change: dict[str, object], tmp_path: Path) -> None:
    filled(tmp_path, conversations(3))
    with pytest.raises(AlulaError, match=f"holds features for {'taps' if 'taps' in change else 'weights'}.*remove"):
        shards(FakeTarget(), tmp_path, **change)
    (tmp_path / "features.json").write_text("{")
    with pytest.raises(AlulaError, match="remove the folder"):
        shards(FakeTarget(), tmp_path)


def test_a_full_disk_is_found_out_before_anything_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(10**9, 10**9 - 100, 100))
    target, said = FakeTarget(), list[str]()
    with pytest.raises(AlulaError, match=r"features: .* are needed .* give output on a larger disk"):
        shards(target, tmp_path).prepare(conversations(5), said.append)
    assert target.calls == 0 and "are free" in said[0]


def test_processes_share_the_work(tmp_path: Path) -> None:
    data, targets = conversations(30), (FakeTarget(), FakeTarget())
    stores = [shards(target, tmp_path, part=(rank, 2)) for rank, target in enumerate(targets)]
    for store in stores:
        store.prepare(data, lambda text: None)
    assert all(8 < target.calls < 22 for target in targets) and sum(t.calls for t in targets) == 30
    late = shards(FakeTarget(), tmp_path)
    assert all(same(one, other) for one, other in zip(late.get(data), expected(data), strict=True))
    assert late.computed_tokens == 0
