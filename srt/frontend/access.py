"""L1, frontend: who may come in: API keys, the administrator's, and the web pages whose scripts may."""

from __future__ import annotations

import hmac
from collections.abc import MutableMapping
from urllib.parse import urlsplit

from aiohttp import hdrs, web

from srt.config import ServerConfig
from srt.frontend.errors import RequestError

PREFLIGHT_SECONDS = "86400"


def credential(request: web.BaseRequest) -> bytes:
    """The key that came with a request, as a bearer token or in Anthropic's header; empty if none did."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    key = token.lstrip() if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
    return key.encode("utf-8", "surrogateescape")


class Access:
    def __init__(self, config: ServerConfig) -> None:
        admin = [] if config.admin_api_key is None else [config.admin_api_key.encode()]
        users = [key.encode() for key in config.api_keys]
        self._admin_keys = admin or users
        self._user_keys = users + admin if users else []
        self._origins = config.cors_allowed

    def check(self, request: web.BaseRequest, is_admin: bool) -> None:
        """RequestError with 401 for a key that is missing or wrong; where none is needed, 403 for others' web pages.

        Where there is an administrator's key, what `is_admin` takes no other.
        """
        expected = self._admin_keys if is_admin else self._user_keys
        if not expected:
            self._check_page(request, is_admin)
            return
        given = credential(request)
        if not _is_among(given, expected):
            is_user = is_admin and _is_among(given, self._user_keys)
            sentence = (
                "This route takes the server's --admin-api-key." if is_user else "The API key is missing or wrong."
            )
            raise RequestError(sentence, status=401, code="invalid_api_key")

    def _check_page(self, request: web.BaseRequest, is_admin: bool) -> None:
        """A page can have its reader's browser send requests to this machine, though it cannot read the answers."""
        origin = request.headers.get(hdrs.ORIGIN)
        if request.method in ("GET", "HEAD") and not is_admin:
            return
        if "*" not in self._origins and origin not in self._origins and _is_of_another_site(request, origin):
            raise RequestError(
                "A web page of another origin has sent this; --cors-origins names those that may.",
                status=403, code="origin_not_allowed",
            )  # fmt: skip

    def preflight(self, request: web.BaseRequest) -> web.Response | None:
        """The answer to a browser that asks whether a page's script may send a request; None for other requests."""
        if request.method != "OPTIONS" or "Access-Control-Request-Method" not in request.headers:
            return None
        response = web.Response(status=204)
        if self.mark(request, response.headers):
            response.headers["Access-Control-Allow-Methods"] = request.headers["Access-Control-Request-Method"]
            response.headers["Access-Control-Allow-Headers"] = request.headers.get(
                "Access-Control-Request-Headers", "*"
            )
            response.headers["Access-Control-Max-Age"] = PREFLIGHT_SECONDS
        return response

    def mark(self, request: web.BaseRequest, headers: MutableMapping[str, str]) -> bool:
        """Lets a page's script read a response with these headers, if its origin is allowed."""
        origin = request.headers.get(hdrs.ORIGIN)
        if self._origins and "*" not in self._origins:
            headers["Vary"] = "Origin"  # also where it came from none of them: caches must not mix them up
        if origin is None or not ("*" in self._origins or origin in self._origins):
            return False
        headers["Access-Control-Allow-Origin"] = "*" if "*" in self._origins else origin
        headers["Access-Control-Expose-Headers"] = "X-Request-ID, Retry-After"
        return True


def _is_among(given: bytes, keys: list[bytes]) -> bool:
    return any([hmac.compare_digest(given, one) for one in keys])  # as long for each of them


def _is_of_another_site(request: web.BaseRequest, origin: str | None) -> bool:
    """Browsers say so themselves, but to hosts without TLS. Programs that are no browsers have no site."""
    site = request.headers.get("Sec-Fetch-Site")
    if site is not None:
        return site not in ("same-origin", "none")
    if origin is None:
        return False
    if origin == "null":
        return True
    try:
        scheme, host = urlsplit(origin)[:2]
    except ValueError:
        return True
    return scheme in ("http", "https") and host != request.host
