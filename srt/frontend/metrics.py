"""L1, main process: what /metrics says, in Prometheus' text format. Owns the frontend's counters and histograms.

Names and buckets follow SGLang's (`sglang:`), so that its dashboards work. Gauges are read from the board.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

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


class Rates:
    """Of one engine, over its last requests and seconds."""

    def __init__(self) -> None:
        self._generated = 0
        self._hits: deque[tuple[int, int]] = deque(maxlen=HIT_WINDOW)
        self._samples: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])

    def prompt(self, prompt_tokens: int, cached_tokens: int) -> None:
        self._hits.append((cached_tokens, prompt_tokens))

    def generated(self, tokens: int) -> None:
        self._generated += tokens

    def sample(self, now: float) -> None:
        self._samples.append((now, self._generated))
        while now - self._samples[0][0] > RATE_WINDOW:
            self._samples.popleft()

    @property
    def gen_throughput(self) -> float:
        """Tokens per second over the last RATE_WINDOW."""
        began, before = self._samples[0]
        seconds = time.monotonic() - began
        return (self._generated - before) / max(seconds, 1.0)

    @property
    def cache_hit_rate(self) -> float:
        """Cached share of the prompt tokens of the last HIT_WINDOW requests."""
        prompt = sum(tokens for _, tokens in self._hits)
        return sum(cached for cached, _ in self._hits) / prompt if prompt else 0.0


class Metrics:
    def __init__(self, model_name: str, num_engines: int) -> None:
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
        self.engines = [Rates() for _ in range(num_engines)]

    def first_tokens(self, engine: int, tokens: int, seconds: float, prompt_tokens: int, cached_tokens: int) -> None:
        self._ttft.observe(seconds)
        self._counters["prompt_tokens_total"] += prompt_tokens
        self._counters["cached_tokens_total"] += cached_tokens
        self._counters["generation_tokens_total"] += tokens
        self.engines[engine].prompt(prompt_tokens, cached_tokens)
        self.engines[engine].generated(tokens)

    def next_tokens(self, engine: int, tokens: int, seconds: float) -> None:
        self._itl.observe(seconds / tokens, tokens)
        self._counters["generation_tokens_total"] += tokens
        self.engines[engine].generated(tokens)

    def finished(self, seconds: float) -> None:
        self._counters["num_requests_total"] += 1
        self._e2e.observe(seconds)

    def aborted(self) -> None:
        self._counters["num_aborted_requests_total"] += 1

    def sample(self, now: float) -> None:
        """Called about once a second, for the rates."""
        for engine in self.engines:
            engine.sample(now)

    def page(self, boards: Sequence[Board]) -> str:
        """What one engine tells has its index for a label, if there are several."""
        loads = [Load.of(board) for board in boards]
        labels = [
            f'{self._label},dp_rank="{engine}"' if len(loads) > 1 else self._label for engine in range(len(loads))
        ]
        lines = []
        for name, value in self._counters.items():
            lines += [f"# TYPE sglang:{name} counter", f"sglang:{name}{{{self._label}}} {value}"]
        for kind, by_engine in (("gauge", map(_gauges, loads, self.engines)), ("counter", map(_counters, loads))):
            columns = list(by_engine)
            for name in columns[0]:
                lines.append(f"# TYPE sglang:{name} {kind}")
                lines += [f"sglang:{name}{{{label}}} {of[name]}" for label, of in zip(labels, columns, strict=True)]
        for name, histogram in (
            ("time_to_first_token_seconds", self._ttft),
            ("inter_token_latency_seconds", self._itl),
            ("e2e_request_latency_seconds", self._e2e),
        ):
            lines += histogram.lines(f"sglang:{name}", self._label)
        return "\n".join(lines) + "\n"


def _gauges(load: Load, rates: Rates) -> dict[str, float]:
    return {
        "num_running_reqs": load.running,
        "num_queue_reqs": load.waiting,
        "token_usage": load.token_usage,
        "num_used_tokens": load.used,
        "max_total_num_tokens": load.total,
        "kv_available_tokens": load.free,
        "kv_evictable_tokens": load.cached - load.locked,
        "cache_hit_rate": rates.cache_hit_rate,
        "gen_throughput": rates.gen_throughput,
    }


def _counters(load: Load) -> dict[str, int]:
    return {"evicted_tokens_total": load.evicted, "num_retracted_requests_total": load.retractions}


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
