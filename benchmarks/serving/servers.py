"""A server to measure: one that runs already, or one that is started for it and ended afterwards."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

STOP_S = 60.0


@dataclass(frozen=True)
class Server:
    """pid and log: of a server that was started here."""

    url: str
    key: str | None = None
    pid: int | None = None
    log: Path | None = None

    def metrics(self) -> dict[str, float]:
        """Sums over all labels, by sample name without the prefix; `part` and `stage` are told apart as NAME/VALUE."""
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        reply = httpx.get(f"{self.url}/metrics", headers=headers, timeout=60)
        return read_metrics(reply.raise_for_status().text)


def read_metrics(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if "le" in sample.labels or not sample.name.startswith("alula:"):
                continue
            name = sample.name.removeprefix("alula:")
            kind = sample.labels.get("part") or sample.labels.get("stage")
            key = f"{name}/{kind}" if kind else name
            found[key] = found.get(key, 0.0) + sample.value
    return found


@contextmanager
def started(flags: Sequence[str]) -> Iterator[Server]:
    """`alula serve` with these flags on a free port, ended by SIGTERM. Raises RuntimeError where it does not start."""
    command = [sys.executable, "-m", "alula", "serve", "--port", "0", "--log-format", "json", *flags]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with (
            log.open("w") as errors,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
        ):
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.startswith("alula serves "):
                process.wait(STOP_S)
                raise RuntimeError(f"{shlex.join(command)} did not start:\n{log.read_text()[-2000:]}")
            try:
                yield Server(
                    line.split()[-1], os.environ.get("ALULA_API_KEYS", "").split(",")[0] or None, process.pid, log
                )
            finally:
                _stop(process)


def _stop(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()


def resident_mib(pid: int) -> float:
    """Memory that a process holds, as Linux counts it."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"process {pid} says nothing of its memory")
