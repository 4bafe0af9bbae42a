"""Linear layers of a few tokens, with all that is computed beside the product, against torch in float32."""

import pytest
import torch
import torch.nn.functional as F

from srt.kernels.linear import MOST_TOKENS, small_batch_linear
from srt.kernels.tile_product import Tiles, multiply_tiles

SHAPES = [(64, 96), (24, 576), (20, 1024), (10, 3072), (18, 1100), (2100, 1100), (5000, 4096)]
EPS = 1e-6


def draw(shape, num_tokens, device, random, dtype=torch.bfloat16):
    num_outputs, num_inputs = shape
    x = torch.randn((num_tokens, num_inputs), device=device, generator=random).to(dtype)
    weight = (torch.randn(shape, device=device, generator=random) / num_inputs**0.5).to(dtype)
    return x, weight


def close(actual, expected):
    # Of the output's type, of sums near 1 in float32.
    torch.testing.assert_close(actual.float(), expected, rtol=8e-3, atol=2e-5)


def normalised(x_NI, weight_I):
    x_NI = x_NI.float()
    return x_NI / (x_NI.square().mean(-1, keepdim=True) + EPS).sqrt() * weight_I.float()


@pytest.mark.parametrize("num_tokens", [1, 2, 4, 16, 27, 33, MOST_TOKENS])
@pytest.mark.parametrize("shape", SHAPES)
def test_product(shape, num_tokens, device, random):
    if device.type == "cpu" and shape[0] > 2000:
        pytest.skip("takes long when interpreted")
    x, weight = draw(shape, num_tokens, device, random)
    close(small_batch_linear(x, weight), F.linear(x.float(), weight.float()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_bias_norm_and_residual(num_tokens, dtype, device, random):
    x, weight = draw((50, 576), num_tokens, device, random, dtype)
    x *= 3
    bias = torch.randn(50, device=device, generator=random).to(dtype)
    scale = (torch.rand(576, device=device, generator=random) + 0.5).to(dtype)
    residual = torch.randn((num_tokens, 50), device=device, generator=random).to(dtype)
    expected = F.linear(normalised(x, scale), weight.float(), bias.float()) + residual.float()
    y = small_batch_linear(x, weight, bias, norm=(scale, EPS), out_NO=residual, adds=True)
    assert y is residual
    close(y, expected)


@pytest.mark.parametrize("num_tokens", [1, 3])
@pytest.mark.parametrize("shape", [(40, 576), (20, 1024)])
def test_gated(shape, num_tokens, device, random):
    x, weight = draw(shape, num_tokens, device, random)
    weight *= 2
    scale = (torch.rand(shape[1], device=device, generator=random) + 0.5).bfloat16()
    gate, up = F.linear(normalised(x, scale), weight.float()).chunk(2, dim=-1)
    close(small_batch_linear(x, weight, norm=(scale, EPS), gated=True), F.silu(gate) * up)


def test_rows_of_a_wider_input(device, random):
    x, weight = draw((40, 96), 3, device, random)
    wide = torch.cat((x, x), dim=1)
    assert torch.equal(small_batch_linear(wide[:, :96], weight), small_batch_linear(x, weight))


def test_a_sum_is_the_same_every_time(device, random):
    x, weight = draw((24, 1100), 4, device, random)
    first = small_batch_linear(x, weight)
    assert all(torch.equal(small_batch_linear(x, weight), first) for _ in range(3))


@pytest.mark.parametrize(
    ("num_tokens", "shape", "blocks"),
    [
        (5, (100, 256), Tiles(64, 64, 1, 4, 4)),
        (16, (128, 512), Tiles(128, 128, 4, 3, 8)),
        (33, (96, 320), Tiles(64, 64, 3, 4, 4)),  # the last part has fewer inputs
        (64, (256, 256), Tiles(128, 64, 2, 3, 4)),
    ],
)
@pytest.mark.parametrize("extras", ["", "bias", "residual", "gated"])
def test_tiles_and_parts(num_tokens, shape, blocks, extras, device, random):
    x, weight = draw(shape, num_tokens, device, random)
    bias = torch.randn(shape[0], device=device, generator=random).bfloat16() if extras == "bias" else None
    expected = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    if extras == "gated":
        gate, up = expected.chunk(2, dim=-1)
        expected = F.silu(gate) * up
    y = torch.randn(expected.shape, device=device, generator=random).bfloat16()
    if extras == "residual":
        expected += y.float()
    for _ in range(2):  # whoever comes last leaves the counters as they were
        result = y.clone()
        multiply_tiles(x, weight, bias, result, adds=extras == "residual", gated=extras == "gated", blocks=blocks)
        close(result, expected)


@pytest.mark.parametrize("num_tokens", [1, 3, 20])
def test_result_in_float32(num_tokens, device, random):
    x, weight = draw((48, 576), num_tokens, device, random)
    y = torch.empty((num_tokens, 48), device=device)
    assert small_batch_linear(x, weight, out_NO=y) is y
    torch.testing.assert_close(y, F.linear(x.float(), weight.float()), rtol=1e-4, atol=2e-5)
