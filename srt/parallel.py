"""L4, each rank: which shard of the model this process holds, and what the ranks tell each other.

Layers call a `ParallelContext` at the places where a sharded model must talk; with one rank it costs nothing. `Ranks`
is the group itself: how its processes meet, agree before they serve, and hear the leader's inboxes.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from srt.config import ConfigError

if TYPE_CHECKING:
    from srt.kernels.all_reduce import Exchange

log = logging.getLogger(__name__)

FOR_EVER = timedelta(days=3650)
"""Idle followers wait for an inbox as long as it takes."""
COMPUTE_TIMEOUT = timedelta(seconds=60)
"""Of a collective between shards, whose ranks all have the same work."""
PAGE = 4096
"""Bytes of the one message that carries an inbox; what does not fit follows in a second one."""
_PAGE_TAG, _REST_TAG = 0, 1
LEAST_SHARE = 0.9
"""Of the free memory of another rank that each must have."""
LIBRARIES = ("torch", "numpy", "triton", "flashinfer-python", "llguidance", "xgrammar", "tokenizers")
"""On which it depends what a rank computes, or which tokens a grammar allows."""


@dataclass(frozen=True)
class ParallelContext:
    """Rank `rank` of `size` that share each layer's weights. `group` is torch.distributed's, needed when size > 1."""

    rank: int = 0
    size: int = 1
    group: Any = None
    exchange: Exchange | None = None  # through which GPUs of one host add up few rows

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size
        assert self.size == 1 or self.group is not None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in x itself."""
        if self.exchange is not None and self.exchange.takes(x):
            self.exchange.all_reduce(x)
        elif self.size > 1:
            _await(self.group.allreduce([x], _in_order(dist.AllreduceOptions())))
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' tensors, one behind the other: [...] -> [size, ...]."""
        assert self.size > 1
        gathered = x.new_empty((self.size, *x.shape))
        _await(self.group._allgather_base(gathered.flatten(0, 1), x, _in_order(distributed_c10d.AllgatherOptions())))
        return gathered

    def shard(self, total: int) -> range:
        """This rank's part of `total` equal items, which divide: shapes are checked before they get here."""
        assert total % self.size == 0
        part = total // self.size
        return range(self.rank * part, (self.rank + 1) * part)


def _in_order(options: Any) -> Any:
    """For a collective on the current stream of a GPU, so that a CUDA graph takes it in like any kernel."""
    options.timeout = COMPUTE_TIMEOUT
    options.asyncOp = False
    return options


def _await(work: Any) -> None:
    """NCCL gives nothing to wait for: what follows in the stream comes after it."""
    if work is not None:
        work.wait()


