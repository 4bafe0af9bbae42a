"""L4, each rank: the randomness of sampling, a pure function of (seed, position, token id).

The same numbers come out in any batch, in any order and on every rank, so a request with a seed can be repeated.

The hash. A row's 64-bit key is SplitMix64 (Steele, Lea and Flood 2014) at `seed` advanced by `position + 1` steps. A
token's word is mixed like Chris Wellons' "lowbias32", in signed 32-bit integers that overflow and arithmetic shifts:

    x = token · 0x9E3779B9 + key's low half;  x ^= x >> 16;  x *= 0x7FEB352D;  x ^= key's high half;
    x ^= x >> 15;  x *= 0x846CA68B;  x ^= x >> 16

The last line clears the sign, so x is a 31-bit integer, and v = x · 2⁻³¹(1 - 2⁻²³) + 2⁻³³ lies in (0, 1).
-log(1 - v) is a standard exponential variate, and minus its logarithm a Gumbel variate. Small v, which is accurate in
float32, gives the large noise that decides.

Shapes: S sampled rows, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch

SCALE = 2.0**-31 * (1 - 2.0**-23)


def row_keys(seeds_S: np.ndarray, positions_S: np.ndarray) -> np.ndarray:
    """int32 [S, 2]: low and high half of each row's key, for seeds and positions of any integer type."""
    with np.errstate(over="ignore"):
        z = seeds_S.astype(np.uint64) + (positions_S.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return z.astype("<u8").view("<i4").reshape(-1, 2)


def signed(word: int) -> int:
    """The int32 with the same bits."""
    return word - 2**32 if word >= 2**31 else word


class Noise:
    def __init__(self, num_tokens: int):
        self._spread_V = torch.arange(num_tokens, dtype=torch.int32) * signed(0x9E3779B9)
        # A row after the other through buffers that stay in the cache: fresh memory costs more than the arithmetic.
        self._word_V = torch.empty_like(self._spread_V)
        self._shifted_V = torch.empty_like(self._spread_V)
        self._noise_V = torch.empty(num_tokens, dtype=torch.float32)

    def negative_gumbel(self, key_2: np.ndarray, ids: torch.Tensor | None = None) -> torch.Tensor:
        """float32 [V], or of the given tokens alone: subtract it from logits. Valid until the next call."""
        low, high = int(key_2[0]), int(key_2[1])
        spread = self._spread_V if ids is None else self._spread_V[ids]
        x, shifted, noise = (buffer[: len(spread)] for buffer in (self._word_V, self._shifted_V, self._noise_V))
        torch.add(spread, low, out=x)
        torch.bitwise_right_shift(x, 16, out=shifted)
        x.bitwise_xor_(shifted).mul_(signed(0x7FEB352D)).bitwise_xor_(high)
        torch.bitwise_right_shift(x, 15, out=shifted)
        x.bitwise_xor_(shifted).mul_(signed(0x846CA68B))
        torch.bitwise_right_shift(x, 16, out=shifted)
        x.bitwise_xor_(shifted)
        noise.copy_(x)
        return noise.mul_(-SCALE).sub_(2.0**-33).log1p_().neg_().log_()
