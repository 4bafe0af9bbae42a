"""L4, each rank: the compiled loops of cpu.c as functions of tensors, where the CPU and the installation have
them. Activations are float32. Callers ask whether it `serves` and have plain torch operations for when it does not.

Shapes: N tokens, I input features, O output features, D normalised features, F features of the feed-forward block,
S heads, H query heads, G key/value heads, C head_dim, T slots, R rows, X rows of the slot table with P positions,
V vocabulary, M masks of W words.
"""

from __future__ import annotations

import torch

from srt.kernels.huge_pages import Arena

try:
    import lockstep_cpu as compiled
except ImportError:  # installed without a C compiler, or for another processor
    compiled = None

INTERFACE = 3
"""Of cpu.h. Another one is of a version installed before, beside which these files run: its numbers would be wrong."""

if compiled is not None and getattr(compiled, "INTERFACE", 1) != INTERFACE:
    compiled = None

FORMATS = (torch.bfloat16, torch.float16, torch.float32)
"""Of weights, in the order in which cpu.c numbers them."""

LANES = 16
"""Outputs of a panel, and what the size of the other kernels' rows must be a multiple of."""

_weights = Arena()

AVAILABLE = compiled is not None and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def serves(device: torch.device, size: int = 0) -> bool:
    """Whether the functions below work there, on rows of `size` elements."""
    return AVAILABLE and device.type == "cpu" and size % LANES == 0


class PanelLinear:
    """y = x Wᵀ + b, with a copy of the weight laid out as the kernel reads it."""

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None):
        self._format = FORMATS.index(weight_OI.dtype)
        self._num_outputs, self._num_inputs = weight_OI.shape
        self._panels = panels(weight_OI)
        self._bias_O = None if bias_O is None else bias_O.float()
        self._bias = 0 if self._bias_O is None else self._bias_O.data_ptr()

    def __call__(self, x_NI: torch.Tensor) -> torch.Tensor:
        x_NI = x_NI.contiguous()
        y_NO = x_NI.new_empty((len(x_NI), self._num_outputs))
        compiled.linear(
            self._format, x_NI.data_ptr(), len(x_NI), self._panels.data_ptr(), self._num_inputs, self._num_outputs,
            self._bias, y_NO.data_ptr(),
        )  # fmt: skip
        return y_NO


