"""Faults that users of other engines reported, as trials for verification; each is named after its entry."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from alula.sampling.distribution import probabilities
from alula.sampling.noise import Stream, draw_bits, row_keys, steps, to_unit, uniform
from alula.sampling.processors import Context
from alula.sampling.proposal import proposal_log_q, sample_children
from alula.sequence import SamplingParams
from alula.sequence import Sequence as TokenSequence
from alula.tree import DraftTree
from alula.verify import coupled, rejection
from alula.verify.rejection import accept_sampled, draw
from tests.verify import toys

TRIALS = 131_072
BOTH = pytest.mark.parametrize("verify", [coupled.verify, rejection.verify], ids=["coupled", "rejection"])


@pytest.mark.parametrize("size", [3, 8])
def test_a1_output_law_at_every_depth_and_independent_streams(size: int) -> None:
    """Fixed p and q, a chain of three drawn tokens, and the verdict's steps over all trials at once."""
    rng = np.random.default_rng(size)
    p_V = np.array([0.10, 0.60, 0.30]) if size == 3 else rng.dirichlet(np.ones(size))
    q = torch.from_numpy(rng.dirichlet(np.ones(size))).float()
    seeds = np.arange(TRIALS)
    params = SamplingParams(temperature=1.0)
    contexts = [Context(TokenSequence(0, 1, [0], params, seed)) for seed in seeds.tolist()]
    for depth in range(3):
        columns, q_BV = sample_children(q.log().expand(TRIALS, size), 1, contexts, np.full(TRIALS, depth))
        accept = uniform(Stream.ACCEPT, seeds, 0, 0, depth + 1)
        target = np.tile(p_V, (TRIALS, 1))
        which = accept_sampled(target, columns, accept[:, None], list(q_BV.double().numpy()))
        drawn = draw(target, uniform(Stream.RESIDUAL, seeds, 0, 0, depth))
        p = toys.p_value(np.where(which == 0, columns[:, 0], drawn), p_V)
        noise = to_unit(draw_bits(row_keys(Stream.DRAFT, seeds, 0, 0, depth), steps(1)))
        correlation = float(np.corrcoef(accept, noise)[0, 1])
        print(f"a1, {size} tokens, depth {depth + 1}: p = {p:.4f}, correlation {correlation:+.4f}")
        assert p > 1e-4 and abs(correlation) < 5 / math.sqrt(TRIALS)


def test_a3_bf16_logits_are_drawn_from_the_q_that_is_judged() -> None:
    """Near ties in bf16: the q in the tree is the one the children came from, to the last bit."""
    logits = (torch.tensor([[1.0, 1.004, 1.008, 1.012]]) + torch.zeros(4, 1)).bfloat16()
    target = toys.table(4, 4)
    params = SamplingParams(temperature=1.0)
    rows = toys.sequences(params, range(5000))
    drafter = toys.Drafter(logits, toys.PAIR, "sampled")
    first = drafter.draft(rows[:1])[0]
    wanted = torch.from_numpy(np.exp(proposal_log_q(logits[:1], [Context(rows[0])])[0].numpy()))
    assert torch.equal(first.proposals[0], wanted)
    out = toys.generate(rejection.verify, target, rows, drafter.draft, 2)
    p = toys.p_value(toys.codes(out, 4), toys.joint_law(probabilities(target.numpy(), [params] * 4), 0, 2))
    print(f"a3: p = {p:.4f}")
    assert p > 1e-4


@BOTH
def test_a7_seeds_matter_above_temperature_0_and_only_there(verify: toys.Verify) -> None:
    target = toys.table(50, 0, 0.5)

    def texts(**params: Any) -> set[tuple[int, ...]]:
        rows = toys.sequences(SamplingParams(**params), range(10))
        return set(map(tuple, toys.generate(verify, target, rows, toys.plain, 10).tolist()))

    assert len(texts(temperature=1.0)) == 10
    assert len(texts()) == 1


