"""What a client is told when a request cannot be served, in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ApiError(Exception):
    """An HTTP status and one sentence. code and param as in OpenAI's API: a machine-readable reason, and the field."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        kind = _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


_KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


def refused(error: ValueError) -> ApiError:
    """A 400 for a sentence of alula's own, which begins with the field it is about."""
    return ApiError(400, str(error), param=str(error).split(" ", 1)[0].split(".")[0])


def broken(error: Exception) -> ApiError:
    """A 500 for whatever should not have been raised; its text may quote the request, so only its name is told."""
    return ApiError(500, f"the server failed on this request ({type(error).__name__})", code="internal_error")


def busy(retry_after_s: int, waiting: int) -> ApiError:
    return ApiError(
        429,
        f"{waiting} samples run or wait already: try again in {retry_after_s} s",
        code="queue_full",
        headers={"Retry-After": str(retry_after_s)},
    )


def unavailable(reason: str, code: str) -> ApiError:
    return ApiError(503, reason, code=code, headers={"Retry-After": "5"})


def too_long(prompt: int, output: int, limit: int) -> ApiError:
    wanted = f" and asks for {output} more" if output else ""
    return ApiError(
        400,
        f"the prompt has {prompt} tokens{wanted}, and the context holds {limit}: shorten it or lower max_tokens",
        code="context_length_exceeded",
        param="messages" if not output else "max_tokens",
    )
