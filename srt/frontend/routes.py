"""L1, frontend: every route, what it takes, and whom it is for. The server and its description both go by it."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from aiohttp import web

from srt.frontend.administration import Administration
from srt.frontend.answers import Response
from srt.frontend.anthropic.messages import Messages
from srt.frontend.anthropic.protocol import CountTokensRequest, MessagesRequest
from srt.frontend.live_page import LivePage
from srt.frontend.management import Management
from srt.frontend.native import Native
from srt.frontend.openai.chat import Chat
from srt.frontend.openai.completions import Completions
from srt.frontend.openai.models import Models
from srt.frontend.openai.responses import Responses
from srt.frontend.openai.responses_protocol import ResponsesRequest
from srt.frontend.protocol import (
    AbortBody,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    GenerateRequest,
    LoggingBody,
    PauseBody,
    ProfileBody,
    TokenizeRequest,
    UpdateWeightsBody,
)
from srt.frontend.services import Services

Handler = Callable[[web.Request], Awaitable[Response]]

TEXT, HTML = ("text/plain",), ("text/html",)
NODE = (("engine", "its number"), ("ticket", "of the tree"), ("index", "of the node in it"))
_ID = re.compile(r"\{id:?([^}]*)\}")


@dataclass(frozen=True)
class Route:
    methods: str  # with spaces between
    path: str  # with `{id}` for a name, or `{id:.+}` for one that may have slashes
    handler: Handler
    summary: str
    body: type | None = None
    tag: str = "management"
    streams: bool = False  # if the body has `stream`: true
    answer: tuple[str, ...] = ("application/json",)  # of which types it may be
    open: bool = False  # takes no key
    admin: bool = False  # takes the administrator's key, if there is one
    house: bool = False  # its answer is about the whole server, and so the main process's
    query: tuple[tuple[str, str], ...] = ()  # names and descriptions

    @property
    def shown_path(self) -> str:
        return _ID.sub("{id}", self.path)

    @property
    def pattern(self) -> re.Pattern[str] | None:
        """Of the paths that the route takes, if it takes several; the group is the id."""
        before, *behind = _ID.split(self.path)
        if not behind:
            return None
        return re.compile(f"{re.escape(before)}({behind[0] or '[^/]+'}){re.escape(behind[1])}", re.DOTALL)


def routes(services: Services) -> list[Route]:
    chat, completions, models = Chat(services), Completions(services), Models(services)
    messages, responses = Messages(services, chat), Responses(services, chat)
    native, management, administration = Native(services), Management(services, chat), Administration(services)
    openai, anthropic, own, admin = (
        {"tag": "OpenAI"},
        {"tag": "Anthropic"},
        {"tag": "native"},
        {"admin": True, "house": True},
    )
    page, stored = LivePage(services), {**openai, "house": True}
    timeout = (("timeout", "seconds to wait until nothing runs"),)
    return [
        Route("POST", "/v1/chat/completions", chat.create, "Chat completions", ChatRequest, streams=True, **openai),
        Route("POST", "/v1/completions", completions.create, "Completions", CompletionRequest, streams=True, **openai),
        Route("POST", "/v1/responses", responses.create, "Responses", ResponsesRequest, streams=True, **stored),
        Route("GET", "/v1/responses/{id}", responses.get, "A stored response", **stored),
        Route("DELETE", "/v1/responses/{id}", responses.delete, "Forgets a stored response", **stored),
        Route("POST", "/v1/responses/{id}/cancel", responses.cancel, "Ends a response in the background", **stored),
        Route("POST", "/v1/embeddings", models.embeddings, "Refused: the model generates", EmbeddingRequest, **openai),
        Route("GET", "/v1/models", models.list, "The model that is served", **openai),
        Route("GET", "/v1/models/{id:.+}", models.get, "The same, by its name", **openai),
        Route("POST", "/v1/messages", messages.create, "Messages", MessagesRequest, streams=True, **anthropic),
        Route(
            "POST", "/v1/messages/count_tokens", messages.count_tokens, "Tokens of a prompt", CountTokensRequest,
            **anthropic,
        ),
        Route("POST PUT", "/generate", native.generate, "Generation", GenerateRequest, streams=True, **own),
        *_each(("/tokenize", "/v1/tokenize"), "POST", management.tokenize, "Text to token ids", TokenizeRequest, **own),
        *_each(
            ("/detokenize", "/v1/detokenize"), "POST", management.detokenize, "Token ids to text", DetokenizeRequest,
            **own,
        ),
        Route(
            "GET", "/", page.root, "A page to look at; to programs, that this is Lockstep", open=True,
            answer=TEXT + HTML,
        ),
        Route("GET", "/page/data", page.data, "What the page shows", house=True),
        Route("GET", "/page/node", page.node, "The first words of a node on the page", query=NODE, house=True),
        Route("GET", "/health", management.health, "Whether every process lives", open=True, answer=TEXT),
        Route("GET", "/health_generate", management.health_generate, "Whether tokens come", open=True, answer=TEXT),
        Route("GET", "/ready", management.ready, "Whether one more request is taken", open=True, answer=TEXT),
        *_each(("/model_info", "/get_model_info"), "GET", management.model_info, "What the model is"),
        *_each(("/server_info", "/get_server_info"), "GET", management.server_info, "Flags, memory, ranks", house=True),
        Route("GET", "/v1/loads", management.loads, "Load of each engine", house=True),
        Route("GET", "/get_load", management.get_load, "The same, in a shorter form"),
        Route("GET", "/metrics", management.metrics, "Prometheus metrics", open=True, answer=TEXT, house=True),
        Route("GET", "/version", management.version, "The version"),
        Route(
            "GET POST", "/flush_cache", administration.flush_cache, "Forgets cached prefixes", answer=TEXT,
            query=timeout, **admin,
        ),
        Route(
            "POST", "/abort_request", administration.abort_request, "Aborts requests", AbortBody, answer=TEXT, **admin
        ),
        Route("POST", "/pause_generation", administration.pause, "Plans no further step", PauseBody, **admin),
        Route("POST", "/continue_generation", administration.resume, "Ends a pause", **admin),
        Route(
            "GET POST", "/start_profile", administration.start_profile, "Traces the next steps", ProfileBody,
            answer=TEXT, **admin,
        ),
        Route("GET POST", "/stop_profile", administration.stop_profile, "Writes the traces", answer=TEXT, **admin),
        Route(
            "POST", "/configure_logging", administration.configure_logging, "What is logged", LoggingBody, answer=TEXT,
            **admin,
        ),
        Route(
            "POST", "/update_weights_from_disk", administration.update_weights, "Other weights of the same shapes",
            UpdateWeightsBody, **admin,
        ),
    ]  # fmt: skip


def _each(
    paths: tuple[str, ...], methods: str, handler: Handler, summary: str, body: type | None = None, **rest: str
) -> list[Route]:
    return [Route(methods, path, handler, summary, body, **rest) for path in paths]
