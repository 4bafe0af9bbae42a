"""Linear layers as GPUs compute them, from the residual stream and into it, against torch in float32."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F

from srt.layers.context import LayerContext
from srt.layers.layernorm import RMSNorm
from srt.layers.linear import ColumnParallelLinear, RowParallelLinear
from srt.parallel import ParallelContext


class KernelContext(LayerContext):
    """Layers take a GPU's way, on a CPU through the interpreter."""

    on_gpu = True


@dataclass(frozen=True)
class Apart(ParallelContext):
    """A rank that is told of no other's part."""

    group: object = "nobody"

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_tokens", [3, 70])
def test_parts_of_the_stream_add_up(num_tokens, bias, num_ranks, device, random):
    """What ranks put into it are together the product, the bias and the stream itself, each once."""
    num_inputs, num_outputs = 192, 40
    tensors = {"o.weight": (num_outputs, num_inputs), "o.bias": (num_outputs,)}
    tensors = {
        name: (torch.randn(shape, device=device, generator=random) / 8).bfloat16() for name, shape in tensors.items()
    }
    x, stream = (torch.randn((num_tokens, size), device=device, generator=random) for size in (192, num_outputs))
    x, stream = x.bfloat16(), stream.bfloat16()
    parts = []
    for rank in range(num_ranks):
        context = KernelContext(torch.bfloat16, device, Apart(rank, num_ranks))
        layer = RowParallelLinear(context, "o", num_inputs, num_outputs, bias)
        for name, slot in layer.weight_slots():
            slot.fill(tensors[name])
        own, part = context.parallel.shard(num_inputs), stream.clone()
        assert layer.onto(part, x[:, own.start : own.stop]) is None
        parts.append(part.float())
    expected = F.linear(x.float(), tensors["o.weight"].float(), tensors["o.bias"].float() if bias else None)
    torch.testing.assert_close(sum(parts), expected + stream.float(), rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 20])
def test_the_norm_of_the_stream_is_multiplied(num_tokens, gated, device, random):
    """Whether it is a launch of its own or not."""
    context = KernelContext(torch.bfloat16, device, ParallelContext())
    layer = ColumnParallelLinear(context, 192, {"gate": (20, range(20)), "up": (20, range(20))})
    norm = RMSNorm(context, 192, eps=1e-6)
    layer.weight_OI.copy_(torch.randn((40, 192), device=device, generator=random) / 14)
    norm.weight_D.copy_(torch.rand(192, device=device, generator=random) + 0.5)
    stream = torch.randn((num_tokens, 192), device=device, generator=random).bfloat16()
    normed = F.rms_norm(stream.float(), (192,), norm.weight_D.float(), 1e-6)
    expected = F.linear(normed, layer.weight_OI.float())
    if gated:
        gate, up = expected.chunk(2, dim=-1)
        expected = F.silu(gate) * up
    torch.testing.assert_close(layer.of_normed(norm, None, stream, gated).float(), expected, rtol=1e-2, atol=2e-2)
