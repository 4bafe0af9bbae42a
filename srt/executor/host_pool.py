"""L4, each rank: K/V of evicted prefixes in pinned host memory, and their way there and back. Owns a stream for it.

Steps never wait for a copy to the host: a kernel gathers what goes there, and copies leave from its result. What comes
back a step does wait for, on the device. All copies follow each other on one stream, in the order of the steps, so a
slot of host memory is read and written in the ledger's order.

Shapes: L layers, G key/value heads of this rank, C head_dim, T slots.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from srt.executor.upload import upload
from srt.scheduler.schedule_batch import Copies

STAGES, STAGE_BYTES = 4, 32 << 20


class HostPool:
    def __init__(self, kv_L2TGC: torch.Tensor, host_tokens: int, page_size: int):
        if kv_L2TGC.element_size() == 1:  # few operations know 8-bit floats
            kv_L2TGC = kv_L2TGC.view(torch.uint8)
        num_layers, _, _, *heads = kv_L2TGC.shape
        token_shape = (num_layers, 2, *heads)
        token_bytes = kv_L2TGC[:, :, 0].numel() * kv_L2TGC.element_size()
        self._kv_TL2GC = kv_L2TGC.permute(2, 0, 1, 3, 4)
        # Zeros, since what is measured at the start copies it to the pool before anything was saved.
        self._host = torch.zeros((host_tokens + page_size, *token_shape), dtype=kv_L2TGC.dtype, pin_memory=True)
        stage_shape = (max(1, STAGE_BYTES // token_bytes), *token_shape)
        self._stages = [torch.empty(stage_shape, dtype=kv_L2TGC.dtype, device=kv_L2TGC.device) for _ in range(STAGES)]
        self._done = [torch.cuda.Event() for _ in range(STAGES)]  # with the last use of each
        self._next = 0
        self._copies = torch.cuda.Stream(kv_L2TGC.device)

    def copy(self, copies: Copies) -> None:
        """On the current stream's behalf; nothing is waited for on the host."""
        compute = torch.cuda.current_stream(self._kv_TL2GC.device)
        for in_pool, on_host in self._parts(copies.saved_from, copies.saved_to):
            stage, done = self._take_stage(compute)
            torch.index_select(self._kv_TL2GC, 0, self._on_device(in_pool), out=stage[: len(in_pool)])
            self._copies.wait_stream(compute)
            with torch.cuda.stream(self._copies):
                for begin, end in _runs(on_host):
                    first = int(on_host[begin])
                    self._host[first : first + end - begin].copy_(stage[begin:end], non_blocking=True)
                done.record()
        for in_pool, on_host in self._parts(copies.loaded_to, copies.loaded_from):
            stage, done = self._take_stage(self._copies)
            with torch.cuda.stream(self._copies):
                for begin, end in _runs(on_host):
                    first = int(on_host[begin])
                    stage[begin:end].copy_(self._host[first : first + end - begin], non_blocking=True)
            compute.wait_stream(self._copies)
            self._kv_TL2GC.index_copy_(0, self._on_device(in_pool), stage[: len(in_pool)])
            done.record(compute)

    def _parts(self, in_pool: np.ndarray, on_host: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Pairs of slots, as many at a time as a stage holds."""
        size = len(self._stages[0])
        for begin in range(0, len(in_pool), size):
            yield in_pool[begin : begin + size], on_host[begin : begin + size]

    def _take_stage(self, user: torch.cuda.Stream) -> tuple[torch.Tensor, torch.cuda.Event]:
        """The one used longest ago, once `user` has seen that use end."""
        index = self._next
        self._next = (index + 1) % STAGES
        user.wait_event(self._done[index])
        return self._stages[index], self._done[index]

    def _on_device(self, slots: np.ndarray) -> torch.Tensor:
        return upload(self._kv_TL2GC.device, slots)[0]


def _runs(slots: np.ndarray) -> Iterator[tuple[int, int]]:
    """Where `slots` count up one by one, as far as they do: one copy each."""
    begins = [0, *(np.flatnonzero(np.diff(slots) != 1) + 1).tolist(), len(slots)]
    return zip(begins, begins[1:], strict=False)
