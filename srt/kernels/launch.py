"""L4, each rank: how kernels follow each other on a GPU, and how many programs keep one busy.

Programmatic dependent launch (compute capability 9.0): a kernel's blocks are set up while the kernel before it still
runs, which hides most of the launch. So each kernel calls `follow` before it touches what another kernel may have
written or may yet read, and is launched with `**LAUNCH`. Weights change under nobody and may be read before.

Under Triton's interpreter kernels run on CPU tensors, one program after the other, and nothing overlaps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED = bool(triton.knobs.runtime.interpret)
OVERLAPS = not INTERPRETED and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
LAUNCH = {"launch_pdl": True} if OVERLAPS else {}
FOLLOWS = tl.constexpr(OVERLAPS)
COMPILED = tl.constexpr(not INTERPRETED)
"""Whether the vendor's own functions are there."""


@triton.jit
def follow():
    """Lets the next kernel's blocks be set up, and waits until all kernels before have finished."""
    if FOLLOWS:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def prefetch(pointers):
    """Asks the L2 for the lines of 128 bytes that hold these places, and waits for nothing."""
    if COMPILED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64)], tl.int32, is_pure=False, pack=1
        )


def warps_for(elements: int) -> int:
    """Warps that read a block of 16-bit elements with about one 16-byte access per thread, at most 16."""
    return min(max(triton.next_power_of_2(elements) // 256, 1), 16)
