"""L1, HTTP worker: requests for what only the main process has are handed on to it, and its answers to the client."""

from __future__ import annotations

from collections.abc import Mapping

import aiohttp
from aiohttp import HttpVersion11, web
from multidict import CIMultiDict
from yarl import URL

from srt.frontend.answers import COMMON_HEADERS, Answer, Response
from srt.frontend.errors import RequestError
from srt.frontend.services import Services

FORWARDED = web.RequestKey("forwarded", bool)
"""On a request that the main process has answered, and counted."""

_OF_A_CONNECTION = frozenset(
    ("connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "content-length", "expect")
)


class Forwarder:
    """Speaks HTTP to the main process's own socket."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._session: aiohttp.ClientSession | None = None

    async def forward(self, request: web.Request) -> Response:
        """If the client leaves, the main process sees its connection closed like that of a client."""
        body = await self._services.read_bytes(request) if request.can_read_body else None
        headers = _without_connection(request.headers)
        headers.popall("Content-Encoding", None)  # the body was read
        method = "GET" if request.method == "HEAD" else request.method  # an answer to HEAD says how long the other is
        url = URL(f"http://house{request.rel_url.raw_path_qs}", encoded=True)  # a target may name a host of its own
        try:
            async with self._open().request(method, url, headers=headers, data=body, allow_redirects=False) as answer:
                request[FORWARDED] = True
                return await self._hand_on(request, answer)
        except aiohttp.ClientError:
            raise RequestError("The main process does not answer.", status=503) from None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    @staticmethod
    async def _hand_on(request: web.Request, answer: aiohttp.ClientResponse) -> Response:
        headers = _without_connection(answer.headers)
        if answer.content_type != "text/event-stream":
            kind = headers.pop("Content-Type")
            headers.pop("Date", None)  # each answer is given its own
            return Answer(await answer.read(), answer.status, headers, kind)
        headers.update(request[COMMON_HEADERS])
        response = web.StreamResponse(status=answer.status, headers=headers)
        if request.version < HttpVersion11:
            response.force_close()
        await response.prepare(request)
        try:
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
        except aiohttp.ClientError:  # too late for another answer: the client shall see that this one is cut off
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionError from None
        await response.write_eof()
        return response

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(self._services.manager.house, limit=0),
                timeout=aiohttp.ClientTimeout(),
                auto_decompress=False,
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            )
        return self._session


def _without_connection(headers: Mapping[str, str]) -> CIMultiDict[str]:
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in _OF_A_CONNECTION)
