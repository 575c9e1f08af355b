"""What a run costs: memory that grows with what is held, and the rate over the run's own tokens."""

from __future__ import annotations

import time

import torch

from alula.train.meter import Meter, peak_memory

CPU = torch.device("cpu")


def test_peak_memory_is_of_bytes_and_knows_what_was_held() -> None:
    before = peak_memory(CPU)
    assert before > 30 * 2**20
    held = torch.ones(before // 4 + 16 * 2**20)  # as much again, and 64 MiB
    del held
    assert before < peak_memory(CPU) < 4 * before


def test_the_rate_is_of_tokens_since_the_start() -> None:
    meter = Meter(CPU, tokens=1000)
    time.sleep(0.2)
    figures = meter.figures(1100)
    assert figures["memory_of"] == "process" and figures["peak_memory_bytes"] == peak_memory(CPU)
    assert 0.2 <= figures["seconds"] < 60
    assert figures["tokens_per_second"] <= 100 / 0.2
    assert abs(figures["tokens_per_second"] * figures["seconds"] - 100) < 5
