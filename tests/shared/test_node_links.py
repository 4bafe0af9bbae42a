"""What the main processes of two nodes tell each other, over real connections."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable

import pytest

from srt import nodes
from srt.nodes import End, Node0, Nodes
from srt.transport import Meeting

WITHIN = 30.0


@contextlib.asynccontextmanager
async def node_0(num_nodes: int = 2) -> AsyncIterator[tuple[Nodes, Meeting]]:
    hub = Nodes(num_nodes, on_leave=lambda: None)
    try:
        yield hub, await hub.listen("127.0.0.1")
    finally:
        await hub.end("")


async def soon(coroutine: Awaitable) -> object:
    return await asyncio.wait_for(coroutine, WITHIN)


async def num_deaths(hub: Nodes, count: int) -> None:
    while True:
        if len(hub.deaths) == count:
            return
        await asyncio.sleep(0.01)


def test_one_node_waits_for_no_other():
    async def run() -> None:
        await soon(Nodes(1, on_leave=lambda: None).all_ready())

    asyncio.run(run())


def test_node_0_waits_for_all_and_ends_all(caplog):
    async def run() -> None:
        async with node_0(3) as (hub, meeting):
            others = [await Node0.connect(meeting, node) for node in (1, 2)]
            everybody = asyncio.ensure_future(hub.all_ready())
            others[0].ready()
            assert not (await asyncio.wait([everybody], timeout=0.1))[0]
            others[1].ready()
            await soon(everybody)
            hub.serving("http://here:1")
            await hub.end("somebody died")
            await hub.end("and so did others")
            assert [await soon(other.end()) for other in others] == [End("somebody died")] * 2
            for other in others:
                await other.close()

    with caplog.at_level("INFO"):
        asyncio.run(run())
    assert caplog.text.count("HTTP is on node 0: http://here:1") == 2


def test_the_first_fault_is_kept_and_deaths_besides():
    async def run() -> None:
        async with node_0() as (hub, meeting):
            other = await Node0.connect(meeting, 1)
            other.fault("scheduler 1 is stopped")
            other.fault("scheduler 1 was killed", is_death=True)
            assert await soon(hub.fault()) == "scheduler 1 is stopped, on node 1 (127.0.0.1)"
            await soon(num_deaths(hub, 1))
            await other.close()
            await soon(num_deaths(hub, 2))
            assert hub.deaths[0] == "scheduler 1 was killed, on node 1 (127.0.0.1)"
            assert hub.deaths[1] == "node 1 (127.0.0.1) has closed its connection"

    asyncio.run(run())


def test_a_node_that_was_told_to_stop_says_so():
    async def run() -> None:
        left = asyncio.Event()
        hub = Nodes(2, on_leave=left.set)
        other = await Node0.connect(await hub.listen("127.0.0.1"), 1)
        other.leave()
        await soon(left.wait())
        await hub.end("")
        assert await soon(other.end()) == End("")
        await other.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("changes", "node", "reason"), [({"token": "0" * 32}, 1, "token"), ({}, 0, "node 0 already"), ({}, 2, "node 2")]
)
def test_who_does_not_belong_to_the_group_is_not_let_in(changes, node, reason):
    async def run() -> None:
        async with node_0() as (hub, meeting):
            other = await Node0.connect(dataclasses.replace(meeting, **changes), node)
            assert reason in (await soon(other.end())).reason
            await other.close()
            right = await Node0.connect(meeting, 1)
            right.ready()
            await soon(hub.all_ready())
            second = await Node0.connect(meeting, 1)
            assert "node 1 already" in (await soon(second.end())).reason
            assert not hub.deaths
            for link in (right, second):
                await link.close()

    asyncio.run(run())


@pytest.mark.parametrize("first_words", [b"GET / HTTP/1.1\r\n\r\n", b"\n", b"x" * 100_000, b'{"type":"Ready"}\n', b""])
def test_what_a_stranger_says_does_no_harm(first_words):
    async def run() -> None:
        async with node_0() as (hub, meeting):
            reader, writer = await asyncio.open_connection(meeting.host, meeting.links_port)
            writer.write(first_words)
            if not first_words:
                writer.close()
            with contextlib.suppress(ConnectionError):
                await soon(reader.read())
            writer.close()
            other = await Node0.connect(meeting, 1)
            other.ready()
            await soon(hub.all_ready())
            assert not hub.deaths
            await other.close()

    asyncio.run(run())


def test_silence_is_told_on_both_ends(monkeypatch):
    monkeypatch.setattr(nodes, "ALIVE_SECONDS", 3600.0)
    monkeypatch.setattr(nodes, "NODE_SILENT_SECONDS", 0.5)
    monkeypatch.setattr(nodes, "NODE_0_SILENT_SECONDS", 0.5)

    async def run() -> None:
        async with node_0() as (hub, meeting):
            other = await Node0.connect(meeting, 1)
            await asyncio.sleep(0)
            assert await soon(hub.fault()) == "node 1 (127.0.0.1) has not been heard of for 0.5 s"
            assert await soon(other.end()) == End("node 0 (127.0.0.1) has not been heard of for 0.5 s")
            await other.close()

    asyncio.run(run())


def test_who_lives_is_not_taken_for_dead(monkeypatch):
    """Both ends run in one loop, so a machine that stalls holds up both, and its ticks."""
    monkeypatch.setattr(nodes, "ALIVE_SECONDS", 0.05)
    monkeypatch.setattr(nodes, "TICK_SECONDS", 0.1)
    monkeypatch.setattr(nodes, "NODE_SILENT_SECONDS", 0.5)

    async def run() -> None:
        async with node_0() as (hub, meeting):
            other = await Node0.connect(meeting, 1)
            fault, end = asyncio.ensure_future(hub.fault()), asyncio.ensure_future(other.end())
            assert not (await asyncio.wait([fault, end], timeout=1.0))[0]
            fault.cancel()
            end.cancel()
            await other.close()

    asyncio.run(run())
