"""Shared, main processes: what the nodes of one group tell each other, so that they start, fault and end together.

Node 0 listens; every other node has one connection to it, on which both ends say at least twice a second that they
live. A node that is cut off, stopped or dead is so told from one that has nothing to say.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import secrets
from collections.abc import Callable
from typing import Any

import msgspec

from srt.config import ConfigError
from srt.transport import Meeting

ALIVE_SECONDS = 0.5
TICK_SECONDS = 0.25
NODE_SILENT_SECONDS = 2.5
"""How long node 0 waits for a sign of life of a node whose main process has nothing else to do."""
NODE_0_SILENT_SECONDS = 10.0
"""The same of node 0's main process, which has: no client waits for the others to notice."""
HELLO_SECONDS = 5.0
END_SECONDS = 1.0
"""How long the last message may take to leave."""

log = logging.getLogger(__name__)


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first message of a node."""

    token: str
    node: int


class Alive(msgspec.Struct, frozen=True, tag=True):
    pass


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The node's ranks can serve."""


class Fault(msgspec.Struct, frozen=True, tag=True):
    """Why the group cannot go on."""

    sentence: str
    is_death: bool  # of a process, by a signal


class Leave(msgspec.Struct, frozen=True, tag=True):
    """The node was told to stop, and so the group is."""


class Serving(msgspec.Struct, frozen=True, tag=True):
    url: str  # where node 0 speaks HTTP


class End(msgspec.Struct, frozen=True, tag=True):
    """Node 0's last message."""

    reason: str  # empty if nothing went wrong


FromNode = Hello | Alive | Ready | Fault | Leave
FromNode0 = Alive | Serving | End


class LinkLost(Exception):
    """With what is known of the other end, to be read behind its name."""


