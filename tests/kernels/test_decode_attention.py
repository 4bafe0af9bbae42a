"""Attention of a few decode rows against the formula in float32."""

import numpy as np
import pytest
import torch
import triton

from srt.kernels import decode_attention
from srt.kernels.decode_attention import attend

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


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(32, 8, 128), (16, 8, 128), (9, 3, 64), (20, 1, 64)]
)
@pytest.mark.parametrize("lengths", [[1], [64], [65, 1, 700], [3, 129, 64, 5000]])
def test_attend(num_heads, num_kv_heads, head_dim, lengths, device, random, monkeypatch):
    if device.type == "cpu" and CANNOT_LOOP:
        pytest.skip("interpreted loops need Triton 3.7 or numpy below 2.4")
    if device.type == "cpu":  # few programs, since they are interpreted, each with several blocks of a long row
        monkeypatch.setattr(decode_attention, "PROGRAMS", 16)
        num_heads, num_kv_heads = num_heads // num_kv_heads * min(num_kv_heads, 2), min(num_kv_heads, 2)
        lengths = [min(length, 300) for length in lengths]
    num_rows, num_slots, context = len(lengths), 6000, 5003
    kv = torch.randn((2, num_slots, num_kv_heads, head_dim), device=device, generator=random).bfloat16()
    slots = torch.randint(num_slots, (num_rows + 2, context), device=device, generator=random).int()
    rows = torch.randperm(num_rows + 2, device=device, generator=random)[:num_rows]
    q = (torch.randn((num_rows, num_heads, head_dim), device=device, generator=random) * 2).bfloat16()
    lengths = torch.tensor(lengths, device=device)
    o, again = torch.empty_like(q), torch.empty_like(q)
    attend(q, kv, rows, lengths, slots, o)
    attend(q, kv, rows, lengths, slots, again)
    torch.testing.assert_close(o.float(), expected(q, kv, rows, lengths, slots), atol=2e-2, rtol=2e-2)
    assert torch.equal(o, again)
