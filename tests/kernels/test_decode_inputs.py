"""Gathering a decode step's inputs against plain indexing."""

import pytest
import torch

from srt.kernels import decode_inputs


def tables(device, num_rows, context, page_size):
    """Every row's slots page by page, pages in any order."""
    random = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 1000, (num_rows, context + 1), generator=random, dtype=torch.int32)
    pages = torch.randperm(num_rows * context // page_size, generator=random).view(num_rows, -1, 1) + 1
    slots = (pages * page_size + torch.arange(page_size)).view(num_rows, -1).int()
    return tokens.to(device), slots.to(device)


@pytest.mark.parametrize("num_rows", [1, 5, 130])
def test_gather(num_rows, device):
    tokens, slots = tables(device, 150, 64, 4)
    random = torch.Generator().manual_seed(4)
    rows = torch.randperm(150, generator=random)[:num_rows].int().to(device)
    lengths = torch.randint(1, 65, (num_rows,), generator=random).int().to(device)
    lengths[num_rows // 2] = 0
    ids, positions, to = (torch.full((num_rows,), -1, dtype=torch.int64, device=device) for _ in range(3))
    decode_inputs.gather(rows, lengths, tokens, slots, ids, positions, to)
    places = rows.long(), lengths.long() - 1
    used = lengths > 0
    assert torch.equal(positions, torch.where(used, places[1], 0))
    assert torch.equal(ids, torch.where(used, tokens[places].long(), 0))
    assert torch.equal(to, torch.where(used, slots[places[0], positions].long(), 0))


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("num_rows", [1, 7])
def test_page_table(num_rows, page_size, device):
    context = 8192 if num_rows == 1 else 1040
    _, slots = tables(device, num_rows + 1, context, page_size)
    random = torch.Generator().manual_seed(5)
    rows = torch.randperm(num_rows + 1, generator=random)[:num_rows].int().to(device)
    lengths = torch.randint(1, context + 1, (num_rows,), generator=random).int().to(device)
    lengths[0] = context - 3
    if num_rows > 1:
        lengths[3] = 0
        lengths[4] = page_size
    indptr, last = (torch.full((size,), -1, dtype=torch.int32, device=device) for size in (num_rows + 1, num_rows))
    indices = torch.full((num_rows * context,), -1, dtype=torch.int32, device=device)
    decode_inputs.page_table(rows, lengths, slots, page_size, indptr, indices, last)
    begin = 0
    for index, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        pages = slots[row, :length:page_size] // page_size
        assert indptr[index] == begin
        assert torch.equal(indices[begin : begin + len(pages)], pages)
        assert last[index] == length - max(len(pages) - 1, 0) * page_size
        begin += len(pages)
    assert indptr[num_rows] == begin
    assert (indices[begin:] == -1).all()
