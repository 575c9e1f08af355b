"""Log lines for people, or one JSON object each. Prompts are never in them unless asked for."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any


def set_up_logs(kind: str) -> None:
    """Sends the process's log to standard error. kind: `text` or `json`."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if kind == "json" else TextLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    for noisy in ("httpx", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


_SAID = ("method", "path", "status")
"""Facts that the message of a request's line says already."""


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "facts", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class TextLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        facts: dict[str, Any] = getattr(record, "facts", {})
        shown = "".join(f" {name}={_shown(value)}" for name, value in facts.items() if name not in _SAID)
        line = f"{_time(record)} {record.levelname.lower()} {record.getMessage()}{shown}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _time(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"


def _shown(value: object) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (str, list)) else str(value)