def test_a9_penalties_at_low_temperature_with_and_without_speculation() -> None:
    """200 prompts of their own, batches of all, a drafter that is right about half of the time."""
    target = toys.table(64, 3)
    params = SamplingParams(temperature=0.1, top_p=0.1, repetition_penalty=1.05)

    def rows() -> list[TokenSequence]:
        prompts = np.random.default_rng(0).integers(0, 64, (200, 6)).tolist()
        return [TokenSequence(i, 6, prompt, params, seed=1) for i, prompt in enumerate(prompts)]

    drafter = toys.Drafter(target + 1.5 * toys.table(64, 9), toys.BUSHY, "coupled")
    plain = toys.generate(coupled.verify, target, rows(), toys.plain, 12)
    assert np.array_equal(toys.generate(coupled.verify, target, rows(), drafter.draft, 12), plain)
    without = SamplingParams(temperature=0.1, top_p=0.1)
    unpenalised = [TokenSequence(i, 6, row.tokens[:6], without, seed=1) for i, row in enumerate(rows())]
    assert not np.array_equal(toys.generate(coupled.verify, target, unpenalised, toys.plain, 12), plain)


def accepted_run(**params: Any) -> tuple[list[int], list[int]]:
    """Output of 24 tokens with a drafter that is always right, and without one; runs of 4 are committed at once."""
    target = toys.table(6, 2, 0.5)
    target[:, 5] += 3  # the end-of-text token is what the model wants to say
    outs = []
    for draft in (toys.Drafter(target, toys.CHAIN_3, "coupled").draft, toys.plain):
        row = TokenSequence(0, 2, [0, 1], SamplingParams(**params), 5, eos_ids=frozenset({5}))
        outs.append(toys.generate(coupled.verify, target, [row], draft, 24)[0].tolist())
    return outs[0], outs[1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_b2_penalties_count_every_token_of_a_run_and_min_tokens_end_exactly(temperature: float) -> None:
    drafted, plain = accepted_run(temperature=temperature, frequency_penalty=0.5, min_tokens=20)
    assert drafted == plain
    assert 5 not in drafted[:20] and drafted[20] == 5


@BOTH
def test_b4_mixed_batches_are_as_their_members_alone(verify: toys.Verify) -> None:
    """With and without penalties, greedy and not, trees of different sizes."""
    choices = [
        SamplingParams(),
        SamplingParams(temperature=1.0, frequency_penalty=1.0),
        SamplingParams(temperature=0.7, top_k=4, logprobs=2),
        SamplingParams(repetition_penalty=1.3, logprobs=1),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, top_p=0.7, min_p=0.1, logprobs=1, logprobs_mode="processed"),
    ]
    rng = np.random.default_rng(0)
    rows = [TokenSequence(i, 2, rng.integers(0, 30, 5).tolist(), choices[i % 6], 40 + i) for i in range(24)]
    trees = []
    for i, row in enumerate(rows):
        parents = [-1, *(int(rng.integers(0, n)) for n in range(1, 1 + i % 7))]
        tokens = np.array([row.tokens[-1], *rng.integers(0, 3, len(parents) - 1)])
        trees.append(DraftTree(tokens, np.array(parents), np.zeros(len(parents), np.float32)))
    target = toys.table(30, 6)
    target[:, :3] += 4
    together = toys.one_step(verify, target, rows, trees)
    assert sum(len(v.path) for v in together) > 10
    for row, tree, verdict in zip(rows, trees, together, strict=True):
        assert toys.one_step(verify, target, [row], [tree]) == [verdict]


@BOTH
def test_b6_bias_and_min_p_hold_for_every_token_of_a_run(verify: toys.Verify) -> None:
    target = toys.table(5, 8, 0.7)
    banned = 2
    params = SamplingParams(temperature=1.0, min_p=0.1, logit_bias={banned: -100.0})
    shaped = target.clone()
    shaped[:, banned] -= 100
    rows = toys.sequences(params, range(3000))
    out = toys.generate(verify, target, rows, toys.Drafter(target, toys.BUSHY, "top").draft, 3)
    assert banned not in out
    p = toys.p_value(toys.codes(out, 5), toys.joint_law(probabilities(shaped.numpy(), [params] * 5), 0, 3))
    print(f"b6: p = {p:.4f}")
    assert p > 1e-4


