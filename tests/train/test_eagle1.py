"""What is particular to EAGLE-1/2 training: noise on the features, what is regressed, what a head reads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from alula.config import AlulaError
from alula.train.batch import Batch
from alula.train.eagle1_head import Eagle1Head, Inputs, new_eagle1_head
from alula.train.head import Chains, unroll
from alula.train.methods.eagle1 import Eagle1Method
from alula.train.methods.options import Eagle1Options
from tests.train.support import HIDDEN, SIZES, VOCAB, FakeTarget, batch, conversations

CONFIG = replace(SIZES, taps=(-1,), draft_vocab_size=VOCAB)


def final_batch(count: int = 5, seed: int = 1) -> Batch:
    """With the LM head's inputs as features."""
    target, chosen = FakeTarget(), conversations(count, seed=seed)
    packed = batch(target, chosen)
    features = torch.zeros(*packed.chains.tokens_BS.shape, HIDDEN)
    for row, conversation in enumerate(chosen):
        _, hidden = target.states([conversation.tokens], ())[0]
        features[row, : len(hidden) - 1] = hidden[:-1]
    return replace(packed, chains=Chains(packed.chains.tokens_BS, features, packed.chains.starts_BA))


def method(options: Eagle1Options, inputs: Inputs = "advanced") -> Eagle1Method:
    torch.manual_seed(2)
    return Eagle1Method(options, Eagle1Head(CONFIG, FakeTarget(), inputs))


def values(made: Eagle1Method, packed: Batch, seed: int) -> list[float]:
    return [loss.value.item() for loss in made.losses(packed, torch.Generator().manual_seed(seed))]


def test_noise_is_drawn_anew_from_the_generator_and_bounded() -> None:
    packed, noisy = final_batch(), method(Eagle1Options(noise=0.1))
    assert values(noisy, packed, 1) == values(noisy, packed, 1) != values(noisy, packed, 2)
    silent = method(Eagle1Options(noise=0.0))
    assert values(silent, packed, 1) == values(silent, packed, 2)
    moved = noisy._noisy(packed.chains, torch.Generator().manual_seed(0)).features_BSF - packed.chains.features_BSF
    assert 0.09 < moved.abs().max() <= 0.1 + 1e-6
    assert abs(moved.mean()) < 0.01


def test_the_losses_are_the_papers() -> None:
    """SmoothL1 to the feature one on, and cross-entropy of the two features' distributions; weights 1 and lambda."""
    packed, made = final_batch(), method(Eagle1Options(noise=0.0, classification=0.3))
    (step,) = unroll(made.head, packed.chains, steps=1)
    flat, index = packed.rows(0, step.columns_A)
    found, wanted = step.hidden_BAD.flatten(0, 1)[flat], packed.hidden_MD[index]
    off = (found - wanted).abs()
    smooth = torch.where(off < 1, 0.5 * off.square(), off - 0.5).mean()
    lm_head = FakeTarget().lm_head_VD
    entropy = -((wanted @ lm_head.T).softmax(-1) * (found @ lm_head.T).log_softmax(-1)).sum(-1).mean()
    regression, classification = made.losses(packed, torch.Generator())
    torch.testing.assert_close(regression.value, smooth)
    torch.testing.assert_close(classification.value, entropy)
    assert (regression.weight, classification.weight) == (1.0, 0.3)


@pytest.mark.parametrize(
    ("inputs", "feature", "before", "after"),
    [
        ("advanced", True, False, True),
        ("unshifted", True, True, False),
        ("feature", True, False, False),
        ("token", False, False, True),
    ],
)
def test_a_head_reads_what_its_name_says(inputs: Inputs, feature: bool, before: bool, after: bool) -> None:
    """Changing the feature at a chain's start, its own token or the one after it moves the state if it is read."""
    head = method(Eagle1Options(), inputs).head
    packed = final_batch(1)
    start = int(packed.chains.starts_BA[0, 0])

    def state(changed: Batch) -> torch.Tensor:
        with torch.no_grad():
            return unroll(head, head.chains(changed), steps=1)[0].hidden_BAD[0, 0]

    def with_token(place: int) -> Batch:
        texts = packed.texts_BX.clone()
        texts[0, place] = (texts[0, place] + 1) % VOCAB
        return replace(packed, texts_BX=texts, chains=replace(packed.chains, tokens_BS=texts[:, 1:]))

    shifted = packed.chains.features_BSF.clone()
    shifted[0, start] += 1
    moved = replace(packed, chains=replace(packed.chains, features_BSF=shifted))
    original = state(packed)
    found = [not torch.equal(state(changed), original) for changed in (moved, with_token(start), with_token(start + 1))]
    # A token that stands before the start is the one after the feature before it, which attention sees too.
    assert found[0] == feature and found[2] == after
    if not (before or after):
        assert not found[1]
    if inputs == "unshifted":
        assert found[1]


def test_a_head_that_cannot_be_served_is_not_exported(tmp_path: object) -> None:
    with pytest.raises(AlulaError, match="inputs is 'token'"):
        method(Eagle1Options(), "token").export(tmp_path, None)  # type: ignore[arg-type]


def test_the_fitted_start_is_nearer_than_a_random_one() -> None:
    target, samples = FakeTarget(), [final_batch(300)]
    held, exact = final_batch(30, seed=9), Eagle1Options(noise=0.0)
    fitted = Eagle1Method(exact, new_eagle1_head(CONFIG, target, samples, seed=0))
    assert values(fitted, held, 0)[0] < 0.3 * values(method(exact), held, 0)[0]
