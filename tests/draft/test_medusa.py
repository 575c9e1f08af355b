"""Medusa heads: their trees against plain torch, commits, prefix hits and batches, and their files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from alula.config import AlulaError
from alula.draft.load import load_drafter, load_medusa
from alula.draft.medusa import MedusaDrafter
from alula.draft.medusa_files import MedusaConfig, check_medusa, read_medusa, save_medusa
from alula.draft.policy import TreePolicy
from alula.draft.static import StaticTree, default_static_tree
from alula.model.load import LoadedModel, load_model
from alula.sampling.noise import gumbel
from alula.tree import DraftTree, TreeShape
from tests.draft.heads import TARGET_HIDDEN, VOCAB, random_tokens
from tests.draft.kernel_sets import kernel_set, kernel_sets
from tests.draft.medusas import CONFIG, dense_logits, make_medusa, random_weights, save_random_medusa
from tests.draft.stand_in import SHAPE, bench_for, commit, deepest, features, fill, ready, same, sibling
from tests.engine.tiny import complete, engine_for, prompt_of, save_tiny_llama

TOKENS = random_tokens(13)
TREES = [None, default_static_tree()]


@pytest.fixture(params=kernel_sets())
def drafter(request: pytest.FixtureRequest) -> MedusaDrafter:
    return make_medusa(kernels=kernel_set(request.param))


def log_q(drafter: MedusaDrafter, temperature: float = 1.0) -> list[torch.Tensor]:
    """Per depth [V], from the feature before the root of TOKENS."""
    feature_D = features(drafter, TOKENS)[len(TOKENS) - 2]
    return [(dense_logits(feature_D, head) / temperature).log_softmax(0) for head in range(CONFIG.heads)]


def scores(tree: DraftTree) -> dict[tuple[int, ...], float]:
    """Token paths and what they score."""
    paths = (tuple(int(tree.tokens_N[n]) for n in tree.path(node)) for node in range(1, len(tree)))
    return dict(zip(paths, tree.scores_N[1:].tolist(), strict=True))


def test_a_dynamic_tree_holds_the_best_products_of_the_heads(drafter: MedusaDrafter) -> None:
    best = [level.topk(SHAPE.branch) for level in log_q(drafter)]
    expected: dict[tuple[int, ...], float] = {}
    frontier: dict[tuple[int, ...], float] = {(): 0.0}
    for level in best:
        frontier = {
            (*path, token): score + log
            for path, score in frontier.items()
            for token, log in zip(level.indices.tolist(), level.values.tolist(), strict=True)
        }
        expected |= frontier
        frontier = dict(sorted(frontier.items(), key=lambda entry: -entry[1])[: SHAPE.branch])
    kept = dict(sorted(expected.items(), key=lambda entry: -entry[1])[: SHAPE.nodes - 1])
    found = scores(ready(drafter, TOKENS).draft({0: SHAPE})[0])
    assert found.keys() == kept.keys()
    assert list(found.values()) == pytest.approx([kept[path] for path in found], abs=1e-4)


def test_a_static_tree_has_the_ranks_of_each_head() -> None:
    tree = StaticTree.of([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0)])
    drafter = make_medusa(TreePolicy(tree=tree))
    ranked = [level.topk(2).indices.tolist() for level in log_q(drafter)]
    wanted = {tuple(ranked[depth][rank] for depth, rank in enumerate(path)) for path in tree.paths if len(path) <= 3}
    assert scores(ready(drafter, TOKENS).draft({0: TreeShape(26, 5, 4)})[0]).keys() == wanted


@pytest.mark.parametrize("tree", TREES, ids=["dynamic", "static"])
def test_no_tree_is_deeper_than_there_are_heads(tree: StaticTree | None) -> None:
    drafted = ready(make_medusa(TreePolicy(tree=tree)), TOKENS).draft({0: TreeShape(40, 6, 3)})[0]
    assert drafted.depths_N.max() == CONFIG.heads


def test_heads_whose_level_is_below_the_floor_are_not_asked(
    drafter: MedusaDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, logits = list[int](), drafter.heads.logits

    def counted(features_BD: torch.Tensor, head: int) -> torch.Tensor:
        asked.append(head)
        return logits(features_BD, head)

    monkeypatch.setattr(drafter.heads, "logits", counted)
    bench = ready(drafter, TOKENS)
    assert len(bench.draft({0: replace(SHAPE, floor=0.999)})[0]) == 1
    assert asked == [0]


def test_coupled_children_are_the_best_by_the_targets_own_noise(drafter: MedusaDrafter) -> None:
    bench = bench_for(drafter)
    fill(bench, TOKENS, temperature=0.7)
    bench.sequences[0].seed = 5
    tree = bench.draft({0: SHAPE})[0]
    for node in range(len(tree)):
        depth = int(tree.depths_N[node])
        if tree.children[node]:
            noise = torch.from_numpy(gumbel(5, 0, len(TOKENS) + depth, np.arange(VOCAB)))
            best = (log_q(drafter, 0.7)[depth] + noise).topk(len(tree.children[node])).indices.tolist()
            assert [int(tree.tokens_N[child]) for child in tree.children[node]] == best


def test_sampled_children_come_with_the_distribution_they_came_from() -> None:
    drafter = make_medusa(TreePolicy("rejection", default_static_tree(), sampled=True))
    bench = bench_for(drafter)
    fill(bench, TOKENS, temperature=0.8)
    drawn = bench.draft({0: TreeShape(26, 5, 4)})[0]
    parents = {node for node in range(len(drawn)) if drawn.children[node]}
    assert drawn.sampled and set(drawn.proposals) == parents
    for node in parents:
        expected = log_q(drafter, 0.8)[int(drawn.depths_N[node])].exp()
        torch.testing.assert_close(drawn.proposals[node], expected, rtol=1e-3, atol=1e-5)


def test_penalties_follow_the_path(drafter: MedusaDrafter) -> None:
    """Rows of one level share their logits, not what their paths do to them."""
    first = int(log_q(drafter)[0].argmax())
    below = log_q(drafter)[1]
    bias = {first: float(below.max() - below[first]) + 1}
    for penalty, repeats in ((0.0, True), (2.0, False)):
        bench = bench_for(drafter)
        fill(bench, TOKENS, presence_penalty=penalty, logit_bias=bias)
        tree = bench.draft({0: TreeShape(3, 2, 1)})[0]
        assert tree.tokens_N[1] == first and (tree.tokens_N[2] == first) == repeats


def test_trees_after_commits_equal_those_of_a_fresh_prefill(drafter: MedusaDrafter) -> None:
    bench = ready(drafter, random_tokens(11))
    for choose in (lambda tree: [], deepest, sibling, lambda tree: [1]):
        commit(bench, choose(bench.draft({0: SHAPE})[0]), 17)
        held = bench.sequences[0]
        assert same(bench.draft({0: SHAPE})[0], ready(drafter, list(held.tokens)).draft({0: SHAPE})[0])


@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_prefill_chunks_do_not_matter(drafter: MedusaDrafter, chunk: int) -> None:
    tokens = random_tokens(20)
    whole, parts = ready(drafter, tokens), ready(drafter, tokens, chunk=chunk)
    assert same(whole.draft({0: SHAPE})[0], parts.draft({0: SHAPE})[0])


def test_prefix_hits_draft_like_a_cold_start(drafter: MedusaDrafter) -> None:
    """Up to a hit that reaches the root, whose feature is the one kept with its last page."""
    prefix = random_tokens(33)
    bench = bench_for(drafter)
    fill(bench, [*prefix, 1, 2, 3], id=0)
    commit(bench, [1], 9, id=0)
    for id, suffix in enumerate([[4, 5], [1, 2, 3], [7]], start=1):
        assert fill(bench, [*prefix, *suffix], id=id) >= 32
        assert same(bench.draft({id: SHAPE})[id], ready(drafter, [*prefix, *suffix]).draft({0: SHAPE})[0])
    assert fill(bench, prefix, id=9) == 32
    assert same(bench.draft({9: SHAPE})[9], ready(drafter, prefix).draft({0: SHAPE})[0])


@pytest.mark.parametrize("tree", TREES, ids=["dynamic", "static"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_batch_equals_single_runs_bitwise(
    tree: StaticTree | None, temperature: float, drafter: MedusaDrafter
) -> None:
    drafter = make_medusa(TreePolicy(tree=tree), drafter.heads._kernels)
    prompts = {0: random_tokens(14), 1: random_tokens(9, seed=1), 2: random_tokens(23, seed=2)}
    shapes = {0: SHAPE, 1: TreeShape(5, 2, 2), 2: TreeShape(1, 0, 1)}
    bench = bench_for(drafter)
    for id, tokens in prompts.items():
        fill(bench, tokens, id=id, temperature=temperature)
    trees = bench.draft(shapes)
    for id, tokens in prompts.items():
        alone = bench_for(drafter)
        fill(alone, tokens, id=id, temperature=temperature)
        assert same(trees[id], alone.draft({id: shapes[id]})[id])


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(save_tiny_llama(tmp_path_factory.mktemp("target"), layers=3), dtype="float32")


@pytest.mark.parametrize("params", [{}, {"temperature": 0.9, "seed": 3}, {"temperature": 0.7, "presence_penalty": 0.5}])
@pytest.mark.parametrize("tree", TREES, ids=["dynamic", "static"])
def test_the_text_is_that_of_plain_decoding(
    tmp_path: Path, target: LoadedModel, tree: StaticTree | None, params: dict[str, float]
) -> None:
    drafter = load_drafter(save_random_medusa(tmp_path / "heads", target), target, tree=tree)
    prompt, settings = prompt_of(19), {"seed": 1, **params, "max_tokens": 24, "ignore_eos": True}
    plain = complete(engine_for(target), prompt, **settings)
    found = complete(engine_for(target, drafter, shape=TreeShape(12, 4, 3)), prompt, **settings)
    assert found.outputs[0].token_ids == plain.outputs[0].token_ids
    assert found.outputs[0].stats.drafted > 0


def test_heads_load_by_their_folder_and_know_their_target(tmp_path: Path, target: LoadedModel) -> None:
    folder = save_random_medusa(tmp_path / "heads", target)
    drafter = load_drafter(folder, target)
    assert isinstance(drafter, MedusaDrafter) and drafter.taps == (-1,)
    other = load_model(save_tiny_llama(tmp_path / "other", seed=1, layers=3), dtype="float32")
    with pytest.raises(AlulaError, match="weights"):
        load_drafter(folder, other, allow_unverified=True)
    (folder / "provenance.json").unlink()
    with pytest.raises(AlulaError, match=r"provenance\.json"):
        load_drafter(folder, target)
    assert load_drafter(folder, target, allow_unverified=True).name == "medusa"


def edit(folder: Path, **changes: object) -> None:
    values = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"medusa_num_heads": 4}, r"3\.0\.linear\.weight"),
        ({"medusa_num_heads": 2}, r"2\.0\.linear"),
        ({"medusa_num_layers": 0}, "medusa_num_layers"),
        ({"hidden_size": 12}, "hidden_size"),
        ({"vocab_size": 12}, "vocab_size"),
        ({"medusa_choices": 1}, "medusa_choices"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    tmp_path: Path, target: LoadedModel, changes: dict[str, object], named: str
) -> None:
    folder = save_random_medusa(tmp_path / "heads", target)
    edit(folder, **changes)
    with pytest.raises(AlulaError, match=named):
        load_drafter(folder, target)


def test_tensors_are_checked_one_by_one() -> None:
    good = random_weights()
    check_medusa(CONFIG, good)
    name = "1.0.linear.bias"
    for bad, said in (
        ({k: v for k, v in good.items() if k != name}, "lack"),
        (good | {"head.weight": good[name]}, "unknown"),
        (good | {name: good[name][:-1]}, "shape"),
        (good | {name: good[name].to(torch.int8)}, "int8"),
        (good | {"0.2.weight": torch.zeros(VOCAB, TARGET_HIDDEN)}, r"1\.2\.weight"),
    ):
        with pytest.raises(AlulaError, match=said):
            check_medusa(CONFIG, bad)


@pytest.mark.parametrize("file", ["medusa_lm_head.safetensors", "medusa_lm_head.pt"])
def test_the_public_file_names_are_read_with_and_without_prefix(tmp_path: Path, file: str) -> None:
    save_medusa(tmp_path / "heads", CONFIG, random_weights(), None)
    stored = load_file(tmp_path / "heads" / "model.safetensors")
    assert all(name.startswith("medusa_head.") for name in stored)
    bare = {name.removeprefix("medusa_head."): tensor for name, tensor in stored.items()}
    (tmp_path / "heads" / "model.safetensors").unlink()
    path = tmp_path / "heads" / file
    torch.save(bare, path) if path.suffix == ".pt" else save_file(bare, path)
    found = read_medusa(tmp_path / "heads", hidden_size=TARGET_HIDDEN, vocab_size=VOCAB)
    assert found.config == CONFIG
    assert all(torch.equal(found.weights[name], tensor.bfloat16()) for name, tensor in random_weights().items())


def test_heads_with_lm_heads_of_their_own_use_them(tmp_path: Path, target: LoadedModel) -> None:
    config = MedusaConfig(2, 1, target.config.hidden_size, target.config.vocab_size)
    weights = random_weights(config, own=True)
    save_medusa(tmp_path / "own", config, weights, None)
    heads = load_medusa(tmp_path / "own", target, TreePolicy(), allow_unverified=True).heads
    feature_BD = torch.randn(3, config.hidden_size)
    weight, bias = weights["1.0.linear.weight"].bfloat16().float(), weights["1.0.linear.bias"].bfloat16().float()
    state_BD = feature_BD + torch.nn.functional.silu(feature_BD @ weight.T + bias)
    torch.testing.assert_close(
        heads.logits(feature_BD, 1), state_BD @ weights["1.1.weight"].bfloat16().float().T, rtol=1e-4, atol=1e-3
    )
