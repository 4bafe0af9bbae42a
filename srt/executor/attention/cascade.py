"""L4, each rank: the work of attending to shared prefixes, cut for a GPU. Arithmetic on the plan; numpy only.

Shapes: B rows, M items of work.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from srt.scheduler.schedule_batch import SharedPrefix

LEAST_ROWS_OF_TILE = 3
"""With fewer, of very many query heads to a key head, sharing saves too little, and there would be more tiles."""


class Work(NamedTuple):
    """For `srt/kernels/cascade.py`, int64."""

    items_4M: np.ndarray  # first row, rows, first position, the one behind the last
    rows_3B: np.ndarray  # positions shared, first item, items


def tokens_saved(shared: tuple[SharedPrefix, ...]) -> int:
    """Of which K/V need not be read, since others read it."""
    return sum((rows - 1) * tokens for rows, tokens in shared)


def most_items(num_rows: int, wanted: int) -> int:
    """That `cut` makes for so many rows, of which every two may be a tile."""
    return num_rows // 2 + wanted


def cut(shared: tuple[SharedPrefix, ...], num_rows: int, rows_of_tile: int, wanted: int, step: int) -> Work:
    """Groups into tiles, and these into stretches of equal length, whole steps, about `wanted` of them in all."""
    assert rows_of_tile >= LEAST_ROWS_OF_TILE
    group_rows, group_tokens = np.array(shared, np.int64).reshape(-1, 2).T
    first_row = np.cumsum(group_rows) - group_rows
    tiles = -(-group_rows // rows_of_tile)  # of each group
    tile_tokens = group_tokens.repeat(tiles)
    nth = counted(tiles)
    tile_first = first_row.repeat(tiles) + nth * rows_of_tile
    tile_rows = np.minimum(group_rows.repeat(tiles) - nth * rows_of_tile, rows_of_tile)

    length = max(-(-int(tile_tokens.sum()) // (wanted * step)), 1) * step
    items = -(-tile_tokens // length)  # of each tile
    begin = counted(items) * length
    end = np.minimum(begin + length, tile_tokens.repeat(items))
    items_4M = np.stack((tile_first.repeat(items), tile_rows.repeat(items), begin, end))

    rows_3B = np.zeros((3, num_rows), np.int64)
    first_item = np.cumsum(items) - items
    rows_3B[:, : group_rows.sum()] = np.stack((tile_tokens, first_item, items)).repeat(tile_rows, axis=1)
    return Work(items_4M, rows_3B)


def counted(sizes: np.ndarray) -> np.ndarray:
    """0, 1, 2... for each of `sizes`, one after the other."""
    return np.arange(sizes.sum()) - (np.cumsum(sizes) - sizes).repeat(sizes)
