"""L1, frontend: /v1/models."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from srt.frontend.answers import Answer, json_response
from srt.frontend.errors import RequestError
from srt.frontend.services import ID, Services


class Models:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def list(self, request: web.Request) -> Answer:
        return json_response({"object": "list", "data": [self._card()]})

    async def get(self, request: web.Request) -> Answer:
        name = request[ID]
        if name != self._services.model_name:
            raise RequestError(
                f"The model `{name[:100]}` does not exist.", status=404, param="model", code="model_not_found"
            )
        return json_response(self._card())

    async def embeddings(self, request: web.Request) -> Answer:
        raise RequestError(
            f"The model `{self._services.model_name}` generates text and makes no embeddings; serve an embedding model "
            "elsewhere.",
            param="model",
            code="model_not_supported",
        )

    def _card(self) -> dict[str, Any]:
        services = self._services
        return {
            "id": services.model_name,
            "object": "model",
            "created": services.created,
            "owned_by": "lockstep",
            "root": services.config.model_path or services.model_name,
            "parent": None,
            "max_model_len": services.limits.context_length,
        }
