"""L1, frontend: the page at `/`, and what it asks for once a second.

Whatever is dear to find out is found out at most once a second, however many look, and not at all while nobody does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import deque
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
from aiohttp import web

from srt.frontend.answers import Answer, json_response, text_response
from srt.frontend.errors import RequestError
from srt.frontend.generation import Generation
from srt.frontend.metrics import Load
from srt.frontend.services import Services
from srt.frontend.tokenizer_manager import TokenizerManager
from srt.messages import TreeReply, unpack_ids

PAGE = Path(__file__).with_name("live_page.html")
PERIOD = 1.0  # seconds for which an answer serves all who ask
MOST_NODES = 1000
MOST_REQUESTS = 256
MOST_TEXT = 64  # tokens of a node, from its beginning
REMEMBERED = 8  # trees, of each engine, in which a node can still be found


class LivePage:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._processes = _Processes()
        self._gpus = _Gpus(services.config.ranks_per_host) if services.config.device == "cuda" else None
        self._trees: list[deque[TreeReply]] = [deque(maxlen=REMEMBERED) for _ in services.boards]
        self._asking = asyncio.Lock()
        self._data: dict[str, Any] = {}
        self._until = 0.0

    @cached_property
    def _page(self) -> str:
        return PAGE.read_text("utf-8")

    async def root(self, request: web.Request) -> Answer:
        """Nothing on the page is a secret: all that it shows it asks for, with the API key if there is one."""
        if "text/html" not in request.headers.get("Accept", ""):
            return text_response("Lockstep is running\n")
        return text_response(self._page, "text/html")

    async def data(self, request: web.Request) -> Answer:
        async with self._asking:
            if time.monotonic() >= self._until:
                trees = map(self._ask_for_tree, range(len(self._trees)))
                house = self._services.house
                usage, *_ = await asyncio.gather(asyncio.to_thread(self._usage), house.count(), *trees)
                self._data = self._gather() | usage
                self._until = time.monotonic() + PERIOD
        return json_response(self._data)

    async def node(self, request: web.Request) -> Answer:
        """The first words of a node of a tree that was shown."""
        services = self._services
        if not services.config.page_show_text:
            raise RequestError("Texts are shown where the server was started with --page-show-text.", status=403)
        try:
            engine, ticket, index = (int(request.query.get(name, "")) for name in ("engine", "ticket", "index"))
            tree = next(tree for tree in self._trees[engine] if tree.ticket == ticket)
            tokens, ids = tree.nodes[index][1], tree.nodes[index][4]
        except (ValueError, IndexError, StopIteration):
            raise RequestError("This node is not there any more.", status=404) from None
        text = services.words.tokenizer.decode(unpack_ids(ids), skip_special_tokens=False)
        return json_response({"text": text, "is_whole": len(ids) == 4 * tokens})

    async def _ask_for_tree(self, engine: int) -> None:
        """Without an answer the page shows the last one, and its other news."""
        text = MOST_TEXT if self._services.config.page_show_text else 0
        with contextlib.suppress(RequestError):
            self._trees[engine].append(await self._services.engines.tree(engine, MOST_NODES, text))

    def _usage(self) -> dict[str, Any]:
        """Takes as long as the host has processes, so tokens must not wait for it."""
        gpus = [] if self._gpus is None else self._gpus.usage()
        return {"processes": self._processes.usage(time.monotonic()), "gpus": gpus}

    def _gather(self) -> dict[str, Any]:
        services = self._services
        return {
            "now": time.monotonic(),
            "model": services.model_name,
            "shows_text": services.config.page_show_text,
            "status": "failed" if services.manager.failure else "ready" if services.manager.is_open else "stopping",
            "engines": [self._engine(engine) for engine in range(len(services.boards))],
            "itl": services.metrics.inter_token,
            "requests": [*live_requests(services.manager), *services.house.requests][:MOST_REQUESTS],
        }

    def _engine(self, engine: int) -> dict[str, Any]:
        board = self._services.boards[engine]
        records = [board.read(rank) for rank in range(board.num_ranks)]
        load, rates = Load(records[0].gauges), self._services.metrics.engines[engine]
        trees = self._trees[engine]
        return {
            "running": load.running,
            "waiting": load.waiting,
            "pool": {
                "used": load.used, "cached": load.cached - load.locked, "free": load.free, "total": load.total
            },
            "hit_rate": rates.cache_hit_rate,
            "generated": rates.total,
            "host": {
                "used": load.host_used, "total": load.host_total, "saved": load.saved, "restored": load.restored
            },
            "drafts": {"checked": load.drafted, "accepted": load.accepted},
            "retractions": load.retractions,
            "evicted": load.evicted,
            "ranks": [{"step": record.step, "phase": record.phase.name.lower()} for record in records],
            "tree": {"ticket": trees[-1].ticket, "nodes": [node[:4] for node in trees[-1].nodes]} if trees else None,
        }  # fmt: skip


def live_requests(manager: TokenizerManager) -> list[list[Any]]:
    """Those of this process that are on their way, the oldest first."""
    return list(map(_request, islice(manager.live, MOST_REQUESTS)))


def _request(generation: Generation) -> list[Any]:
    """As short as can be, since there may be many: rid, engine, tokens of prompt, cached, generated, and marks."""
    timeline = generation.timeline
    return [
        generation.rid,
        generation.assignment.engine,
        generation.prompt.num_tokens,
        generation.cached_tokens,
        generation.completion_tokens,
        timeline.received,
        timeline.sent,
        timeline.admitted,
        timeline.first_token,
    ]


class _Processes:
    """The house's, and what they use."""

    REFRESH = 60.0  # seconds after which it is looked for new ones

    def __init__(self) -> None:
        self._known: dict[int, tuple[psutil.Process, str]] = {}  # with its title
        self._due = 0.0

    def usage(self, now: float) -> list[dict[str, Any]]:
        """CPU in percent of a core, since the last call; memory that is resident, in bytes."""
        if now >= self._due:
            self._due = now + self.REFRESH
            own = psutil.Process()
            before, self._known = self._known, {}
            for found in (own, *own.children(recursive=True)):
                process, _ = before.get(found.pid, (found, ""))  # which knows what it has used before
                with contextlib.suppress(psutil.Error):  # it has ended
                    title = " ".join(process.cmdline()).removeprefix("lockstep: ").strip()
                    self._known[found.pid] = process, title[:40]
        told = []
        for pid, (process, title) in self._known.items():
            try:
                cpu, memory = process.cpu_percent(), process.memory_info().rss
            except psutil.Error:  # it has ended
                self._due = 0.0
                continue
            told.append({"pid": pid, "title": title, "cpu": cpu, "memory": memory})
        return told


class _Gpus:
    """Those of this host's ranks, as NVIDIA's driver tells of them; none where its Python package is not there."""

    def __init__(self, count: int) -> None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count)))
        self.names = [name.strip() for name in visible.split(",")][:count]  # numbers, or UUIDs
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception:  # no package, or a driver without the library
            self._nvml = None
        else:
            self._nvml = pynvml

    def usage(self) -> list[dict[str, Any]]:
        """Use in percent of the time, memory in bytes."""
        nvml, told = self._nvml, []
        for name in self.names if nvml else ():
            try:
                by_number = nvml.nvmlDeviceGetHandleByIndex
                device = by_number(int(name)) if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID(name)
                use, memory = nvml.nvmlDeviceGetUtilizationRates(device), nvml.nvmlDeviceGetMemoryInfo(device)
            except nvml.NVMLError:  # it tells this to its owner alone
                continue
            told.append({"name": name, "use": use.gpu, "memory": memory.used, "total": memory.total})
        return told
