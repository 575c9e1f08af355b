"""Sampling parameters, logprobs and text under speculation: faults reported of other engines (A9 to C5)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from alula.engine.request import Request, RequestOutput
from alula.model.load import LoadedModel, load_model
from alula.sequence import SamplingParams
from alula.tree import TreeShape
from tests.engine.guesses import Guesser, Script, spoiled_at, spoiled_by_turns, truly
from tests.engine.tiny import EOS, engine_for, prompt_of, run

SHAPE = TreeShape(nodes=6, depth=5, branch=1)


def _requests(count: int, **params: object) -> list[Request]:
    wanted = SamplingParams(**({"max_tokens": 24, "ignore_eos": True} | params))  # type: ignore[arg-type]
    return [Request(tuple(prompt_of(5 + number % 9, seed=number)), wanted) for number in range(count)]


def _both(
    model: LoadedModel, requests: list[Request], script: Script = truly, least_tau: float = 1.5
) -> tuple[list[RequestOutput], list[RequestOutput]]:
    """Outputs of plain decoding, one request after the other, and of speculation in one batch."""
    plain = [run(engine_for(model), [request])[0] for request in requests]
    engine = engine_for(model, Guesser(plain, script), shape=SHAPE, max_num_seqs=8)
    speculative = run(engine, requests)
    assert engine.totals.tau > least_tau, "nothing is tested without accepted tokens"
    return plain, speculative


def _ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [sample.token_ids for output in outputs for sample in output.outputs]


def _logprobs(outputs: list[RequestOutput]) -> list[object]:
    return [sample.logprobs for output in outputs for sample in output.outputs]


def test_a9_penalties_with_low_temperature_do_not_drift(tiny: LoadedModel) -> None:
    requests = _requests(24, temperature=0.1, top_p=0.1, repetition_penalty=1.05, seed=3)
    plain, speculative = _both(tiny, requests, spoiled_by_turns)
    assert _ids(speculative) == _ids(plain)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a11_batched_trees_equal_one_by_one(tiny_folder: Path, dtype: str, temperature: float) -> None:
    model = load_model(str(tiny_folder), dtype=dtype)
    plain, speculative = _both(model, _requests(8, temperature=temperature, seed=5), spoiled_by_turns)
    assert _ids(speculative) == _ids(plain)


def _reference_logits(folder: Path, output: RequestOutput) -> torch.Tensor:
    """Hugging Face's logits [output tokens, V] at the positions where the output's tokens were chosen."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.tensor([[*output.prompt_token_ids, *output.outputs[0].token_ids]])
    with torch.no_grad():
        return model(tokens).logits[0, len(output.prompt_token_ids) - 1 : -1]


def test_b2_penalties_count_every_token_of_an_accepted_run(tiny: LoadedModel, tiny_folder: Path) -> None:
    _, speculative = _both(tiny, _requests(3, frequency_penalty=0.5), least_tau=3)
    repeats = 0
    for output in speculative:
        counts = torch.zeros(tiny.config.vocab_size)
        tokens = output.outputs[0].token_ids
        for logits, token in zip(_reference_logits(tiny_folder, output), tokens, strict=True):
            assert token == (logits - 0.5 * counts).argmax()
            counts[token] += 1
        repeats += len(tokens) - len(set(tokens))
    assert repeats, "a penalty that meets no repetition tests nothing"


def test_b2_eos_is_unmasked_exactly_at_min_tokens(tiny: LoadedModel) -> None:
    requests = _requests(3, min_tokens=20, max_tokens=40, ignore_eos=False, logit_bias={EOS: 1000.0})
    plain, speculative = _both(tiny, requests, least_tau=3)
    assert _ids(speculative) == _ids(plain)
    for output in speculative:
        assert output.outputs[0].token_ids.index(EOS) == 20
        assert output.outputs[0].finish_reason == "stop"


def test_b4_parameters_stay_with_their_request_in_a_mixed_batch(tiny: LoadedModel) -> None:
    mixed = [
        {},
        {"frequency_penalty": 0.7},
        {"temperature": 0.8, "seed": 1, "top_k": 5},
        {"temperature": 1.2, "seed": 2, "presence_penalty": 1.0, "logit_bias": {65: 3.0}},
        {"repetition_penalty": 1.3, "logprobs": 3},
        {"temperature": 0.7, "seed": 3, "top_p": 0.8, "min_p": 0.02},
    ]
    requests = [request for params in mixed for request in _requests(2, **params)]
    distinct = [Request((*request.prompt_token_ids, number), request.params) for number, request in enumerate(requests)]
    plain, speculative = _both(tiny, distinct, spoiled_by_turns)
    assert _ids(speculative) == _ids(plain)
    assert _logprobs(speculative) == _logprobs(plain)


