"""What the server answers instead of tokens, in the form that OpenAI's clients expect."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any


class RefusedError(Exception):
    """A request that cannot be served. `field` names what is wrong with it, if it is one field."""

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        status: HTTPStatus = HTTPStatus.BAD_REQUEST,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.field = field
        self.status = status
        self.headers = headers

    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= HTTPStatus.INTERNAL_SERVER_ERROR else "invalid_request_error"
        code = self.status.phrase.lower().replace(" ", "_")
        return {"error": {"message": str(self), "type": kind, "param": self.field, "code": code}}


def unavailable(message: str, *, retry_after_s: int | None = None) -> RefusedError:
    """Nothing is wrong with the request."""
    headers = None if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    return RefusedError(message, status=HTTPStatus.SERVICE_UNAVAILABLE, headers=headers)
