"""What a client is told when it gets no answer."""

from __future__ import annotations

from typing import Any

from .._core import OverspillError


class ApiError(OverspillError):
    """An answer's error in OpenAI's form. The message names the field, its value and the way out."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        """param: the field of the request that is wrong. code: what a program may look at. headers: of the response."""
        super().__init__(message)
        self.message, self.status, self.param, self.code = message, status, param, code
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        """As OpenAI's clients read it."""
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(
            self.status, "invalid_request_error" if self.status < 500 else "server_error"
        )
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code},
        }
