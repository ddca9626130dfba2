"""Refusals of requests, with a reason for the client."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any


class RefusedError(Exception):
    """A request that cannot be served. `field` names the wrong field, if there is one. status: HTTP status of the
    answer. headers: further headers of the answer.
    """

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
