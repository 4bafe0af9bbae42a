"""L4, each rank: one step of attention that reads K/V once, block by block (Milakov and Gimelshein 2018).

Shapes: N queries, C head_dim, L positions of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl

from srt.kernels.launch import COMPILED


@triton.jit
def take_in(best, total, value, query, k, v, inside, scale):
    """The highest score [N], sum of weights [N] and weighted sum of values [N, C] with a block's K/V, [L, C], in them.

    Positions count where `inside` [L] is set. Scores are powers of two.
    """
    if not COMPILED:  # the interpreter cannot multiply bfloat16
        query, k, v = query.to(tl.float32), k.to(tl.float32), v.to(tl.float32)
    score = tl.where(inside[None, :], tl.dot(query, tl.trans(k)) * scale, float("-inf"))
    highest = tl.maximum(best, tl.max(score, axis=1))
    weight = tl.exp2(score - highest[:, None])
    fade = tl.exp2(best - highest)
    total = total * fade + tl.sum(weight, axis=1)
    return highest, total, tl.dot(weight.to(v.dtype), v, value * fade[:, None])
