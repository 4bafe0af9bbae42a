"""RMS norms against the formula in float32."""

import pytest
import torch

from srt.kernels.norm import rms_norm

SHAPES = [(1, 64), (3, 576), (5, 1024), (2, 4096), (4, 5120)]
EPS = 1e-5


def formula(x_ND, weight_D):
    x_ND = x_ND.float()
    return x_ND / (x_ND.square().mean(-1, keepdim=True) + EPS).sqrt() * weight_D.float()


def draw(shape, device, random, dtype):
    x = torch.randn(shape, device=device, generator=random) * torch.rand((shape[0], 1), device=device) * 4
    weight = torch.rand(shape[1], device=device, generator=random) + 0.5
    return x.to(dtype), weight.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(shape, dtype, device, random):
    x, weight = draw(shape, device, random, dtype)
    expected = formula(x, weight)
    torch.testing.assert_close(rms_norm(x, weight, EPS).float(), expected.to(dtype).float(), rtol=8e-3, atol=1e-5)


def test_rows_of_a_wider_tensor(device, random):
    wide = torch.randn((4, 200), device=device, generator=random).bfloat16()
    weight = torch.ones(128, device=device).bfloat16()
    part = wide[:, 8:136]
    assert torch.equal(rms_norm(part, weight, EPS), rms_norm(part.contiguous(), weight, EPS))


def test_no_tokens(device):
    empty = torch.empty((0, 64), dtype=torch.bfloat16, device=device)
    assert rms_norm(empty, torch.ones(64, dtype=torch.bfloat16, device=device), EPS).shape == (0, 64)