class Ranks:
    """The processes that share one model; `srt/rendezvous.py` makes the store through which they find each other.

    They are one group, without a time-out, since an inbox may be long in coming; collectives between shards have one of
    their own. A second group would be a second thread of gloo's in each rank, which wakes a hundred times a second.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, backend: str) -> None:
        """Returns once all are there. `backend` is of collectives on GPUs, "gloo" where there are none."""
        backends = f"cpu:gloo,cuda:{backend}"
        dist.init_process_group(backends, store=store, rank=rank, world_size=size, timeout=FOR_EVER)
        self.rank = rank
        self.size = size
        self._backend = backend
        self._group = dist.group.WORLD
        self.context = ParallelContext(rank, size, self._group)
        self._page = torch.zeros(PAGE, dtype=torch.uint8)
        self._page_bytes = memoryview(self._page.numpy())
        if rank > 0:
            self._await_page()

    def share_memory(self, width: int, dtype: torch.dtype) -> ParallelContext:
        """With an exchange for rows of `width` features, if the ranks' GPUs reach each other's memory."""
        device, host = torch.cuda.current_device(), Path("/proc/sys/kernel/random/boot_id").read_text()
        places = self.gather({"host": host, "device": device})
        near = [place["device"] for place in places if place["host"] == host and place["device"] != device]
        reaches = len(near) == self.size - 1 and all(torch.cuda.can_device_access_peer(device, other) for other in near)
        if dtype.itemsize != 2 or not all(rank["reaches"] for rank in self.gather({"reaches": reaches})):
            return self.context
        from srt.kernels.all_reduce import Exchange

        exchange = None
        try:
            exchange = Exchange.open(self.rank, self.size, self._group, width, dtype)
        except RuntimeError as error:
            log.warning("GPUs cannot share their memory, so NCCL adds up few rows too: %s", error)
        # Nobody sends before all can be sent to.
        if not all(rank["opened"] for rank in self.gather({"opened": exchange is not None})):
            return self.context
        return dataclasses.replace(self.context, exchange=exchange)

    def send(self, data: bytes) -> None:
        """To every follower: the data's length, the data, and a second message with what is left.

        Point to point: gloo's broadcast passes the work to a thread first, which takes as long as the work itself.
        """
        page = self._page_bytes
        fits = min(len(data), PAGE - 8)
        page[:8] = len(data).to_bytes(8, "little")
        page[8 : 8 + fits] = data[:fits]
        self._send(self._page, _PAGE_TAG)
        if fits < len(data):
            self._send(torch.from_numpy(np.frombuffer(data[fits:], np.uint8).copy()), _REST_TAG)

    def receive(self) -> bytes:
        """What the leader sent, in its order."""
        self._awaited.wait()
        length = int.from_bytes(self._page_bytes[:8], "little")
        data = bytes(self._page_bytes[8 : 8 + min(length, PAGE - 8)])
        self._await_page()
        if len(data) == length:
            return data
        rest = torch.empty(length - len(data), dtype=torch.uint8)
        self._group.recv([rest], 0, _REST_TAG).wait()
        return data + rest.numpy().tobytes()

    def gather(self, value: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Each rank's value (JSON, a page at most), by rank."""
        data = json.dumps(value).encode()
        own = torch.from_numpy(np.frombuffer(data.ljust(PAGE), np.uint8).copy())
        pages = [torch.empty_like(own) for _ in range(self.size)]
        self._group.allgather(pages, own).wait()
        return [json.loads(page.numpy().tobytes()) for page in pages]

    def close(self) -> None:
        """NCCL would wait for the end of CUDA graphs that hold its collectives; it ends with the process."""
        if self._backend == "gloo":
            dist.destroy_process_group()

    def _send(self, data: torch.Tensor, tag: int) -> None:
        for sent in [self._group.send([data], rank, tag) for rank in range(1, self.size)]:
            sent.wait()

    def _await_page(self) -> None:
        """A step ahead: gloo sends nothing before it knows where it shall go, and the leader would wait for that."""
        self._awaited = self._group.recv([self._page], 0, _PAGE_TAG)


def fingerprint(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What must be equal on ranks that are to compute the same numbers. `settings` are the configuration's."""
    return {
        **settings,
        "python": platform.python_version(),
        **{name: _version(name) for name in LIBRARIES},
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
        "number of threads": torch.get_num_threads(),
    }


def _version(library: str) -> str:
    try:
        return metadata.version(library)
    except metadata.PackageNotFoundError:
        return "missing"


def check_alike(fingerprints: list[dict[str, Any]]) -> None:
    """ConfigError that names the first rank and thing that is not as on rank 0."""
    for rank, other in enumerate(fingerprints):
        for name, value in fingerprints[0].items():
            if other[name] != value:
                raise ConfigError(f"the {name} of rank {rank} is {other[name]}, of rank 0 {value}; they must be equal")


def check_balance(free_memory: list[int]) -> None:
    """ConfigError that names two ranks of which one has too little memory beside the other."""
    least, most = (pick(range(len(free_memory)), key=free_memory.__getitem__) for pick in (min, max))
    if free_memory[least] < LEAST_SHARE * free_memory[most]:
        raise ConfigError(
            f"rank {least} has {free_memory[least] / 2**30:.2f} GiB of free memory and rank {most} "
            f"{free_memory[most] / 2**30:.2f} GiB; the K/V pool is as large as the least allows, so each rank needs "
            f"at least {LEAST_SHARE:.0%} of what another has: end what else uses the memory of rank {least}"
        )
