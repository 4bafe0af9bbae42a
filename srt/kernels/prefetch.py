"""L4, each rank: weights on their way into the GPU's L2 before the kernel that multiplies them begins.

Shapes: M chunks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from srt.kernels.launch import FOLLOWS

CHUNK_BYTES = 4096

CHUNKS = 128
"""That one program asks for, a thread each."""
PER_PROGRAM = tl.constexpr(CHUNKS)


def chunks(weights: Sequence[torch.Tensor], most_bytes: int) -> torch.Tensor:
    """int64 [M], where the first `most_bytes` of these weights lie, in whole chunks. They may not move."""
    addresses = [
        weight.data_ptr() + offset
        for weight in weights
        for offset in range(0, weight.nbytes - CHUNK_BYTES + 1, CHUNK_BYTES)
    ]
    return torch.tensor(addresses[: most_bytes // CHUNK_BYTES], dtype=torch.int64, device=weights[0].device)


@triton.jit
def fetch(addresses, program, num_chunks):
    """Asks for the chunks of this program, and does not wait for them. Programs below 0 have none."""
    if FOLLOWS:
        m = program * PER_PROGRAM + tl.arange(0, PER_PROGRAM)
        inside = (m >= 0) & (m < num_chunks)
        address = tl.load(addresses + m, mask=inside, other=0)
        tl.inline_asm_elementwise(
            """{
            .reg .pred wanted;
            setp.ne.s64 wanted, $1, 0;
            @wanted cp.async.bulk.prefetch.L2.global [$1], 4096;
            mov.u32 $0, 0;
            }""",
            "=r,l",
            [address],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
