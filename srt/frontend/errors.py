"""L1, frontend: what a client is told when its request is refused or fails. One shape on every route.

`{"error": {"message", "type", "param", "code"}}`, as the OpenAI clients read it; Anthropic's have their own.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping

import msgspec

MAX_MESSAGE = 600  # characters; an error never echoes the input at length

TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    500: "internal_server_error",
    503: "service_unavailable_error",
}


ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
    503: "overloaded_error",
}


class RequestError(Exception):
    """A request that is not served, with the sentence for its client. `param` names the faulty field."""

    def __init__(self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message if len(message) <= MAX_MESSAGE else message[:MAX_MESSAGE] + "…"
        self.status = status
        self.param = param if param is None else param[:100]
        self.code = code

    def body(self) -> bytes:
        """Strict JSON, also where the message quotes half a character."""
        error = {
            "message": self._sentence,
            "type": TYPES.get(self.status, "invalid_request_error"),
            "param": self.param,
            "code": self.code,
        }
        return msgspec.json.encode({"error": error})

    def anthropic_body(self) -> bytes:
        error = {"type": ANTHROPIC_TYPES.get(self.status, "invalid_request_error"), "message": self._sentence}
        return msgspec.json.encode({"type": "error", "error": error})

    @property
    def _sentence(self) -> str:
        return self.message.encode("utf-8", "replace").decode()


@contextlib.contextmanager
def renaming(names: Mapping[str, str]) -> Iterator[None]:
    """Errors within speak of fields by the names under which their client knows them."""
    try:
        yield
    except RequestError as error:
        error.message = re.sub(r"`(\w+)`", lambda match: f"`{names.get(match[1], match[1])}`", error.message)
        error.param = names.get(error.param, error.param)
        raise


def unsupported(param: str, sentence: str) -> RequestError:
    return RequestError(f"`{param}`: {sentence}", param=param, code="unsupported_parameter")
