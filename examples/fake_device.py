"""The real server around a device that computes nothing but takes its time.

    python -m examples.fake_device --port 30000

What a stream then takes above the device's time is the engine's own: scheduling, detokenizing, HTTP. Every step lasts
2.632 ms after the one before it, or after its launch if the device was idle, which is the forward time for which the
overhead of another engine is known (https://github.com/tenstorrent/tt-inference-server/issues/3560).
"""

from __future__ import annotations

import sys
from time import perf_counter
from typing import NamedTuple

import numpy as np

import launch
from srt.process import ChildSpec, Ready
from srt.scheduler.process import Device, run
from srt.scheduler.schedule_batch import ScheduleBatch, StepResult, TokenMasks
from srt.token_bytes import TokenBytes

STEP_SECONDS = 0.002632


class Launched(NamedTuple):
    end: float  # on perf_counter's clock
    tokens: np.ndarray


class FakeDevice:
    """An `Executor` with a time line of its own. `vocabulary`: int32 ids, of which it samples."""

    def __init__(self, vocabulary: np.ndarray, step_seconds: float = STEP_SECONDS) -> None:
        self._vocabulary = vocabulary
        self._step_seconds = step_seconds
        self._end = 0.0

    def forward(self, batch: ScheduleBatch) -> Launched:
        self._end = max(perf_counter(), self._end) + self._step_seconds
        ends, rows = batch.sampled_positions, batch.sampled_rows
        return Launched(self._end, self._vocabulary[(ends * 7919 + rows * 104729) % len(self._vocabulary)])

    def sample(self, launched: Launched, masks: TokenMasks | None) -> None:
        assert masks is None, "this device cannot read masks"

    def result(self, launched: Launched) -> StepResult:
        """Spins, as a host that waits for a GPU does."""
        while perf_counter() < launched.end:
            pass
        return StepResult(launched.tokens)


def vocabulary(token_bytes: TokenBytes) -> np.ndarray:
    """The tokens that are English words, more or less, with a blank before them."""
    table = enumerate(token_bytes.table)
    words = [token for token, text in table if text[:1] == b" " and text[1:].isalpha() and text.isascii()]
    return np.array(words, np.int32)


def make_device(spec: ChildSpec, token_bytes: TokenBytes, ranks: object) -> Device:
    config = spec.config
    pool_tokens = config.max_running_requests * config.context_length // config.page_size * config.page_size
    device = FakeDevice(vocabulary(token_bytes))
    return Device(device, pool_tokens, {"summary": f"none; a fake device for {pool_tokens} tokens"})


def main(spec: ChildSpec, ready: Ready) -> None:
    """The door of the scheduler process."""
    run(spec, ready, make_device)


if __name__ == "__main__":
    sys.exit(launch.main(scheduler_door="examples.fake_device:main"))