@pytest.mark.parametrize("penalty", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_b12_no_penalty_is_silently_ignored(tiny: LoadedModel, penalty: str) -> None:
    without, _ = _both(tiny, _requests(6))
    plain, speculative = _both(tiny, _requests(6, **{penalty: 1.9}))
    assert _ids(speculative) == _ids(plain)
    assert _ids(speculative) != _ids(without)


def test_c1_logprobs_of_accepted_tokens_are_the_models(tiny: LoadedModel, tiny_folder: Path) -> None:
    plain, speculative = _both(tiny, _requests(3, logprobs=2), least_tau=3)
    assert _logprobs(speculative) == _logprobs(plain)
    for output in speculative:
        sample = output.outputs[0]
        assert sample.logprobs is not None
        expected = _reference_logits(tiny_folder, output).log_softmax(-1)
        for row, entry, token in zip(expected, sample.logprobs, sample.token_ids, strict=True):
            assert (entry.token, entry.rank) == (token, 1)
            assert entry.logprob == pytest.approx(row[token].item(), abs=1e-4)
            assert [logprob for _, logprob in entry.top] == pytest.approx(row.topk(2).values.tolist(), abs=1e-4)


def test_c3_logprobs_follow_their_request_when_accepted_counts_differ(tiny: LoadedModel) -> None:
    def script(truth: list[int], item: object) -> list[int]:
        return spoiled_at(1 + 2 * (item.sequence.id % 3))(truth, item)  # type: ignore[attr-defined, arg-type]

    plain, speculative = _both(tiny, _requests(3, logprobs=2), script)
    assert _logprobs(speculative) == _logprobs(plain)
    accepted = [output.outputs[0].stats.tau for output in speculative]
    assert len({round(tau) for tau in accepted}) == 3


LETTERS = tuple(range(65, 91))


def _letters(model: LoadedModel, **params: object) -> tuple[Request, str]:
    """A request whose output is plain letters, and what plain decoding writes for it."""
    ids = tuple(model.tokenizer.encode("".join(map(chr, LETTERS))))
    request = _requests(1, allowed_token_ids=ids, max_tokens=30, **params)[0]
    return request, run(engine_for(model), [request])[0].outputs[0].text


def _with(request: Request, **params: object) -> Request:
    return Request(request.prompt_token_ids, replace(request.params, **params))  # type: ignore[arg-type]


def _stopped(model: LoadedModel, request: Request, depth: int) -> RequestOutput:
    """The request with accepted runs of `depth` tokens, over a plain run that ignores the stop string."""
    plain = run(engine_for(model), [_with(request, stop=())])
    engine = engine_for(model, Guesser(plain), shape=TreeShape(nodes=depth, depth=depth - 1, branch=1))
    output = run(engine, [request])[0]
    assert max(engine.totals.accepted_lengths) >= min(depth - 1, 3)
    return output


def test_c5_nothing_past_a_stop_string_is_returned(tiny: LoadedModel) -> None:
    request, text = _letters(tiny, temperature=1.0, seed=4, logprobs=2)
    for at in range(3, 12):
        stop = text[at : at + 4]
        end = text.index(stop) + 4
        sample = _stopped(tiny, _with(request, stop=(stop,)), depth=6).outputs[0]
        assert sample.text == text[: end - 4]
        assert len(sample.token_ids) == end
        assert sample.logprobs is not None
        assert [entry.token for entry in sample.logprobs] == sample.token_ids
        assert (sample.finish_reason, sample.stop_reason) == ("stop", stop)
        assert sample.stats.committed == end


@pytest.mark.parametrize("depth", [2, 3, 8])
@pytest.mark.parametrize("include", [True, False])
def test_d4_stop_strings_inside_and_across_accepted_runs(tiny: LoadedModel, depth: int, include: bool) -> None:
    """Runs of 8 tokens hold the stop string whole; those of 2 and 3 have it span two steps."""
    request, text = _letters(tiny, temperature=1.0, seed=9)
    for at in range(4, 10):
        stop = text[at : at + 3]
        end = text.index(stop) + 3
        stopping = _with(request, stop=(stop, "never this"), include_stop_str_in_output=include)
        sample = _stopped(tiny, stopping, depth).outputs[0]
        assert sample.text == text[: end if include else end - 3]
        assert sample.stop_reason == stop
