"""L1, every process that speaks HTTP: its door, through which each request comes in and each answer goes out.

Owns which route a request takes, and the form of every error.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Mapping

from aiohttp import web
from multidict import istr

from srt.frontend.access import Access
from srt.frontend.answers import COMMON_HEADERS, Answer, Response
from srt.frontend.compression import misencoded
from srt.frontend.errors import RequestError
from srt.frontend.forwarding import FORWARDED, Forwarder
from srt.frontend.openapi import Description
from srt.frontend.routes import Route, routes
from srt.frontend.services import ID, Services, new_id, too_big
from srt.observe.timeline import arrive

log = logging.getLogger(__name__)

ANTHROPIC_PATH = "/v1/messages"

_X_REQUEST_ID, _TRACEPARENT = istr("X-Request-ID"), istr("traceparent")
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Door:
    def __init__(self, services: Services, forwarder: Forwarder | None = None) -> None:
        """With a forwarder it answers for the main process."""
        self._services = services
        self._access = Access(services.config)
        self._plain: dict[str, dict[str, Route]] = {}  # by path and method
        self._patterns: dict[re.Pattern[str], dict[str, Route]] = {}
        for route in Description(routes(services), services.config).routes:
            if forwarder is not None and route.house:
                route = dataclasses.replace(route, handler=forwarder.forward)
            places, key = (self._plain, route.path) if route.pattern is None else (self._patterns, route.pattern)
            methods = route.methods.split()
            if methods == ["GET"]:  # HTTP has HEAD where it has GET; others do what a HEAD may not
                methods.append("HEAD")
            places.setdefault(key, {}).update(dict.fromkeys(methods, route))

    async def answer(self, request: web.Request) -> Response:
        """To any request, whatever happens."""
        arrive(request.protocol.received, request.headers.get(_TRACEPARENT, ""))
        request[COMMON_HEADERS] = headers = self._headers(request)
        try:
            response = self._access.preflight(request) or await self._route(request).handler(request)
        except RequestError as error:
            response = _error_response(request, error)
            error.__traceback__ = None  # its frames hold the future that holds it, and prompts
        except web.HTTPException as error:
            response = _error_response(request, self._of_http(error), error.headers.get("Allow"))
        except web.RequestPayloadError:
            response = _error_response(request, misencoded())
            response.force_close()  # nobody knows where the next request begins
        except ConnectionError:
            response = web.Response()  # nobody is left to read it
        except RecursionError:  # what could be read just so is too deep to be written again
            response = _error_response(request, RequestError("The body is nested too deeply."))
        except Exception:
            log.exception("%s %s failed", request.method, request.path)
            mistake = RequestError("The server made a mistake; its log says which.", status=500)
            response = _error_response(request, mistake)
        if response.status >= 400 and FORWARDED not in request:
            self._services.metrics.refused(response.status)
        response.headers.update(headers)
        return response

    def _route(self, request: web.Request) -> Route:
        """For one who may take it."""
        methods = self._methods(request)
        route = methods.get(request.method)
        if route is None or not route.open:
            self._access.check(request, route is not None and route.admin)
        if route is None:
            raise web.HTTPMethodNotAllowed(request.method, methods) if methods else web.HTTPNotFound
        return route

    def _methods(self, request: web.Request) -> Mapping[str, Route]:
        """The routes to the request's path, by their methods."""
        path = request.path
        if path in self._plain:
            return self._plain[path]
        for pattern, methods in self._patterns.items():
            if found := pattern.fullmatch(path):
                request[ID] = found[1]
                return methods
        return {}

    def _headers(self, request: web.Request) -> dict[str, str]:
        given = request.headers.get(_X_REQUEST_ID)
        headers = {_X_REQUEST_ID: given if given and _REQUEST_ID.fullmatch(given) else new_id("")}
        self._access.mark(request, headers)
        return headers

    def _of_http(self, error: web.HTTPException) -> RequestError:
        if error.status == 413:
            return too_big(self._services.max_body)
        if error.status == 404:
            return RequestError("There is no such route; /docs shows all.", status=404, code="route_not_found")
        if isinstance(error, web.HTTPMethodNotAllowed):
            sentence = f"This route takes {' or '.join(sorted(error.allowed_methods))}, not {error.method}."
            return RequestError(sentence, status=405, code="method_not_allowed")
        return RequestError(error.reason, status=error.status)


def _error_response(request: web.Request, error: RequestError, allow: str | None = None) -> Answer:
    headers = {"Allow": allow} if allow else {}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status == 503:
        headers["Retry-After"] = "1"
    body = error.anthropic_body() if request.path.startswith(ANTHROPIC_PATH) else error.body()
    return Answer(body, error.status, headers)