class Link:
    """One end of a connection. Messages are lines of JSON."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, incoming: Any, patience: float
    ) -> None:
        """`incoming` is the type of what the other end says, which is heard of every `patience` seconds."""
        self._reader = reader
        self._writer = writer
        self._decoder = msgspec.json.Decoder(incoming)
        self._patience = patience
        self.peer = writer.get_extra_info("peername")[0]

    def send(self, message: FromNode | FromNode0) -> None:
        self._writer.write(msgspec.json.encode(message) + b"\n")

    async def receive(self) -> Any:
        """The next message that says more than that the other end lives; LinkLost if there will be none."""
        while True:
            try:
                message = self._decoder.decode(await self._line())
            except ConnectionError:  # it has died with something unread
                raise LinkLost("has closed its connection") from None
            except OSError as error:
                raise LinkLost(f"cannot be reached any more: {error.strerror}") from None
            except ValueError as error:  # msgspec's, or of a line without an end
                raise LinkLost(f"said what cannot be understood: {error}") from None
            if not isinstance(message, Alive):
                return message

    async def _line(self) -> bytes:
        """Silence is counted in ticks: time in which this process was stopped too does not count."""
        coming = asyncio.ensure_future(self._reader.readline())
        silent = 0.0
        try:
            while not (await asyncio.wait([coming], timeout=TICK_SECONDS))[0]:
                silent += TICK_SECONDS
                if silent >= self._patience:
                    raise LinkLost(f"has not been heard of for {self._patience:g} s")
        finally:
            coming.cancel()
        line = coming.result()
        if not line:
            raise LinkLost("has closed its connection")
        return line

    async def live(self) -> None:
        """Says so, until it is cancelled."""
        while True:
            self.send(Alive())
            await asyncio.sleep(ALIVE_SECONDS)

    async def close(self) -> None:
        with contextlib.suppress(OSError, asyncio.TimeoutError):
            await asyncio.wait_for(self._writer.drain(), END_SECONDS)
        self._writer.close()


class Nodes:
    """Node 0's end: all other nodes. `on_leave` is called when one of them was told to stop."""

    def __init__(self, num_nodes: int, on_leave: Callable[[], None]) -> None:
        self.deaths: list[str] = []
        self._others = range(1, num_nodes)
        self._on_leave = on_leave
        self._token = secrets.token_hex(16)
        self._links: dict[int, Link] = {}
        self._ready: set[int] = set()
        self._all_ready = asyncio.Event()
        self._fault: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._server: asyncio.Server | None = None
        self._has_ended = False

    async def listen(self, host: str) -> Meeting:
        """The meeting still lacks a port for the board. OSError if `host` is no address of this machine."""
        self._server = await asyncio.start_server(self._attend, host, 0)
        return Meeting(host, self._server.sockets[0].getsockname()[1], 0, self._token)

    async def all_ready(self) -> None:
        if self._others:
            await self._all_ready.wait()

    async def fault(self) -> str:
        """Returns once a node reports a fault or is lost, with the sentence that names it."""
        return await asyncio.shield(self._fault)

    def serving(self, url: str) -> None:
        for link in self._links.values():
            link.send(Serving(url))

    async def end(self, reason: str) -> None:
        """Tells the nodes that the group ends; only the first call counts."""
        if self._has_ended:
            return
        self._has_ended = True
        if self._server is not None:
            self._server.close()
        for link in self._links.values():
            link.send(End(reason))
        await asyncio.gather(*(link.close() for link in self._links.values()))

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, from its first message to its end."""
        link = Link(reader, writer, FromNode, NODE_SILENT_SECONDS)
        node = await self._admit(link)
        if node is None:
            await link.close()
            return
        name = f"node {node} ({link.peer})"
        living = asyncio.ensure_future(link.live())
        try:
            while True:
                match await link.receive():
                    case Ready():
                        self._ready.add(node)
                        if len(self._ready) == len(self._others):
                            self._all_ready.set()
                    case Fault(sentence, is_death):
                        self._note(f"{sentence}, on {name}", is_death)
                    case Leave():
                        log.info("%s was told to stop", name)
                        self._on_leave()
        except LinkLost as loss:
            if not self._has_ended:
                self._note(f"{name} {loss}", is_death=True)
        finally:
            living.cancel()

    async def _admit(self, link: Link) -> int | None:
        """The node that a new connection comes from; None if it is none of ours."""
        try:
            hello = await asyncio.wait_for(link.receive(), HELLO_SECONDS)
        except (LinkLost, asyncio.TimeoutError):
            return None
        if not isinstance(hello, Hello) or not hmac.compare_digest(hello.token.encode(), self._token.encode()):
            log.warning("%s brought a wrong token; it was not let in", link.peer)
            link.send(End("node 0 does not know the token that this node brought"))
            return None
        if hello.node not in self._others or hello.node in self._links:
            log.warning("%s says that it is node %d, which is there already or none", link.peer, hello.node)
            link.send(End(f"there is a node {hello.node} already, or --nnodes is lower"))
            return None
        self._links[hello.node] = link
        return hello.node

    def _note(self, sentence: str, is_death: bool) -> None:
        log.error("%s", sentence)
        if is_death:
            self.deaths.append(sentence)
        if not self._fault.done():
            self._fault.set_result(sentence)


class Node0:
    """Another node's end."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._ended: asyncio.Future[End] = asyncio.ensure_future(self._listen())
        self._living = asyncio.ensure_future(link.live())

    @classmethod
    async def connect(cls, meeting: Meeting, node: int) -> Node0:
        """ConfigError if nobody answers there."""
        host, port = meeting.host, meeting.links_port
        try:
            streams = await asyncio.wait_for(asyncio.open_connection(host, port), HELLO_SECONDS)
        except (OSError, asyncio.TimeoutError) as error:
            raise ConfigError(f"node 0 cannot be reached at port {port} of {host}: {error or 'no answer'}") from None
        link = Link(*streams, FromNode0, NODE_0_SILENT_SECONDS)
        link.send(Hello(meeting.token, node))
        return cls(link)

    def ready(self) -> None:
        self._link.send(Ready())

    def fault(self, sentence: str, is_death: bool = False) -> None:
        self._link.send(Fault(sentence, is_death))

    def leave(self) -> None:
        self._link.send(Leave())

    async def end(self) -> End:
        """Returns once the group ends or node 0 is lost."""
        return await asyncio.shield(self._ended)

    async def close(self) -> None:
        self._living.cancel()
        self._ended.cancel()
        await self._link.close()

    async def _listen(self) -> End:
        try:
            while True:
                match await self._link.receive():
                    case Serving(url):
                        log.info("HTTP is on node 0: %s", url)
                    case End() as end:
                        return end
        except LinkLost as loss:
            return End(f"node 0 ({self._link.peer}) {loss}")
