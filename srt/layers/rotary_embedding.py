"""L4, each rank: rotary position embedding with the ways models stretch it past their trained context.

A rotation turns pairs of a head's dimensions. Checkpoints in Hugging Face's layout pair dimension i with i + C / 2; we
interleave the rows of the query and key projections as they are loaded (`WeightSlot.rotary_dim`), so that a pair lies
side by side and is one complex number. Scores do not notice, as queries and keys are permuted alike.

Shapes: N tokens, S heads to rotate, C head_dim, F = C / 2 frequencies, P positions.
"""

from __future__ import annotations

import math

import torch

from srt.kernels import cpu
from srt.layers.context import LayerContext
from srt.model_config import ModelConfig, ModelError, RopeScaling


class RotaryEmbedding:
    """Su et al. 2021, "RoFormer". The turns of all positions up to `num_positions` are computed once, in float64."""

    def __init__(self, context: LayerContext, config: ModelConfig, num_positions: int):
        frequencies, scale = inverse_frequencies(config, num_positions)
        angles = torch.outer(torch.arange(num_positions, dtype=torch.float64), frequencies)
        turns = torch.polar(torch.full_like(angles, scale), angles)
        self._on_gpu = context.on_gpu
        if self._on_gpu:
            self._turns_P2F = torch.stack((turns.real, turns.imag), dim=1).float().to(context.device)
        else:
            self._turns_PF = turns.to(dtype=torch.complex64, device=context.device)

    def at(self, positions_N: torch.Tensor) -> torch.Tensor:
        """What every layer of one step turns its queries and keys by.

        On a CPU the turns of the step's tokens, complex64 [N, 1, F]; on a GPU cosines and sines of all positions,
        float32 [P, 2, F], where the kernel that turns looks up its own.
        """
        return self._turns_P2F if self._on_gpu else self._turns_PF[positions_N].unsqueeze(1)


def rotate_(x_NSC: torch.Tensor, turns_N1F: torch.Tensor) -> None:
    """Rotates float32 queries and keys in place."""
    if cpu.serves(x_NSC.device, x_NSC.shape[-1]):
        cpu.rotate_(x_NSC, turns_N1F)
    else:
        torch.view_as_complex(x_NSC.unflatten(-1, (-1, 2))).mul_(turns_N1F)


def inverse_frequencies(config: ModelConfig, num_positions: int) -> tuple[torch.Tensor, float]:
    """Radians per position of each pair of a head's dimensions (float64 [C / 2]), and a factor of cosines and sines."""
    scaling = config.rope_scaling
    trained = scaling.original_max_position_embeddings or config.max_position_embeddings
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    plain = config.rope_theta**-exponents
    if scaling.rope_type == "default":
        return plain, 1.0
    if scaling.rope_type == "linear":
        return plain / scaling.factor, 1.0
    if scaling.rope_type == "dynamic":
        return _dynamic(config, scaling, exponents, trained, num_positions), 1.0
    if scaling.rope_type == "llama3":
        return _llama3(scaling, plain, trained), 1.0
    if scaling.rope_type == "yarn":
        return _yarn(config, scaling, plain, trained), _yarn_attention_factor(scaling)
    raise ModelError(f"rope_type {scaling.rope_type!r} is not supported")


def _dynamic(
    config: ModelConfig, scaling: RopeScaling, exponents: torch.Tensor, trained: int, num_positions: int
) -> torch.Tensor:
    """NTK-aware scaling (bloc97 2023): a larger base for a longer context.

    A server keeps one base for the whole context it serves, as cached keys carry their rotation for ever; the formula's
    sequence length is therefore the served context's.
    """
    dim = config.head_dim
    stretch = scaling.factor * max(num_positions, trained) / trained - (scaling.factor - 1)
    return (config.rope_theta * stretch ** (dim / (dim - 2))) ** -exponents


def _llama3(scaling: RopeScaling, plain: torch.Tensor, trained: int) -> torch.Tensor:
    """Llama 3.1's rule: long wave lengths are divided by the factor, short ones kept, a linear blend between them."""
    turns = trained * plain / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * (kept + (1 - kept) / scaling.factor)


def _yarn(config: ModelConfig, scaling: RopeScaling, plain: torch.Tensor, trained: int) -> torch.Tensor:
    """Peng et al. 2023, "YaRN": a ramp from kept to divided frequencies between beta_fast and beta_slow turns."""
    dim = config.head_dim

    def pair_that_turns(turns: float) -> float:
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(config.rope_theta))

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    pairs = torch.arange(dim // 2, dtype=torch.float64)
    divided = ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain * (1 - divided) + plain / scaling.factor * divided


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    """YaRN's 0.1 ln(s) + 1, with DeepSeek's two multipliers where a config has them."""
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def magnitude(multiplier: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * multiplier * math.log(scaling.factor) + 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return magnitude(scaling.mscale) / magnitude(scaling.mscale_all_dim)
    return magnitude(1.0)
