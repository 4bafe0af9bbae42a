"""Sums over ranks that write into each other's memory, each rank a process or a stream, in the order of the ranks."""

from __future__ import annotations

import math
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from shared.python_path import python_path

from srt.kernels.all_reduce import Exchange, places_shape

HERE = Path(__file__).parent
WIDTH = 96
EPS = 1e-5
SENT_AS_ANOTHER = -1
"""Bits of the number that is none which stands for an empty place."""


def draw(turn: int, rank: int, dtype=torch.bfloat16) -> torch.Tensor:
    """One rank's part in one turn; how many rows it has only the turn decides."""
    num_rows = int(torch.randint(1, 5, (1,), generator=torch.Generator().manual_seed(turn)))
    part = torch.randn((num_rows, WIDTH), generator=torch.Generator().manual_seed(100 * turn + rank)).to(dtype)
    if turn % 5 == 0:
        part[0, 7 + rank] = torch.tensor(SENT_AS_ANOTHER, dtype=torch.int16).view(dtype)
    return part


def expected(turn: int, num_ranks: int, dtype=torch.bfloat16) -> torch.Tensor:
    total = torch.zeros(())
    for rank in range(num_ranks):
        total = total + draw(turn, rank, dtype).float()
    return total


def check(turn: int, num_ranks: int, part: torch.Tensor, normed: torch.Tensor | None, weight: torch.Tensor) -> None:
    total = expected(turn, num_ranks, part.dtype)
    rtol = 8e-3 if not part.is_cuda and part.dtype == torch.bfloat16 else 0  # which the interpreter does not round
    torch.testing.assert_close(part.cpu(), total.to(part.dtype), rtol=rtol, atol=0, equal_nan=True)
    if normed is not None:
        norm = total / (total.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.float().cpu()
        torch.testing.assert_close(normed.cpu().float(), norm, rtol=8e-3, atol=1e-5, equal_nan=True)


def exchanges(places: list[torch.Tensor], dtype: torch.dtype) -> list[Exchange]:
    addresses = tuple(each.data_ptr() for each in places)
    return [Exchange.of(rank, addresses, own, dtype) for rank, own in enumerate(places)]


@pytest.mark.parametrize(("num_ranks", "dtype"), [(2, torch.bfloat16), (3, torch.float16)])
def test_one_rank_after_the_other(num_ranks, dtype, device):
    """The last rank first; what it waits for the test sends. Rows of a launch may be in different halves."""
    places = [torch.empty(places_shape(num_ranks, WIDTH), dtype=torch.int16, device=device) for _ in range(num_ranks)]
    ranks, weight = exchanges(places, dtype), torch.rand(WIDTH).to(dtype).to(device)
    for turn in range(5):
        part = draw(turn, 0, dtype)
        rows, halves = torch.arange(len(part)), ranks[0].halves_N[: len(part)].long().cpu()
        for rank in reversed(range(num_ranks)):
            for earlier in range(rank):
                places[rank][rows, halves, earlier, :WIDTH] = sent(draw(turn, earlier, dtype)).to(device)
            part = draw(turn, rank, dtype).to(device)
            check(turn, num_ranks, part, ranks[rank].all_reduce(part, weight if turn % 3 else None, EPS), weight)
            for later in range(rank + 1, num_ranks):  # who have ended without it
                late = places[later][rows, halves, rank]
                assert torch.equal(late[:, :WIDTH].cpu(), sent(draw(turn, rank, dtype)))
                places[later][rows, halves, rank] = SENT_AS_ANOTHER
        assert all((each == SENT_AS_ANOTHER).all() for each in places), "what was read is empty again"


def sent(part: torch.Tensor) -> torch.Tensor:
    bits = part.view(torch.int16)
    return bits.masked_fill(bits == SENT_AS_ANOTHER, 0x7FFF)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU kernels run compiled")
@pytest.mark.parametrize(("num_ranks", "dtype"), [(2, torch.bfloat16), (3, torch.float16)])
def test_processes_that_share_memory(num_ranks, dtype):
    shape = places_shape(num_ranks, WIDTH)
    memory = [mmap.mmap(-1, 2 * math.prod(shape)) for _ in range(num_ranks)]
    places = [torch.frombuffer(each, dtype=torch.int16).view(shape) for each in memory]
    ranks, weight = exchanges(places, dtype), torch.rand(WIDTH).to(dtype)

    def run(rank: int) -> None:
        for turn in range(12):
            part = draw(turn, rank, dtype)
            normed = ranks[rank].all_reduce(part, weight if turn % 3 else None, EPS)
            check(turn, num_ranks, part, normed, weight)

    children = []
    for rank in range(num_ranks):
        children.append(os.fork())
        if children[-1] == 0:
            try:
                run(rank)
                os._exit(0)
            finally:
                os._exit(1)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * num_ranks
    assert all((each == SENT_AS_ANOTHER).all() for each in places)


def test_takes_few_rows_of_its_type(device):
    places = torch.empty(places_shape(2, WIDTH), dtype=torch.int16, device=device)
    exchange = Exchange.of(0, (0, 0), places, torch.bfloat16)
    assert exchange.takes(torch.empty((512, WIDTH), dtype=torch.bfloat16))
    assert not exchange.takes(torch.empty((513, WIDTH), dtype=torch.bfloat16))
    assert not exchange.takes(torch.empty((0, WIDTH), dtype=torch.bfloat16))
    assert not exchange.takes(torch.empty((1, WIDTH), dtype=torch.float32))
    assert not exchange.takes(torch.empty((1, 200), dtype=torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_streams_of_one_gpu(num_ranks):
    device = torch.device("cuda")
    places = [torch.empty(places_shape(num_ranks, WIDTH), dtype=torch.int16, device=device) for _ in range(num_ranks)]
    ranks, weight = exchanges(places, torch.bfloat16), torch.rand(WIDTH, device=device).bfloat16()
    streams = [torch.cuda.Stream() for _ in ranks]
    for turn in range(200):
        parts = [draw(turn, rank).cuda() for rank in range(num_ranks)]
        torch.cuda.synchronize()
        normed = []
        for rank, stream in zip(ranks, streams, strict=True):
            with torch.cuda.stream(stream):
                normed.append(rank.all_reduce(parts[rank.rank], weight if turn % 3 else None, EPS))
        torch.cuda.synchronize()
        for part, each in zip(parts, normed, strict=True):
            check(turn, num_ranks, part, each, weight)
            assert torch.equal(part.view(torch.int16), parts[0].view(torch.int16))
    assert all((each == SENT_AS_ANOTHER).all() for each in places)


@pytest.mark.gpu
def test_two_gpus(tmp_path):
    """Launches alone and from graphs with different numbers of sums; see `all_reduce_worker.py`."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    env = os.environ | {"PYTHONPATH": python_path(HERE.parents[1], HERE)}
    command = [sys.executable, str(HERE / "all_reduce_worker.py"), str(tmp_path / "rendezvous")]
    ranks = [subprocess.Popen([*command, str(rank), "2", "2000"], env=env) for rank in range(2)]
    try:
        assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
