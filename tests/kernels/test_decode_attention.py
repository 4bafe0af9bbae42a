"""Attention of decode rows against the formula in float32."""

import numpy as np
import pytest
import torch
import triton

from srt.kernels.decode_attention import BlockTable, Tiling, attend

CANNOT_LOOP = triton.__version__ < "3.7" and tuple(map(int, np.__version__.split(".")[:2])) >= (2, 4)
"""This interpreter makes numbers of a loop's bounds in a way that this numpy refuses."""


def expected(q, kv, rows, lengths, slots):
    """[B, H, C]."""
    outputs = []
    for index, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        k, v = kv[:, slots[row, :length].long()].float().repeat_interleave(q.shape[1] // kv.shape[2], dim=2)
        score = torch.einsum("hc,lhc->hl", q[index].float(), k) * q.shape[2] ** -0.5
        outputs.append(torch.einsum("hl,lhc->hc", score.softmax(-1), v))
    return torch.stack(outputs)


LENGTHS = {
    "one": [1],
    "several": [65, 1, 64, 700],
    "skewed": [3, 129, 128, 5000],
    "many": [*range(1, 18), 400],
}


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(32, 8, 128), (16, 8, 128), (9, 3, 64), (20, 1, 64)]
)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("tiled_for", [1, 16, 64, 256])
def test_attend(num_heads, num_kv_heads, head_dim, lengths, tiled_for, device, random):
    if device.type == "cpu":  # what is interpreted takes its time
        if CANNOT_LOOP:
            pytest.skip("interpreted loops need Triton 3.7 or numpy below 2.4")
        if tiled_for not in (1, 256) or num_kv_heads == 1 or num_heads == 16 or lengths == [1]:
            pytest.skip("the same code with other numbers")
        num_heads, num_kv_heads = num_heads // num_kv_heads * min(num_kv_heads, 2), min(num_kv_heads, 2)
        lengths = [min(length, 150) for length in lengths[-5:]]
    num_rows, num_slots, context = len(lengths), 6000, 5003
    kv = torch.randn((2, num_slots, num_kv_heads, head_dim), device=device, generator=random).bfloat16()
    slots = torch.randint(num_slots, (num_rows + 2, context), device=device, generator=random).int()
    rows = torch.randperm(num_rows + 2, device=device, generator=random)[:num_rows]
    q = (torch.randn((num_rows, num_heads, head_dim), device=device, generator=random) * 2).bfloat16()
    table = BlockTable(num_rows, sum(lengths), device)
    lengths = torch.tensor(lengths, device=device)
    blocks = table.fill(rows, lengths, slots, Tiling.of(tiled_for, num_heads // num_kv_heads))
    o, again = torch.empty_like(q), torch.empty_like(q)
    attend(q, kv, blocks, o)
    attend(q, kv, blocks, again)
    torch.testing.assert_close(o.float(), expected(q, kv, rows, lengths, slots), atol=2e-2, rtol=2e-2)
    assert torch.equal(o, again)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tiled_for", [1, 16, 64, 256])
def test_an_fp8_cache(tiled_for, dtype):
    """Its numbers are exact in wider types, so only their rounding before differs."""
    random = torch.Generator("cuda").manual_seed(2)
    lengths = torch.tensor([1, 65, 700, 130], device="cuda")
    kv = torch.randn((2, 6000, 8, 128), device="cuda", generator=random).to(torch.float8_e4m3fn)
    slots = torch.randint(6000, (4, 700), device="cuda", generator=random).int()
    q = torch.randn((4, 16, 128), device="cuda", generator=random).to(dtype)
    rows, o = torch.arange(4, device="cuda"), torch.empty_like(q)
    table = BlockTable(4, 900, rows.device)
    attend(q, kv, table.fill(rows, lengths, slots, Tiling.of(tiled_for, 2)), o)
    torch.testing.assert_close(o.float(), expected(q, kv.to(dtype), rows, lengths, slots), atol=2e-2, rtol=2e-2)
