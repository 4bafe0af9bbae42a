"""The feed-forward block's first product with SwiGLU in it, against torch in float32."""

import pytest
import torch
import torch.nn.functional as F

from srt.kernels import swiglu_product
from srt.kernels.swiglu_product import fits, swiglu_linear, wins


def draw(num_tokens, size, num_inputs, device, random, dtype=torch.bfloat16):
    x = torch.randn((num_tokens, num_inputs), device=device, generator=random).to(dtype)
    weight = 2 * torch.randn((2 * size, num_inputs), device=device, generator=random) / num_inputs**0.5
    return x, weight.to(dtype)


def expected(x, weight):
    gate, up = F.linear(x.float(), weight.float()).chunk(2, dim=-1)
    return F.silu(gate) * up


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("num_tokens", "size", "num_inputs"),
    [(1, 128, 64), (130, 384, 128), (257, 256, 192), (2500, 512, 256), (65, 14336, 4096), (4200, 3072, 1024)],
)
def test_product(num_tokens, size, num_inputs, dtype, device, random):
    if device.type == "cpu" and num_tokens * size > 70000:
        pytest.skip("takes long when interpreted")
    x, weight = draw(num_tokens, size, num_inputs, device, random, dtype)
    y = swiglu_linear(x, weight)
    assert y.dtype == dtype
    torch.testing.assert_close(y.float(), expected(x, weight), rtol=8e-3, atol=1e-4)


def test_rows_of_a_wider_input(device, random):
    x, weight = draw(5, 128, 64, device, random)
    wide = torch.cat((x, x), dim=1)
    assert torch.equal(swiglu_linear(wide[:, :64], weight), swiglu_linear(x, weight))


def test_fits(device, random):
    x, weight = draw(5, 192, 64, device, random)
    assert not fits(x, weight)
    x, weight = draw(5, 128, 96, device, random)
    assert not fits(x, weight)


def test_wins_where_it_was_measured_to(monkeypatch):
    monkeypatch.setattr(swiglu_product, "processors", lambda device: 132)
    device = torch.device("cpu")
    assert all(wins(num_tokens, 14336, device) for num_tokens in (128, 256, 640, 768, 1024, 2048, 4096, 8192))
    assert not any(wins(num_tokens, 14336, device) for num_tokens in (72, 160, 192, 320))
    assert not any(wins(num_tokens, 7168, device) for num_tokens in (128, 256))
    assert all(wins(num_tokens, 3072, device) for num_tokens in (640, 2048, 4096))
    assert not any(wins(num_tokens, 3072, device) for num_tokens in (72, 128, 256, 384, 768))
