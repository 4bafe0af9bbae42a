"""L4, each rank: the sampling parameters of every row, as arrays, so that a step picks its rows' by one index each.

Shapes: S sampled tokens of a step.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from srt.messages import SamplingParams
from srt.scheduler.schedule_batch import OpenedRow


@dataclass(frozen=True)
class SamplingRows:
    """One entry per row. The booleans say which rows need which work, so that a step skips what none of them needs."""

    temperature: np.ndarray  # float32; 0: greedy
    top_k: np.ndarray  # int64; 0: all
    top_p: np.ndarray  # float32
    min_p: np.ndarray  # float32
    seed: np.ndarray  # int64
    logprobs: np.ndarray  # int64; -1: none wanted
    min_end: np.ndarray  # int64: below this position no stop token may be sampled
    penalised: np.ndarray  # bool
    biased: np.ndarray  # bool
    filtered: np.ndarray  # bool: top-k, top-p or min-p remove something

    def take(self, rows: np.ndarray) -> SamplingRows:
        return SamplingRows(*(getattr(self, field.name)[rows] for field in fields(self)))


class SamplingTable:
    def __init__(self, num_rows: int):
        def zeros(dtype: type) -> np.ndarray:
            return np.zeros(num_rows, dtype)

        self._rows = SamplingRows(
            temperature=zeros(np.float32),
            top_k=zeros(np.int64),
            top_p=zeros(np.float32),
            min_p=zeros(np.float32),
            seed=zeros(np.int64),
            logprobs=zeros(np.int64),
            min_end=zeros(np.int64),
            penalised=zeros(np.bool_),
            biased=zeros(np.bool_),
            filtered=zeros(np.bool_),
        )
        self._opened: list[OpenedRow | None] = [None] * num_rows

    def open(self, opened: OpenedRow) -> None:
        rows, row, wanted = self._rows, opened.row, opened.sampling
        self._opened[row] = opened
        rows.temperature[row] = wanted.temperature
        rows.top_k[row] = wanted.top_k
        rows.top_p[row] = wanted.top_p
        rows.min_p[row] = wanted.min_p
        rows.seed[row] = wanted.seed
        rows.logprobs[row] = wanted.logprobs
        rows.min_end[row] = opened.prompt_len + wanted.min_new_tokens if opened.stop_token_ids else 0
        rows.penalised[row] = (
            wanted.repetition_penalty != 1 or wanted.frequency_penalty != 0 or wanted.presence_penalty != 0
        )
        rows.biased[row] = len(wanted.logit_bias) > 0
        # What is stored decides: a top_p just below 1 and a min_p just above 0 may have been rounded to it.
        rows.filtered[row] = rows.temperature[row] > 0 and (
            rows.top_k[row] > 0 or rows.top_p[row] < 1 or rows.min_p[row] > 0
        )

    def opened(self, row: int) -> OpenedRow:
        opened = self._opened[row]
        assert opened is not None
        return opened

    def wishes(self, row: int) -> SamplingParams:
        return self.opened(row).sampling

    def take(self, rows_S: np.ndarray) -> SamplingRows:
        return self._rows.take(rows_S)
