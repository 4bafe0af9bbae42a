"""L4, each rank: linear layers, split over ranks by output (column) or by input (row), several fused into one matmul.

Shapes: N tokens, I input features, O output features, both of this rank's shard.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from srt.layers.activation import silu_and_mul
from srt.layers.context import LayerContext, WeightSlot, WeightSlots
from srt.layers.cpu_linear import packed
from srt.layers.layernorm import RMSNorm


class Linear:
    """y = x Wᵀ + b with this rank's W [O, I], which may be another layer's own."""

    def __init__(
        self,
        context: LayerContext,
        num_inputs: int,
        num_outputs: int,
        bias: bool,
        weight_OI: torch.Tensor | None = None,
    ):
        self._context = context
        self._kernels = None
        if context.on_gpu:
            from srt.kernels import linear

            self._kernels = linear
        self.weight_OI = context.empty(num_outputs, num_inputs) if weight_OI is None else weight_OI
        self.bias_O = context.empty(num_outputs) if bias else None
        self._multiply: Callable[[torch.Tensor], torch.Tensor] = self._unpacked

    def pack(self) -> None:
        """Once the weights are in: lay them out as the device multiplies them fastest, and forget them as they came."""
        if not self._context.on_gpu:
            self._multiply = packed(self.weight_OI, self.bias_O, self._context.spend_memory)
            del self.weight_OI, self.bias_O

    def _unpacked(self, x_NI: torch.Tensor) -> torch.Tensor:
        return F.linear(x_NI, self.weight_OI, self.bias_O)

    def _streams(self, num_tokens: int) -> bool:
        """Whether so few tokens are bound by reading the weight, and neighbouring work hides in that."""
        return self._kernels is not None and num_tokens <= self._kernels.MOST_TOKENS

    def __call__(self, x_NI: torch.Tensor) -> torch.Tensor:
        return self._multiply(x_NI)

    def of_normed(
        self, norm: RMSNorm, x_NI: torch.Tensor | None, residual_NI: torch.Tensor, gated: bool = False
    ) -> torch.Tensor:
        """The product with the norm of the residual stream, to which `x_NI` and what other ranks hold is added before.

        `gated`: the outputs are a gate and what it gates, and SwiGLU makes half as many of them.
        """
        streams = self._streams(len(residual_NI))
        if streams and self._kernels.takes_norm(len(residual_NI), *self.weight_OI.shape):
            self._context.parallel.all_reduce(residual_NI)
            normed_by = (norm.weight_D, norm.eps)
            return self._kernels.small_batch_linear(residual_NI, self.weight_OI, self.bias_O, normed_by, gated)
        x_NI = norm.of_sum(x_NI, residual_NI)
        if streams:
            return self._kernels.small_batch_linear(x_NI, self.weight_OI, self.bias_O, gated=gated)
        if gated and self._context.on_gpu and self.bias_O is None:
            from srt.kernels.swiglu_product import fits, swiglu_linear, wins

            if fits(x_NI, self.weight_OI) and wins(len(x_NI), len(self.weight_OI) // 2, x_NI.device):
                return swiglu_linear(x_NI, self.weight_OI)
        y_NO = self(x_NI)
        return silu_and_mul(y_NO) if gated else y_NO


class ColumnParallelLinear(Linear):
    """Several projections of one input as one matmul, each split over ranks by its outputs.

    `parts` maps a checkpoint name ("gate_proj") to its full number of outputs and to this rank's range of them. The
    outputs lie side by side in that order. `rotary_dims` gives the head_dim of parts whose heads will be rotated.
    """

    def __init__(
        self,
        context: LayerContext,
        num_inputs: int,
        parts: Mapping[str, tuple[int, range]],
        bias: bool = False,
        rotary_dims: Mapping[str, int] | None = None,
    ):
        self._parts = dict(parts)
        self._rotary_dims = rotary_dims or {}
        super().__init__(context, num_inputs, sum(len(own) for _, own in parts.values()), bias)

    def weight_slots(self) -> WeightSlots:
        begin = 0
        for name, (total, own) in self._parts.items():
            end, rotary_dim = begin + len(own), self._rotary_dims.get(name, 0)
            targets = {"weight": self.weight_OI} | ({} if self.bias_O is None else {"bias": self.bias_O})
            for kind, whole in targets.items():
                shape = (total, *whole.shape[1:])
                yield f"{name}.{kind}", WeightSlot(whole[begin:end], shape, start=own.start, rotary_dim=rotary_dim)
            begin = end


class RowParallelLinear(Linear):
    """One projection split over ranks by its inputs; the ranks' partial sums are added, and then the bias."""

    def __init__(self, context: LayerContext, name: str, num_inputs: int, num_outputs: int, bias: bool = False):
        self._name = name
        self._parallel = context.parallel
        self._num_inputs = num_inputs
        self._own = context.parallel.shard(num_inputs)
        super().__init__(context, len(self._own), num_outputs, bias=False)
        self._sum_bias_O = context.empty(num_outputs) if bias else None

    def weight_slots(self) -> WeightSlots:
        num_outputs = self.weight_OI.shape[0]
        shape = (num_outputs, self._num_inputs)
        yield f"{self._name}.weight", WeightSlot(self.weight_OI, shape, dim=1, start=self._own.start)
        if self._sum_bias_O is not None:
            yield f"{self._name}.bias", WeightSlot(self._sum_bias_O, (num_outputs,))

    def onto(self, residual_NO: torch.Tensor, x_NI: torch.Tensor) -> torch.Tensor | None:
        """Adds the product to the residual stream in place, or returns it for the norm behind to add.

        On GPUs each rank's stream is then a part of it, which the norm behind adds up. The first rank's part holds
        the stream before and the bias, so that they are in it once.
        """
        if not self._context.on_gpu:
            return self(x_NI)
        adds = self._parallel.rank == 0
        bias_O = self._sum_bias_O if adds else None
        if self._streams(len(x_NI)):
            self._kernels.small_batch_linear(x_NI, self.weight_OI, bias_O, out_NO=residual_NO, adds=adds)
        else:
            residual_NO.addmm_(x_NI, self.weight_OI.T, beta=int(adds))
            if bias_O is not None:
                residual_NO += bias_O
        return None

    def __call__(self, x_NI: torch.Tensor) -> torch.Tensor:
        y_NO = self._parallel.all_reduce(super().__call__(x_NI))
        return y_NO if self._sum_bias_O is None else y_NO.add_(self._sum_bias_O)
