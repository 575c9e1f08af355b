"""Settings of a server. Imports nothing heavy: the command line is built from them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from alula.config import AlulaError

KEYS_VARIABLE = "ALULA_API_KEYS"
Texts = tyro.conf.UseAppendAction[tuple[str, ...]]


@dataclass(frozen=True)
class ServerConfig:
    """Raises AlulaError, naming the field and the mend, for a value out of range."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is every network the machine is on."""
    port: int = 8000
    """0 takes a free one."""
    served_model_name: Texts = ()
    """What requests call the model; repeat for several. Without it, --model."""
    api_key: Texts = ()
    """Keys that are let in, as `Authorization: Bearer KEY`; repeat for several. They show in process lists: prefer
    --api-key-file, or the variable ALULA_API_KEYS (with commas between)."""
    api_key_file: Path | None = None
    """File with one key per line."""
    metrics_without_key: bool = False
    """Let /metrics be read without a key."""
    cors_origins: Texts = ()
    """Web origins whose pages may call the API; `*` for all. Repeat for several."""
    no_page: bool = False
    """Serve no page at /. It needs no key, holds nothing of the server, and asks for a key where one is wanted."""
    max_num_seqs: int = 16
    """Samples that run at once."""
    max_waiting: int = 256
    """Samples that may wait for a place; further requests get 429."""
    max_samples: int = 64
    """Samples of one request: prompts times n."""
    max_prompt_tokens: int | None = None
    """Longest prompt; None takes what the context leaves."""
    max_output_tokens: int | None = None
    """Most tokens one sample may ask for, and what it gets that asks for none; None takes what the context leaves."""
    max_logprobs: int = 20
    """Most likely tokens that may be reported with each token."""
    max_speculation_nodes: int = 64
    """Largest tree that a request may ask for."""
    max_body_kib: int = 4096
    """Largest request body."""
    request_timeout_s: float | None = None
    """Seconds after which a request ends with what it has. A request may ask for less."""
    drain_s: float = 30.0
    """On SIGTERM, seconds that running requests have to finish; then they end with what they have."""
    stall_s: float = 60.0
    """Seconds that one step may take before /health says 503."""
    generation_config: bool = False
    """Take defaults of temperature, top_k, top_p, min_p and repetition_penalty from the model's
    generation_config.json, where a request leaves them open. Without it they are OpenAI's: 1, and no cuts."""
    logits_processor: Texts = ()
    """NAME=PACKAGE.MODULE:FUNCTION, which requests name in `logits_processors`. Repeat for several."""
    log_format: Literal["text", "json"] = "text"
    """Lines for people, or one JSON object each."""
    log_prompts: bool = False
    """Write prompts and answers to the log. Never otherwise."""
    otlp_traces_endpoint: str | None = None
    """OTLP/HTTP collector that gets a span per request, as http://HOST:4318/v1/traces. Wants the extra `otel`."""
    max_tags: int = 16
    """Different values of the header X-Alula-Tag that get metrics of their own; later ones count as `other`."""

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise AlulaError(f"{name} is {value!r}: give a whole number of at least {least}")
        for name in ("request_timeout_s", "drain_s", "stall_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise AlulaError(f"{name} is {value!r}: give a number of seconds above 0")
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not re.fullmatch(r"https?://[^\s/]+(/\S*)?", endpoint):
            raise AlulaError(
                f"otlp_traces_endpoint is {endpoint!r}: give a URL such as http://127.0.0.1:4318/v1/traces"
            )
        if self.port > 65535:
            raise AlulaError(f"port is {self.port}: give a number from 0 to 65535")
        _check_keys(self.api_key, "api_key")

    def keys(self) -> tuple[str, ...]:
        """Of the flags, the file and the environment. Raises AlulaError for a file without any, and for odd ones."""
        found = list(self.api_key)
        found += [key.strip() for key in os.environ.get(KEYS_VARIABLE, "").split(",") if key.strip()]
        _check_keys(found, KEYS_VARIABLE)
        if self.api_key_file is not None:
            found += _read_keys(self.api_key_file)
        return tuple(dict.fromkeys(found))


def _read_keys(path: Path) -> list[str]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise AlulaError(f"api_key_file {path} cannot be read ({reason}): give a text file") from None
    keys = [line.strip() for line in text.splitlines() if line.strip()]
    if not keys:
        raise AlulaError(f"api_key_file {path} holds no key: write one per line")
    _check_keys(keys, f"api_key_file {path}")
    return keys


def _check_keys(keys: Iterable[str], where: str) -> None:
    """A header carries no others; a key that nobody can send locks everybody out."""
    if any(not key or not key.isascii() or not key.isprintable() or key != key.strip() for key in keys):
        raise AlulaError(
            f"{where} has a key that is empty or holds spaces at its ends, control characters or letters "
            "beyond ASCII: give another"
        )


_OPTIONAL = ("max_prompt_tokens", "max_output_tokens")
_LEAST = {
    "port": 0,
    "max_num_seqs": 1,
    "max_waiting": 0,
    "max_samples": 1,
    "max_prompt_tokens": 1,
    "max_output_tokens": 1,
    "max_logprobs": 0,
    "max_speculation_nodes": 1,
    "max_body_kib": 1,
    "max_tags": 0,
}
