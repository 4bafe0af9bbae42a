"""L4, each rank: the randomness of sampling, a pure function of (seed, position, token id).

The same numbers come out in any batch, in any order and on every rank, so a request with a seed can be repeated.

The hash. A row's 64-bit key is SplitMix64 (Steele, Lea and Flood 2014) at `seed` advanced by `position + 1` steps. A
token's 32 bits are Chris Wellons' "lowbias32" mixer of `token · 0x9E3779B9 + low half`, with the high half xored in
between its two multiplications, all modulo 2³². The lower 31 bits u give v = (u + ½) / 2³¹ in (0, 1), and the noise is
standard Gumbel: -log(-log(1 - v)). Small v, which is accurate in float32, gives the large noise that decides.

Shapes: S sampled rows, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch

GOLDEN = 0x9E3779B9
LARGEST_V = 1 - 2.0**-24  # the largest float32 below 1


def row_keys(seeds_S: np.ndarray, positions_S: np.ndarray) -> np.ndarray:
    """int32 [S, 2]: low and high half of each row's key, for seeds and positions of any integer type."""
    with np.errstate(over="ignore"):
        z = seeds_S.astype(np.uint64) + (positions_S.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return z.astype("<u8").view("<i4").reshape(-1, 2)


def signed(word: int) -> int:
    """The int32 with the same bits: torch multiplies int32 modulo 2³²."""
    return word - 2**32 if word >= 2**31 else word


class GumbelNoise:
    def __init__(self, num_tokens: int, device: torch.device):
        self._spread_V = torch.arange(num_tokens, dtype=torch.int32, device=device) * signed(GOLDEN)

    def __call__(self, keys_S2: torch.Tensor) -> torch.Tensor:
        """float32 [S, V] for the keys of `row_keys`."""
        x_SV = self._spread_V + keys_S2[:, :1]
        x_SV ^= (x_SV >> 16) & 0xFFFF
        x_SV *= signed(0x7FEB352D)
        x_SV ^= keys_S2[:, 1:]
        x_SV ^= (x_SV >> 15) & 0x1FFFF
        x_SV *= signed(0x846CA68B)
        x_SV ^= (x_SV >> 16) & 0xFFFF
        x_SV &= 0x7FFFFFFF
        v_SV = x_SV.to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=LARGEST_V)
        return v_SV.neg_().log1p_().neg_().log_().neg_()
