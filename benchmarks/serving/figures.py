"""What a run says: latencies, goodput, sameness of two runs, validity of JSON, flatness of a line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from client import Answer
from jsonschema import Draft202012Validator
from mix import Job

QUANTILES = (50, 95, 99)


@dataclass(frozen=True)
class Slo:
    """What a request must keep to be counted as good. A request of one token has no TPOT and cannot miss it."""

    ttft_s: float = 1.0
    tpot_s: float = 0.06

    def met(self, answer: Answer) -> bool:
        if answer.error is not None or answer.ttft_s is None or answer.ttft_s > self.ttft_s:
            return False
        return answer.tpot_s is None or answer.tpot_s <= self.tpot_s


def summary(answers: Sequence[Answer], seconds: float, slo: Slo) -> dict[str, Any]:
    """Of a run that took so many seconds. Quantiles are over requests."""
    good = sum(map(slo.met, answers))
    found = {
        "requests": len(answers),
        "failed": sum(answer.error is not None for answer in answers),
        "seconds": round(seconds, 3),
        "tokens": sum(answer.tokens for answer in answers),
        "tokens_per_s": round(sum(answer.tokens for answer in answers) / seconds, 2),
        "requests_per_s": round(len(answers) / seconds, 3),
        "ttft_s": _quantiles([answer.ttft_s for answer in answers if answer.ttft_s is not None]),
        "tpot_s": _quantiles([answer.tpot_s for answer in answers if answer.tpot_s is not None]),
    }
    return found | {"good": good, "goodput_per_s": round(good / seconds, 3)}


def _quantiles(values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return {f"p{percent}": None for percent in QUANTILES}
    return {f"p{percent}": round(float(np.percentile(values, percent)), 5) for percent in QUANTILES}


def compare(first: Sequence[Answer], second: Sequence[Answer]) -> dict[str, Any]:
    """Token ids and reasons of the end, sample by sample. A request is identical when all of its samples are."""
    differences = []
    for one, other in zip(first, second, strict=True):
        assert one.number == other.number
        differences += [{"request": one.number, **each} for each in _differences(one, other)]
    wrong = {each["request"] for each in differences}
    return {"requests": len(first), "identical": len(first) - len(wrong), "differences": differences}


def _differences(one: Answer, other: Answer) -> list[dict[str, Any]]:
    if one.error is not None or other.error is not None:
        return [{"error": one.error or other.error}]
    if one.choices.keys() != other.choices.keys() or not one.choices:
        return [{"samples": [len(one.choices), len(other.choices)]}]
    found = []
    for index in sorted(one.choices):
        left, right = one.choices[index], other.choices[index]
        if left.token_ids != right.token_ids:
            pairs = zip(left.token_ids, right.token_ids, strict=False)
            same = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
            place = min(len(left.token_ids), len(right.token_ids)) if same is None else same
            ids = [each.token_ids[place : place + 1] for each in (left, right)]
            found.append({"sample": index, "position": place, "tokens": ids})
        elif left.finish_reason != right.finish_reason or left.text != right.text:
            found.append({"sample": index, "ends": [left.finish_reason, right.finish_reason]})
    return found


def check_json(jobs: Sequence[Job], answers: Sequence[Answer]) -> dict[str, Any]:
    """Every answer that should be JSON and was not cut by its length is held against its schema."""
    found: dict[str, Any] = {"answers": 0, "valid": 0, "cut": 0, "invalid": []}
    for job, answer in zip(jobs, answers, strict=True):
        for index, choice in sorted(answer.choices.items()) if job.schema is not None else ():
            found["answers"] += 1
            if choice.finish_reason == "length":
                found["cut"] += 1
            elif (fault := _fault(choice.text, job.schema)) is None:
                found["valid"] += 1
            else:
                found["invalid"].append({"request": job.number, "sample": index, "fault": fault[:200]})
    return found


def _fault(text: str, schema: Mapping[str, Any] | None) -> str | None:
    try:
        error = next(iter(Draft202012Validator(schema or {}).iter_errors(json.loads(text))), None)
    except ValueError as fault:
        return str(fault)
    return None if error is None else error.message


@dataclass(frozen=True)
class Line:
    """A straight line through points. error: standard error of the slope. change: of the line over its points."""

    slope: float
    error: float
    mean: float
    change: float

    def flat(self, tolerance: float) -> bool:
        """Moves by no more than this, or by no more than chance would make of a level line (two standard errors)."""
        return abs(self.change) <= tolerance or abs(self.slope) <= 2 * self.error

    def report(self) -> dict[str, float]:
        return {name: round(value, 6) for name, value in vars(self).items()}


def fit(times: Sequence[float], values: Sequence[float]) -> Line:
    """Least squares. Raises ValueError for fewer than three points, or all at one time."""
    x, y = np.asarray(times, float), np.asarray(values, float)
    if len(x) < 3 or np.ptp(x) == 0:
        raise ValueError(f"{len(x)} points make no line: run for longer")
    spread = float(((x - x.mean()) ** 2).sum())
    slope = float(((x - x.mean()) * (y - y.mean())).sum()) / spread
    rest = y - y.mean() - slope * (x - x.mean())
    error = float(np.sqrt((rest**2).sum() / (len(x) - 2) / spread))
    return Line(slope, error, float(y.mean()), slope * float(np.ptp(x)))
