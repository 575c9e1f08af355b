"""The vectorised training-time test against the serving recurrence, one chain and one step at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from alula.train.checkpoint import serving_config
from alula.train.eagle1_head import Eagle1Head
from alula.train.head import ChainHead, Chains, Eagle3Head, rope, unroll
from tests.draft.dense import DenseHead
from tests.train.support import HIDDEN, SIZES, VOCAB, FakeTarget, batch, conversations, random_head

STEPS = 4


def serve(head: Eagle3Head, tokens: Tensor, features: Tensor, start: int, steps: int) -> list[Tensor]:
    """What a drafter computes for one path: a prefill of the true pairs, then one new entry per step."""
    config, layer = SIZES, head.midlayer
    keys: list[Tensor] = []
    values: list[Tensor] = []
    outputs: list[Tensor] = []
    hidden = torch.zeros(HIDDEN)
    for position in range(start + steps):
        own = position > start
        hidden = hidden if own else head.fc(features[position])
        embedded = F.rms_norm(head.embedding_VD[tokens[position]], (HIDDEN,), layer.input_layernorm.weight, 1e-5)
        both = torch.cat([embedded, F.rms_norm(hidden, (HIDDEN,), layer.hidden_norm.weight, 1e-5)])
        place = torch.tensor(position)
        query = rope(layer.self_attn.q_proj(both).view(config.heads, -1), place, config.rope_theta)
        keys.append(rope(layer.self_attn.k_proj(both).view(config.kv_heads, -1), place, config.rope_theta))
        values.append(layer.self_attn.v_proj(both).view(config.kv_heads, -1))
        mixed = []
        for index in range(config.heads):
            group = index * config.kv_heads // config.heads
            scores = torch.stack([query[index] @ key[group] for key in keys]) / config.head_dim**0.5
            mixed.append(scores.softmax(0) @ torch.stack([value[group] for value in values]))
        after = hidden + layer.self_attn.o_proj(torch.cat(mixed))
        normed = F.rms_norm(after, (HIDDEN,), layer.post_attention_layernorm.weight, 1e-5)
        output = after + layer.mlp(normed)
        if position >= start:
            outputs.append(output)
            hidden = output
    return outputs


def test_every_chain_equals_the_serving_recurrence() -> None:
    target = FakeTarget()
    head = random_head(target)
    chains = batch(target, conversations(3)).chains
    with torch.no_grad():
        unrolled = unroll(head, chains, steps=STEPS)
        for text in range(3):
            for column, start in enumerate(chains.starts_BA[text].tolist()):
                steps = min(STEPS, chains.tokens_BS.shape[1] - start)
                served = serve(head, chains.tokens_BS[text], chains.features_BSF[text], start, steps)
                for step, expected in enumerate(served):
                    torch.testing.assert_close(unrolled[step].hidden_BAD[text, column], expected, atol=2e-5, rtol=1e-4)


def test_a_subset_of_chains_gives_the_same_rows() -> None:
    target = FakeTarget()
    head = random_head(target)
    chains = batch(target, conversations(3)).chains
    kept = torch.tensor([0, 2])
    with torch.no_grad():
        whole = unroll(head, chains, steps=STEPS)
        some = unroll(head, chains, steps=STEPS, kept_A=kept)
    assert torch.equal(whole[0].hidden_BAD, some[0].hidden_BAD)
    for full, part in zip(whole[1:], some[1:], strict=True):
        torch.testing.assert_close(full.hidden_BAD[:, kept], part.hidden_BAD)
        assert part.columns_A.tolist() == [0, 2]


def test_a_chain_sees_nothing_after_its_start_but_its_own_tokens() -> None:
    """Later features must not leak: they do not exist in service."""
    target = FakeTarget()
    head = random_head(target)
    tokens = torch.randint(0, VOCAB, (1, 9))
    features = torch.randn(1, 9, 3 * HIDDEN)
    changed = features.clone()
    changed[:, 4:] += 1.0
    starts = torch.tensor([[3]])
    with torch.no_grad():
        before = unroll(head, Chains(tokens, features, starts), steps=STEPS)
        after = unroll(head, Chains(tokens, changed, starts), steps=STEPS)
    for one, other in zip(before, after, strict=True):
        assert torch.equal(one.hidden_BAD, other.hidden_BAD)


def _served_head(name: str) -> tuple[ChainHead, DenseHead]:
    """A head of random weights in training, and the same one as it is served."""
    target = FakeTarget()
    torch.manual_seed(4)
    if name == "eagle1":
        config = replace(SIZES, taps=(-1,), draft_vocab_size=VOCAB)
        head: Eagle1Head | Eagle3Head = Eagle1Head(config, target)
        head.input_scale_I.uniform_(0.5, 2.0)
    else:
        flags = {} if name == "eagle3" else {name: True}
        head = Eagle3Head(replace(SIZES, **flags), target.embedding_VD)
        head.tap_scale_F.uniform_(0.5, 2.0)
    with torch.no_grad():
        for part, parameter in head.named_parameters():
            if "norm" in part:
                parameter.uniform_(0.5, 1.5)
    serving = serving_config(head.config, "eagle1" if name == "eagle1" else "eagle3")
    return head, DenseHead(serving, head.official_weights(), target.embedding_VD, target.lm_head_VD)


@pytest.mark.parametrize("name", ["eagle1", "eagle3", "fc_norm", "norm_output"])
def test_every_step_says_what_the_served_head_says(name: str) -> None:
    """Of every kind and flag, from the exported tensors: log q along the true tokens of a chain."""
    head, dense = _served_head(name)
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(0, VOCAB, (10,), generator=generator)
    features = torch.randn(1, 9, len(head.config.taps) * HIDDEN, generator=generator)
    starts = torch.tensor([[2, 5]])
    with torch.no_grad():
        steps = unroll(head, Chains(text[None, 1:], features, starts), steps=3)
        for step, result in enumerate(steps):
            for column, start in enumerate(starts[0].tolist()):
                tokens = text[: start + 2].tolist()
                path = text[start + 2 : start + 2 + step].tolist()
                served = dense.after(tokens, features[0, : start + 1], path)
                found = head.logits(head.readout(result.hidden_BAD[0, column])).log_softmax(-1)
                torch.testing.assert_close(found, served[: len(found)], atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("shift", [1, 5])
def test_rope_depends_on_distance_only(shift: int) -> None:
    query, key = torch.randn(2, 1, 8)
    score = rope(query, torch.tensor(4), 1e4) @ rope(key, torch.tensor(1), 1e4).T
    moved = rope(query, torch.tensor(4 + shift), 1e4) @ rope(key, torch.tensor(1 + shift), 1e4).T
    torch.testing.assert_close(score, moved)