def panels(weight_OI: torch.Tensor) -> torch.Tensor:
    """[ceil(O / 16), I, 16], the last outputs zeros; bfloat16 outputs in the order 0, 8, 1, 9 ... of a panel."""
    num_outputs, num_inputs = weight_OI.shape
    packed = _weights.zeros((-(-num_outputs // LANES), num_inputs, LANES), weight_OI.dtype)
    whole = num_outputs // LANES

    def lay(rows_OI: torch.Tensor) -> torch.Tensor:
        lanes = rows_OI.view(-1, LANES, num_inputs)
        if weight_OI.dtype == torch.bfloat16:
            lanes = lanes.unflatten(1, (2, LANES // 2)).transpose(1, 2).flatten(1, 2)
        return lanes.transpose(1, 2)

    packed[:whole] = lay(weight_OI[: whole * LANES])
    if whole < len(packed):
        rest_OI = weight_OI.new_zeros((LANES, num_inputs))
        rest_OI[: num_outputs - whole * LANES] = weight_OI[whole * LANES :]
        packed[whole:] = lay(rest_OI)
    return packed


def rms_norm(x_NSD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """Over the last dimension. A token's vectors lie one after the other; the tokens may lie apart."""
    y_NSD = torch.empty(x_NSD.shape)
    size, count = x_NSD.shape[-1], x_NSD.shape[1] if x_NSD.dim() == 3 else 1
    compiled.rms_norm(
        x_NSD.data_ptr(), x_NSD.stride(0), y_NSD.data_ptr(), y_NSD.stride(0), weight_D.data_ptr(), len(x_NSD), count,
        size, eps,
    )  # fmt: skip
    return y_NSD


def rotate_(x_NSC: torch.Tensor, turns_N1F: torch.Tensor) -> None:
    """In place: pairs of neighbours times the complex64 turns, the same for all heads of a token."""
    tokens, heads, size = x_NSC.shape
    compiled.rotate(x_NSC.data_ptr(), x_NSC.stride(0), turns_N1F.data_ptr(), tokens, heads, size)


def store(cache_TSC: torch.Tensor, slots_N: torch.Tensor, kv_NSC: torch.Tensor) -> None:
    """Into a float16 or float32 cache; `slots_N` is int64."""
    compiled.store(
        int(cache_TSC.dtype == torch.float16), kv_NSC.data_ptr(), kv_NSC.stride(0), slots_N.data_ptr(), len(slots_N),
        kv_NSC.shape[1] * kv_NSC.shape[2], cache_TSC.data_ptr(),
    )  # fmt: skip


def silu_and_mul(gate_up_N2F: torch.Tensor) -> torch.Tensor:
    tokens, size = gate_up_N2F.shape[0], gate_up_N2F.shape[1] // 2
    y_NF = torch.empty((tokens, size))
    compiled.silu_and_mul(gate_up_N2F.data_ptr(), y_NF.data_ptr(), tokens, size)
    return y_NF


def argmax(x_NV: torch.Tensor) -> torch.Tensor:
    """int64 [N]: the first of the largest values; 0 for a row that has none because it is all NaN."""
    best_N = torch.empty(len(x_NV), dtype=torch.int64)
    compiled.argmax(x_NV.data_ptr(), x_NV.stride(0), len(x_NV), x_NV.shape[1], best_N.data_ptr())
    return best_N


def forbid_(x_NV: torch.Tensor, places_M: torch.Tensor, bits_MW: torch.Tensor) -> None:
    """In place: minus infinity in the rows `places_M` (int64), where bit v % 32 of word v // 32 (int32) is not set."""
    compiled.forbid(
        x_NV.data_ptr(), x_NV.stride(0), x_NV.shape[1], places_M.data_ptr(), len(places_M), bits_MW.data_ptr(),
        bits_MW.shape[1],
    )  # fmt: skip


def decode(
    q_RHC: torch.Tensor, cache_TSC: torch.Tensor, slots_XP: torch.Tensor, rows_R: torch.Tensor, lengths_R: torch.Tensor
) -> torch.Tensor:
    """Attention of one query per row to its first positions -> [R, H, C].

    `slots_XP` (int32) is the whole slot table, of which `rows_R` and `lengths_R` (int64) say which parts; the cache
    holds G keys, then G values of a slot, float16 or float32.
    """
    o_RHC = torch.empty(q_RHC.shape)
    compiled.decode(*_arguments(q_RHC, o_RHC, cache_TSC, slots_XP, rows_R, lengths_R))
    return o_RHC


def prefill(
    q_NHC: torch.Tensor,
    cache_TSC: torch.Tensor,
    slots_XP: torch.Tensor,
    rows_R: torch.Tensor,
    lengths_R: torch.Tensor,
    counts_R: torch.Tensor,
) -> torch.Tensor:
    """The same for the last `counts_R` (int64) of each row's positions, one chunk after the other -> [N, H, C]. A
    query sees its row up to its own position."""
    o_NHC = torch.empty(q_NHC.shape)
    compiled.prefill(*_arguments(q_NHC, o_NHC, cache_TSC, slots_XP, rows_R, lengths_R), counts_R.data_ptr())
    return o_NHC


def _arguments(
    q_NHC: torch.Tensor,
    o_NHC: torch.Tensor,
    cache_TSC: torch.Tensor,
    slots_XP: torch.Tensor,
    rows_R: torch.Tensor,
    lengths_R: torch.Tensor,
) -> tuple[int, ...]:
    _, num_heads, head_dim = q_NHC.shape
    return (
        int(cache_TSC.dtype == torch.float16), q_NHC.data_ptr(), q_NHC.stride(0), o_NHC.data_ptr(),
        cache_TSC.data_ptr(), slots_XP.data_ptr(), slots_XP.stride(0), rows_R.data_ptr(), lengths_R.data_ptr(),
        len(rows_R), num_heads, cache_TSC.shape[1] // 2, head_dim,
    )  # fmt: skip