def test_b10_bad_words_across_the_edge_of_a_draft() -> None:
    """The model wants 1 2 1 2 ...; the word 1 2 is banned, whether 1 is committed, drafted, or both are drafted."""
    target = torch.zeros(4, 4)
    target[0, 1] = target[1, 2] = target[2, 1] = 5.0
    target[:, 3] += 2
    params = SamplingParams(bad_words=("x",))
    for chain in ([0], [0, 1], [0, 1, 2], [0, 1, 2, 1]):
        row = TokenSequence(0, 1, [0], params, 1, bad_words=((1, 2),))
        tree = DraftTree(np.array(chain), np.arange(-1, len(chain) - 1), np.zeros(len(chain), np.float32))
        verdict = toys.one_step(coupled.verify, target, [row], [tree])[0]
        assert verdict.tokens == ((1,) if len(chain) == 1 else (1, 3))
    row = TokenSequence(0, 1, [0, 1], params, 1, bad_words=((1, 2),))
    assert toys.one_step(coupled.verify, target, [row], [DraftTree.root_only(1)])[0].tokens == (3,)


@pytest.mark.parametrize("mode", ["raw", "processed"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_c1_logprobs_of_accepted_tokens_equal_plain_ones(temperature: float, mode: str) -> None:
    target = toys.table(20, 4)
    params = SamplingParams(temperature=temperature, logprobs=2, logprobs_mode=mode, top_k=7, presence_penalty=0.3)
    found = []
    for draft in (toys.Drafter(target, toys.BUSHY, "coupled").draft, toys.plain):
        row, reports = TokenSequence(0, 1, [0], params, 3), []
        while len(reports) < 16:
            verdict = toys.one_step(coupled.verify, target, [row], draft([row]))[0]
            assert verdict.logprobs is not None and len(verdict.logprobs) == len(verdict.tokens)
            assert [report.token for report in verdict.logprobs] == list(verdict.tokens)
            reports.extend(verdict.logprobs)
            row.tokens.extend(verdict.tokens)
        found.append(reports[:16])
    assert found[0] == found[1]
    assert all(report.logprob < 0 for report in found[0])


@BOTH
def test_c3_logprobs_come_from_each_sequences_own_rows(verify: toys.Verify) -> None:
    """Three sequences with 0, 1 and 3 accepted tokens."""
    target = toys.table(9, 5)
    best = target.argmax(-1).tolist()
    chain = [0]
    for _ in range(3):
        chain.append(best[chain[-1]])
    wrong = (chain[1] + 1) % 9, (chain[2] + 1) % 9
    tokens = [[0, wrong[0], 1, 1], [0, chain[1], wrong[1], 1], chain]
    trees = [DraftTree(np.array(t), np.arange(-1, 3), np.zeros(4, np.float32)) for t in tokens]
    rows = toys.sequences(SamplingParams(logprobs=2), range(3))
    verdicts = toys.one_step(verify, target, rows, trees)
    assert [len(verdict.path) for verdict in verdicts] == [0, 1, 3]
    wanted = target.double().log_softmax(-1)
    for verdict in verdicts:
        assert verdict.logprobs is not None
        for last, report in zip((0, *verdict.tokens), verdict.logprobs, strict=False):
            assert report.logprob == pytest.approx(float(wanted[last, report.token]), abs=1e-6)
            assert [i for i, _ in report.top] == target[last].topk(2).indices.tolist()


def test_c7_raw_logprobs_ignore_what_shaped_the_choice() -> None:
    target = toys.table(9, 5)
    params: dict[str, Any] = {"temperature": 0.3, "top_k": 2, "logit_bias": {4: 30.0}, "logprobs": 0}
    for mode, wanted in (("raw", float(target[0].log_softmax(-1)[4])), ("processed", 0.0)):
        rows = toys.sequences(SamplingParams(**params, logprobs_mode=mode), [1])
        verdict = toys.one_step(coupled.verify, target, rows, toys.plain(rows))[0]
        assert verdict.tokens == (4,) and verdict.logprobs is not None
        assert verdict.logprobs[0].logprob == pytest.approx(wanted, abs=1e-5)
