"""SwiGLU against the formula in float32."""

import pytest
import torch
import torch.nn.functional as F

from srt.kernels.activation import silu_and_mul


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 64), (3, 1536), (2, 3072), (1, 14336)])
def test_silu_and_mul(shape, dtype, device, random):
    num_tokens, size = shape
    gate_up = (torch.randn((num_tokens, 2 * size), device=device, generator=random) * 4).to(dtype)
    gate, up = gate_up.float().chunk(2, dim=-1)
    torch.testing.assert_close(silu_and_mul(gate_up).float(), F.silu(gate) * up, rtol=8e-3, atol=1e-5)


def test_no_tokens(device):
    assert silu_and_mul(torch.empty((0, 64), dtype=torch.bfloat16, device=device)).shape == (0, 32)
