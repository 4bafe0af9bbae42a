"""The relay's real process: a rank elsewhere writes, and node 0's board shows it; nobody else can write."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import socket
import time
from collections.abc import AsyncIterator, Callable

import pytest
from shared.test_config import MODEL

from srt.board import RECORD_BYTES, Board, Decision, RankRecord
from srt.board_relay import Mirror
from srt.config import ConfigError, ServerConfig
from srt.process import Child, ChildSpec
from srt.transport import Endpoints, Meeting

DEADLINE = 60.0
CONFIG = ServerConfig(tp_size=4, nnodes=2, dist_init_addr="127.0.0.1:5000")
"""Ranks 2 and 3 are elsewhere."""


@contextlib.asynccontextmanager
async def relay(folder: str) -> AsyncIterator[tuple[Board, Meeting]]:
    endpoints = Endpoints(folder)
    board = Board.create(endpoints.board, CONFIG.tp_size)
    meeting = Meeting("127.0.0.1", 0, 0, "a" * 32)
    spec = ChildSpec("board relay", CONFIG, endpoints, MODEL, "", "", "dummy", None, meeting=meeting)
    child = await Child.start("srt.board_relay:main", spec)
    try:
        answer = await child.ready()
        yield board, dataclasses.replace(meeting, board_port=answer["port"])
        assert not child.has_ended
    finally:
        await child.stop(10)
        assert await child.obituary() == f"board relay (pid {child.pid}) ended with exit code 0"


async def shows(board: Board, rank: int, step: int) -> None:
    await until(lambda: board.read(rank).step == step)


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def decision(step: int) -> Decision:
    return Decision(step, step * 7, *range(7))


def test_the_board_of_node_0_shows_ranks_elsewhere(tmp_path):
    async def run() -> None:
        async with relay(str(tmp_path)) as (board, meeting):
            elsewhere = Board.create(str(tmp_path / "elsewhere"), CONFIG.tp_size)
            records = {rank: RankRecord(elsewhere, rank) for rank in (2, 3)}
            for rank, record in records.items():
                record.mirror(Mirror(meeting, rank).write)
            for step in range(1, 100):
                for rank, record in records.items():
                    record.step(decision(step * rank))
            for rank in records:
                await shows(board, rank, 99 * rank)
                assert board.read(rank).recent == elsewhere.read(rank).recent
                assert board.read(rank).pid == os.getpid()
            assert board.read(0).pid == board.read(1).pid == 0
            records[3].grammar(5)  # nothing follows before there is an inbox
            await until(lambda: board.has_grammar(3, 5))
        for step in range(100, 1000):
            records[2].step(decision(step))  # the relay's end is others' to tell

    asyncio.run(run())


def test_nobody_else_writes_to_the_board(tmp_path, capfd):
    async def run() -> None:
        async with relay(str(tmp_path)) as (board, meeting):
            with pytest.raises(ConfigError, match=r"127\.0\.0\.1, does not know the token that rank 2 brought"):
                Mirror(dataclasses.replace(meeting, token="b" * 32), 2)
            for rank in (0, 1, 4):  # here, here, nowhere
                with pytest.raises(ConfigError):
                    Mirror(meeting, rank)
            for words in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100):
                with socket.create_connection((meeting.host, meeting.board_port)) as stranger:
                    stranger.sendall(words)
            intruder = Mirror(meeting, 2)
            intruder.write(RECORD_BYTES - 1, b"xx", more=False)  # into the record of rank 3
            record = RankRecord(Board.create(str(tmp_path / "elsewhere"), 4), 3)
            record.mirror(Mirror(meeting, 3).write)
            record.step(decision(5))
            await shows(board, 3, 5)
            assert board.read(3).recent == (decision(5),)
            assert [board.read(rank).pid for rank in range(3)] == [0, 0, 0]

    asyncio.run(run())
    log = capfd.readouterr().err
    assert log.count("brought a wrong token") >= 4
    assert "wrote beyond the record of rank 2" in log


def test_a_relay_that_is_gone_is_named():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        meeting = Meeting("127.0.0.1", 0, probe.getsockname()[1], "a" * 32)
        with pytest.raises(ConfigError, match=f"rank 2 does not reach port {meeting.board_port} of node 0"):
            Mirror(meeting, 2)
