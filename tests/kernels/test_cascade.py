"""Attention over shared prefixes: how it is cut into work, and what comes of it, against the formula in float32."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_decode_attention import CANNOT_LOOP, expected

from srt.executor.attention.cascade import cut, most_items
from srt.kernels import cascade, decode_attention
from srt.kernels.decode_attention import BlockTable, Tiling

GROUPS = st.lists(st.tuples(st.integers(2, 40), st.integers(1, 5000)), min_size=1, max_size=6)


@settings(max_examples=40, derandomize=True)
@given(groups=GROUPS, alone=st.integers(0, 3), rows_of_tile=st.integers(4, 64), wanted=st.integers(1, 40))
def test_every_row_meets_each_shared_position_once(groups, alone, rows_of_tile, wanted):
    num_rows = sum(rows for rows, _ in groups) + alone
    items, rows = cut(tuple(groups), num_rows, rows_of_tile, wanted, step=64)
    assert items.shape[1] <= most_items(num_rows, wanted)
    members = [group for group, (size, _) in enumerate(groups) for _ in range(size)]
    for row, (shared, first, count) in enumerate(rows.T.tolist()):
        if row >= len(members):
            assert (shared, count) == (0, 0)
            continue
        own = items[:, first : first + count]
        assert shared == groups[members[row]][1] == own[3, -1]
        assert own[2, 0] == 0
        assert (own[2, 1:] == own[3, :-1]).all()
        assert (own[3] > own[2]).all()
        assert (own[2] % 64 == 0).all()
        assert (own[0] <= row).all()
        assert (row < own[0] + own[1]).all()
        assert (own[1] <= rows_of_tile).all()
    for first, size, _, _ in items.T.tolist():
        assert len(set(members[first : first + size])) == 1, "an item's rows read different prefixes"


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "dtype"),
    [(32, 8, 128, "bfloat16"), (16, 8, 128, "float16"), (9, 3, 64, "bfloat16"), (7, 7, 64, "bfloat16")],
)
@pytest.mark.parametrize(
    ("groups", "alone"),
    [(((3, 64), (2, 129)), 2), (((70, 200),), 1), (((5, 1000), (17, 64)), 3), (((16, 2048),) * 4, 0)],
    ids=["small", "tiles", "uneven", "large"],
)
def test_parts_join_to_attention(groups, alone, num_heads, num_kv_heads, head_dim, dtype, device, random):
    dtype, wanted = getattr(torch, dtype), 33
    if device.type == "cpu":  # what is interpreted takes its time
        if CANNOT_LOOP:
            pytest.skip("interpreted loops need Triton 3.7 or numpy below 2.4")
        if (len(groups), num_heads) not in ((2, 16), (1, 9)) or alone == 3:
            pytest.skip("the same code with other numbers")
        num_heads, num_kv_heads, wanted = num_heads // num_kv_heads, 1, 4
        groups = tuple((min(rows, 23), min(tokens, 130)) for rows, tokens in groups)
    num_rows, context, num_slots = sum(rows for rows, _ in groups) + alone, 2100, 20000
    kv = torch.randn((2, num_slots, num_kv_heads, head_dim), device=device, generator=random).to(dtype)
    slots = torch.randint(num_slots, (num_rows + 2, context), device=device, generator=random).int()
    rows = torch.randperm(num_rows + 2, device=device, generator=random)[:num_rows]
    begin = 0
    for size, tokens in groups:
        slots[rows[begin : begin + size], :tokens] = slots[rows[begin], :tokens].clone()
        begin += size
    work = cut(groups, num_rows, cascade.rows_of_tile(num_heads, num_kv_heads), wanted, cascade.BLOCK)
    padding = np.zeros((4, 3), np.int64)
    items = torch.from_numpy(np.concatenate((work.items_4M, padding), axis=1)).to(device)
    shares = torch.from_numpy(work.rows_3B).to(device)
    lengths = shares[0] + torch.randint(1, 50, (num_rows,), device=device, generator=random)
    q = (torch.randn((num_rows, num_heads, head_dim), device=device, generator=random) * 2).to(dtype)
    table, tiling = (
        BlockTable(num_rows, int((lengths - shares[0]).sum()), device),
        Tiling.of(num_rows, num_heads // num_kv_heads),
    )
    blocks = table.fill(rows, lengths, slots, tiling, shares[0])
    o = torch.empty_like(q)
    decode_attention.attend(q, kv, blocks, o, cascade.attend(q, kv, rows, slots, items, shares))
    torch.testing.assert_close(o.float(), expected(q, kv, rows, lengths, slots), atol=2e-2, rtol=2e-2)
