"""L1, main process: what /metrics says, in Prometheus' text format. Owns the frontend's counters and histograms.

Names and buckets follow SGLang's (`sglang:`), so that its dashboards work. Gauges are read from the board.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque

from srt.board import Board

TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
ITL_BUCKETS = (
    0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08,
    0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8,
)  # fmt: skip
E2E_BUCKETS = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400, 600, 1200, 1800, 2400)

RATE_WINDOW = 10.0  # seconds over which generated tokens per second are taken
HIT_WINDOW = 128  # requests over which the cache hit rate is taken


class Histogram:
    def __init__(self, buckets: tuple[float, ...]) -> None:
        self._bounds = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def lines(self, name: str, label: str) -> list[str]:
        total = 0
        lines = [f"# TYPE {name} histogram"]
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{le="{bound}",{label}}} {total}')
        return [*lines, f"{name}_sum{{{label}}} {self._sum}", f"{name}_count{{{label}}} {total}"]


class Metrics:
    def __init__(self, model_name: str) -> None:
        escaped = model_name.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        self._label = f'model_name="{escaped}"'
        self._counters = dict.fromkeys(
            (
                "prompt_tokens_total",
                "generation_tokens_total",
                "cached_tokens_total",
                "num_requests_total",
                "num_aborted_requests_total",
            ),
            0,
        )
        self._ttft = Histogram(TTFT_BUCKETS)
        self._itl = Histogram(ITL_BUCKETS)
        self._e2e = Histogram(E2E_BUCKETS)
        self._hits: deque[tuple[int, int]] = deque(maxlen=HIT_WINDOW)
        self._samples: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])

    def first_tokens(self, tokens: int, seconds: float, prompt_tokens: int, cached_tokens: int) -> None:
        self._ttft.observe(seconds)
        self._counters["prompt_tokens_total"] += prompt_tokens
        self._counters["cached_tokens_total"] += cached_tokens
        self._counters["generation_tokens_total"] += tokens
        self._hits.append((cached_tokens, prompt_tokens))

    def next_tokens(self, tokens: int, seconds: float) -> None:
        self._itl.observe(seconds / tokens, tokens)
        self._counters["generation_tokens_total"] += tokens

    def finished(self, seconds: float) -> None:
        self._counters["num_requests_total"] += 1
        self._e2e.observe(seconds)

    def aborted(self) -> None:
        self._counters["num_aborted_requests_total"] += 1

    def sample(self, now: float) -> None:
        """Called about once a second, for the rate."""
        self._samples.append((now, self._counters["generation_tokens_total"]))
        while now - self._samples[0][0] > RATE_WINDOW:
            self._samples.popleft()

    @property
    def gen_throughput(self) -> float:
        """Tokens per second over the last RATE_WINDOW."""
        began, before = self._samples[0]
        seconds = time.monotonic() - began
        return (self._counters["generation_tokens_total"] - before) / max(seconds, 1.0)

    @property
    def cache_hit_rate(self) -> float:
        """Cached share of the prompt tokens of the last HIT_WINDOW requests."""
        prompt = sum(tokens for _, tokens in self._hits)
        return sum(cached for cached, _ in self._hits) / prompt if prompt else 0.0

    def page(self, board: Board) -> str:
        load = Load.of(board)
        gauges = {
            "num_running_reqs": load.running,
            "num_queue_reqs": load.waiting,
            "token_usage": load.token_usage,
            "num_used_tokens": load.used,
            "max_total_num_tokens": load.total,
            "kv_available_tokens": load.free,
            "kv_evictable_tokens": load.cached - load.locked,
            "cache_hit_rate": self.cache_hit_rate,
            "gen_throughput": self.gen_throughput,
        }
        engine = {"evicted_tokens_total": load.evicted, "num_retracted_requests_total": load.retractions}
        lines = []
        for kind, values in (("gauge", gauges), ("counter", {**self._counters, **engine})):
            for name, value in values.items():
                lines += [f"# TYPE sglang:{name} {kind}", f"sglang:{name}{{{self._label}}} {value}"]
        for name, histogram in (
            ("time_to_first_token_seconds", self._ttft),
            ("inter_token_latency_seconds", self._itl),
            ("e2e_request_latency_seconds", self._e2e),
        ):
            lines += histogram.lines(f"sglang:{name}", self._label)
        return "\n".join(lines) + "\n"


class Load:
    """Rank 0's gauges under short names; all ranks' are the same."""

    def __init__(self, gauges: dict[str, int]) -> None:
        self.running = gauges["running"]
        self.waiting = gauges["waiting"]
        self.waiting_tokens = gauges["waiting_tokens"]
        self.total = gauges["pool_total"]
        self.free = gauges["pool_free"]
        self.cached = gauges["pool_cached"]
        self.locked = gauges["pool_locked"]
        self.evicted = gauges["evicted_tokens_total"]
        self.retractions = gauges["retractions_total"]

    @classmethod
    def of(cls, board: Board) -> Load:
        return cls(board.read(0).gauges)

    @property
    def used(self) -> int:
        """Tokens that cannot be had for a new request."""
        return self.total - self.free - (self.cached - self.locked)

    @property
    def token_usage(self) -> float:
        return self.used / self.total if self.total else 0.0
