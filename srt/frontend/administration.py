"""L1, main process: the routes that tell the server what to do. They wait until the engines have done it."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web

from srt.frontend.answers import Answer, json_response, text_response
from srt.frontend.decoding import decode
from srt.frontend.errors import RequestError, unsupported
from srt.frontend.protocol import (
    AbortBody,
    LoggingBody,
    PauseBody,
    ProfileBody,
    UpdateWeightsBody,
    check_supported,
)
from srt.frontend.request_log import MOST_LEVEL
from srt.frontend.services import Services
from srt.messages import ControlReply
from srt.model_config import ModelError
from srt.model_files import locate

DEFAULT_PROFILE_STEPS = 50
MAX_PROFILE_STEPS = 1000
"""A trace has some thousand events a step."""

log = logging.getLogger(__name__)

T = TypeVar("T")


class Administration:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._manager = services.manager
        self._engines = services.engines
        self._house = services.house
        self._alone = asyncio.Lock()

    async def flush_cache(self, request: web.Request) -> Answer:
        raw = request.query.get("timeout", "0")
        try:
            timeout = float(raw)
        except ValueError:
            timeout = -1.0
        if not 0.0 <= timeout <= 3600.0:
            raise RequestError("`timeout` must be a number of seconds between 0 and 3600.", param="timeout")
        reply = await self._engines.flush_cache(timeout)
        if not reply.ok:
            raise RequestError(reply.message or "The cache was not flushed.", code="flush_refused")
        return text_response(f"{reply.message or 'The cache was flushed.'}\n")

    async def abort_request(self, request: web.Request) -> Answer:
        """Takes all requests, prompts and choices whose name begins with the words of `rid`; none is no error."""
        body: AbortBody = await self._services.read(request, AbortBody)
        if not body.rid and not body.abort_all:
            raise RequestError("`rid` must name a request (or give `abort_all`: true).", param="rid")
        message = (body.abort_message or "The request was aborted.")[:500]
        await self._house.abort(None if body.abort_all else body.rid, message)
        return text_response("")

    async def pause(self, request: web.Request) -> Answer:
        body: PauseBody = await self._body(request, PauseBody)
        mode = body.mode or "abort"
        _check(await self._whole(self._pause(mode)))
        return json_response({"status": "ok", "message": f"Generation is paused ({mode})."})

    async def _pause(self, mode: str) -> ControlReply:
        if mode == "abort":
            await self._house.abort(None, "Generation was paused.")
        return await self._engines.pause(retract=mode == "retract")

    async def resume(self, request: web.Request) -> Answer:
        _check(await self._whole(self._engines.resume()))
        return json_response({"status": "ok", "message": "Generation goes on."})

    async def start_profile(self, request: web.Request) -> Answer:
        body: ProfileBody = await self._body(request, ProfileBody)
        check_supported(body)
        steps = DEFAULT_PROFILE_STEPS if body.num_steps is None else body.num_steps
        if not 1 <= steps <= MAX_PROFILE_STEPS:
            raise RequestError(f"`num_steps` must be between 1 and {MAX_PROFILE_STEPS}.", param="num_steps")
        if body.output_dir is None:
            folder = Path(tempfile.mkdtemp(prefix="lockstep-profile-"))
        else:
            folder = Path(body.output_dir)
            if not folder.is_absolute():
                raise RequestError("`output_dir` must be an absolute path on the server.", param="output_dir")
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except (OSError, ValueError) as error:
                reason = getattr(error, "strerror", error)
                raise RequestError(f"`output_dir` cannot be made: {reason}.", param="output_dir") from None
        reply = await self._engines.start_profile(str(folder), steps)
        if not reply.ok and body.output_dir is None:
            folder.rmdir()
        _check(reply)
        return text_response(f"Each rank's trace of {steps} steps will be in {folder}\n")

    async def stop_profile(self, request: web.Request) -> Answer:
        _check(await self._engines.stop_profile())
        return text_response("The profile is written.\n")

    async def configure_logging(self, request: web.Request) -> Answer:
        body: LoggingBody = await self._body(request, LoggingBody)
        check_supported(body)
        level = body.log_requests_level
        if level is not None and not 0 <= level <= MOST_LEVEL:
            raise RequestError(f"`log_requests_level` must be between 0 and {MOST_LEVEL}.", param="log_requests_level")
        changes = body.log_level, body.log_requests, level
        self._manager.request_log.configure(*changes)
        await self._house.configure_logging(*changes)
        return text_response("")

    async def update_weights(self, request: web.Request) -> Answer:
        """Other weights of the same shapes. What cannot be taken leaves the old ones, and everything as it was."""
        body: UpdateWeightsBody = await self._services.read(request, UpdateWeightsBody)
        check_supported(body)
        if body.load_format not in (None, "auto", "safetensors"):
            raise unsupported("load_format", "weights are taken from safetensors files")
        return await self._whole(self._update_weights(body))

    async def _update_weights(self, body: UpdateWeightsBody) -> Answer:
        folder = await asyncio.to_thread(self._compatible_folder, body.model_path)
        if body.abort_all_requests:
            await self._house.abort(None, "The weights were replaced.")
        running = self._manager.tally.total
        reply = await self._engines.update_weights(str(folder))
        if reply.ok:
            self._services.weights.version = body.weight_version or self._services.weights.version
            self._services.weights.path = body.model_path
            await self._house.use_weights(body.model_path, self._services.weights.version)
        answer = {"success": reply.ok, "message": reply.message, "num_paused_requests": running}
        if not reply.ok:
            answer["error"] = {"message": reply.message}  # as of all routes
        response = json_response(answer)
        response.status = 200 if reply.ok else 400
        return response

    async def _whole(self, work: Coroutine[Any, Any, T]) -> T:
        """Pauses and updates go one after the other, each to its end, also if its client leaves meanwhile."""

        async def alone() -> T:
            async with self._alone:
                return await work

        task = asyncio.create_task(alone())
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_left)
            raise

    def _compatible_folder(self, model_path: str) -> Path:
        """Where the weights are. RequestError if they are not a model's of the served shapes, whole and all there."""
        served = self._services.model
        try:
            files = locate(model_path, "auto", self._services.config.tokenizer_path, log=log.info)
        except (ModelError, OSError) as error:
            raise RequestError(f"`model_path`: {error}", param="model_path") from None
        if files.weights != "safetensors":
            raise unsupported("model_path", "weights are taken from safetensors files")
        same = {"eos_token_ids": served.eos_token_ids, "bos_token_id": served.bos_token_id, "dtype": served.dtype}
        if replace(files.model_config, **same) != served:
            raise RequestError(
                "`model_path`: this is a model of another architecture or other sizes; start a server for it.",
                param="model_path",
            )
        return files.folder

    async def _body(self, request: web.Request, kind: type) -> Any:
        """Clients send none where all is as it should be."""
        raw = await self._services.read_bytes(request)
        return decode(raw, kind) if raw else kind()


def _left(task: asyncio.Task[Any]) -> None:
    """Nobody is there to be told of a refusal."""
    if not task.cancelled() and not isinstance(error := task.exception(), RequestError | None):
        log.error("What a client has asked for and not awaited failed", exc_info=error)


def _check(reply: ControlReply) -> None:
    if not reply.ok:
        raise RequestError(reply.message)
