"""L1, HTTP worker: its door. One of several processes that take requests at the same address, each with its own share
of the connections, its own tokenizer and its own way to and from the engines.
"""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import msgspec
import uvloop

from srt.board import Board
from srt.cluster.balancer import make_balancer
from srt.frontend import app
from srt.frontend.live_page import live_requests
from srt.messages import AbortNamed, ConfigureLogging, EngineFailed, Order, ShowWorker, UseWeights, WorkerReply
from srt.model_files import ModelFiles
from srt.process import ORPHANED, STOP, ChildSpec, Ready, Stopped, on_dump, settle
from srt.transport import Endpoints


def main(spec: ChildSpec, ready: Ready) -> None:
    raise Stopped(uvloop.run(_serve(spec, ready)))


async def _serve(spec: ChildSpec, ready: Ready) -> int:
    """Until a signal ends it, which is returned."""
    ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    for signum in (STOP, ORPHANED):
        asyncio.get_running_loop().add_signal_handler(signum, _end, ended, signum)
    assert spec.http is not None
    config, share = spec.config, spec.http
    endpoints = [Endpoints(spec.endpoints.folder, dp_rank) for dp_rank in range(config.dp_size)]
    boards = [Board(one.board, config.tp_size) for one in endpoints]
    pools = [info["pool_tokens"] for info in share.infos]
    balancer = make_balancer(config.load_balance_method, pools, config.page_size, first=share.number)
    listener = socket.socket(fileno=share.listener)
    frontend = await app.serve(config, _files(spec), endpoints, boards, share.infos, balancer, listener, share.number)
    Worker(frontend, spec.endpoints)
    on_dump(frontend.summary)
    settle()
    ready({})
    signum = await ended
    if signum == ORPHANED:
        frontend.fail("the main process has died")
    else:
        frontend.cut()
    await frontend.stop()
    return signum


def _end(ended: asyncio.Future[int], signum: int) -> None:
    if not ended.done():
        ended.set_result(signum)


def _files(spec: ChildSpec) -> ModelFiles:
    return ModelFiles(
        spec.http.model_name,
        Path(spec.folder),
        Path(spec.tokenizer_folder),
        spec.weights,
        None if spec.gguf_path is None else Path(spec.gguf_path),
        spec.model,
    )


class Worker:
    """Does what the main process says."""

    def __init__(self, frontend: app.Frontend, endpoints: Endpoints) -> None:
        self._frontend = frontend
        self._services = frontend.services
        self._manager = frontend.services.manager
        self._main = self._manager.sender(endpoints.frontend)
        self._manager.on_order = self._obey

    def _obey(self, order: Order) -> None:
        counts = requests = b""
        match order:
            case EngineFailed(reason):
                self._frontend.fail(reason)
                return
            case AbortNamed(_, name, message):
                self._manager.abort(name, message)
            case UseWeights(_, path, version):
                self._services.weights.path, self._services.weights.version = path, version
            case ConfigureLogging(_, level, shown, shown_level):
                self._manager.request_log.configure(level, shown, shown_level)
            case ShowWorker():
                counts = msgspec.msgpack.encode(self._services.metrics.counts())
                requests = msgspec.json.encode(live_requests(self._manager))
        self._main.send(WorkerReply(order.ticket, counts, requests))
