"""L4, each rank: activations of the feed-forward block.

Shapes: N tokens, F intermediate size of this rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from srt.kernels import cpu


def silu_and_mul(gate_up_N2F: torch.Tensor) -> torch.Tensor:
    """SwiGLU (Shazeer 2020, "GLU Variants Improve Transformer"): silu(gate) · up -> [N, F]."""
    if cpu.serves(gate_up_N2F.device, gate_up_N2F.shape[1] // 2):
        return cpu.silu_and_mul(gate_up_N2F)
    if gate_up_N2F.is_cuda:
        from srt.kernels import activation

        return activation.silu_and_mul(gate_up_N2F)
    gate_NF, up_NF = gate_up_N2F.chunk(2, dim=-1)
    return F.silu(gate_NF).mul_(up_NF)
