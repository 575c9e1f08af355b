"""Parts of replies that completions and chat have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from alula.engine.request import RequestOutput
from alula.sequence import FinishReason, StepTrace, TokenLogprobs
from alula.server.chunks import Chunk
from alula.text import Detokenizer, Tokenizer


def usage(prompt_tokens: int, completion_tokens: int, outputs: Iterable[RequestOutput] | None = None) -> dict[str, Any]:
    """OpenAI's usage object; its details once the outputs are complete."""
    found: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    if outputs is not None:
        outputs = list(outputs)
        stats = [sample.stats for output in outputs for sample in output.outputs]
        accepted = sum(each.accepted for each in stats)
        found["prompt_tokens_details"] = {"cached_tokens": sum(output.cached_tokens for output in outputs)}
        found["completion_tokens_details"] = {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(each.drafted for each in stats) - accepted,
        }
    return found


def spelled(tokenizer: Tokenizer, token: int) -> str:
    """A token as text; bytes that are no text on their own as OpenAI writes them."""
    data = tokenizer.token_bytes(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(tokenizer: Tokenizer, chunk: Chunk) -> dict[str, Any] | None:
    """`logprobs` of a chat choice."""
    if chunk.logprobs is None:
        return None

    def entry(token: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token)
        return {"token": spelled(tokenizer, token), "logprob": _finite(logprob), "bytes": list(data)}

    content = [
        entry(each.token, each.logprob) | {"top_logprobs": [entry(token, logprob) for token, logprob in each.top]}
        for each in chunk.logprobs
    ]
    return {"content": content, "refusal": None}


def text_logprobs(tokenizer: Tokenizer, chunk: Chunk, shift: int = 0) -> dict[str, Any] | None:
    """`logprobs` of a completions choice. shift: characters of an echoed prompt before the text."""
    if chunk.logprobs is None:
        return None
    starts = (chunk.start, *chunk.ends[:-1])
    return _columns(tokenizer, chunk.logprobs, [shift + start for start in starts])


def prompt_text_logprobs(
    tokenizer: Tokenizer, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
) -> dict[str, Any]:
    """The same for the tokens of an echoed prompt, the first of which has none."""
    detokenizer, starts, end = Detokenizer(tokenizer, skip_special_tokens=False), list[int](), 0
    for token in tokens:
        starts.append(end)
        end += len(detokenizer.step(token))
    found = _columns(tokenizer, [entry for entry in logprobs if entry is not None], starts)
    for name, first in (("tokens", spelled(tokenizer, tokens[0])), ("token_logprobs", None), ("top_logprobs", None)):
        found[name].insert(0, first)
    return found


def joined_logprobs(first: dict[str, Any] | None, second: dict[str, Any] | None) -> dict[str, Any] | None:
    if first is None or second is None:
        return first or second
    return {name: [*first[name], *second[name]] for name in first}


def speculation(tokenizer: Tokenizer, chunk: Chunk) -> dict[str, Any]:
    """`speculation` of a choice: where its tokens come from, and the steps that begin in it; {} unless asked for."""
    if not chunk.origins:
        return {}
    starts = (chunk.start, *chunk.ends[:-1])
    ends = (*chunk.ends[:-1], chunk.start + len(chunk.text))  # what is left at an output's end is its last token's
    tokens = [
        {
            "id": token,
            "text": chunk.text[start - chunk.start : end - chunk.start],
            "step": origin.trace.step,
            "drafted": origin.drafted,
        }
        for token, origin, start, end in zip(chunk.tokens, chunk.origins, starts, ends, strict=True)
    ]
    steps = [_step(tokenizer, origin.trace) for origin in chunk.origins if origin.place == 0]
    return {"speculation": {"tokens": tokens, "steps": steps}}


def _step(tokenizer: Tokenizer, trace: StepTrace) -> dict[str, Any]:
    depths: list[int] = []
    for parent in trace.parents:
        depths.append(depths[parent] + 1 if depths else 0)
    return {
        "step": trace.step,
        "committed": trace.committed,
        "checked": trace.checked,
        "path": list(trace.path),
        "tree": {
            "tokens": list(trace.tokens),
            "texts": [spelled(tokenizer, token) for token in trace.tokens],
            "parents": list(trace.parents),
            "depths": depths,
            "scores": [round(_finite(score), 4) for score in trace.scores],
        },
    }


def prompt_logprobs(tokenizer: Tokenizer, output: RequestOutput) -> list[dict[str, Any] | None] | None:
    """vLLM's `prompt_logprobs`: per token, the reported ids with their logprobs."""
    if output.prompt_logprobs is None:
        return None
    return [None if entry is None else _ranked(tokenizer, entry) for entry in output.prompt_logprobs]


def finish_reason(chunk: Chunk) -> str | None:
    return None if chunk.finish_reason is None else chunk.finish_reason.value


def failed(chunk: Chunk) -> bool:
    return chunk.finish_reason is FinishReason.ERROR


def _ranked(tokenizer: Tokenizer, entry: TokenLogprobs) -> dict[str, Any]:
    ranks = {token: rank for rank, (token, _) in enumerate(entry.top, start=1)} | {entry.token: entry.rank}
    values = dict(entry.top) | {entry.token: entry.logprob}
    return {
        str(token): {"logprob": _finite(values[token]), "rank": rank, "decoded_token": spelled(tokenizer, token)}
        for token, rank in ranks.items()
    }


def _columns(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprobs], starts: Sequence[int]) -> dict[str, Any]:
    return {
        "tokens": [spelled(tokenizer, entry.token) for entry in logprobs],
        "token_logprobs": [_finite(entry.logprob) for entry in logprobs],
        "top_logprobs": [
            {
                spelled(tokenizer, token): _finite(logprob)
                for token, logprob in (*entry.top, (entry.token, entry.logprob))
            }
            for entry in logprobs
        ],
        "text_offset": list(starts),
    }


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes -9999 for what cannot be."""
    return max(logprob, -9999.0)
