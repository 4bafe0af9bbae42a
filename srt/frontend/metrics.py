"""L1, frontend: what /metrics says, in Prometheus' text format. Owns the frontend's counters and histograms.

What a metric means, and what it is called in whose words, stands in `srt/observe/catalogue.py`. Gauges are read from
the board.
"""

from __future__ import annotations

import functools
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from struct import Struct

import msgspec
import numpy as np

from srt.board import Board
from srt.frontend.generation import Generation
from srt.observe.catalogue import CATALOGUE, Metric
from srt.observe.timeline import MARKS, NAMES, in_order

RATE_WINDOW = 10.0  # seconds over which generated tokens per second are taken
HIT_WINDOW = 128  # requests over which the cache hit rate is taken
WRITTEN = Struct(f"{len(MARKS) + 2}d")  # of an answer until it is observed: marks, tokens of prompt and of output
MOST_WRITTEN = 1024  # answers that wait for it


class Counts(msgspec.Struct):
    """All that one process has counted, as another can add it to its own."""

    counters: dict[str, int]
    by_label: dict[str, dict[str, int]]
    histograms: list[tuple[list[int], float]]  # as `Metrics` orders them: how many by bucket, and their sum
    engines: list[tuple[int, float, int, int]]  # tokens generated, per second, and of late cached ones of so many


class Histogram:
    def __init__(self, buckets: tuple[float, ...]) -> None:
        self._bounds = buckets
        self._edges = np.array(buckets)  # the same
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    @property
    def totals(self) -> tuple[int, float]:
        """How many there were, and their sum."""
        counts, total = self.counts
        return sum(counts), total

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def observe_all(self, values: np.ndarray) -> None:
        counts = np.bincount(np.searchsorted(self._edges, values), minlength=len(self._counts))
        self._counts = [have + more for have, more in zip(self._counts, counts.tolist(), strict=True)]
        self._sum += float(values.sum())

    @property
    def counts(self) -> tuple[list[int], float]:
        """How many by bucket, and their sum."""
        return self._counts, self._sum

    def plus(self, others: Sequence[tuple[list[int], float]]) -> Histogram:
        """With what other processes have seen."""
        if not others:
            return self
        counts, sums = zip(self.counts, *others, strict=True)
        both = Histogram(self._bounds)
        both._counts = [sum(column) for column in zip(*counts, strict=True)]
        both._sum = sum(sums)
        return both

    def lines(self, name: str, labels: str) -> str:
        counts, seconds = self.counts
        totals = list(accumulate(counts))
        return _lines(name, labels, self._bounds) % (*totals, seconds, totals[-1])


@functools.cache
def _lines(name: str, labels: str, bounds: tuple[float, ...]) -> str:
    """Of a histogram, but for its numbers: how many up to each bound, sum, and count."""
    buckets = [f'_bucket{{le="{bound}",{labels}}}' for bound in (*bounds, "+Inf")]
    series = [*buckets, f"_sum{{{labels}}}", f"_count{{{labels}}}"]
    return "\n".join([f"{name}{one}".replace("%", "%%") + " %s" for one in series])


class Rates:
    """Of one engine, over its last requests and seconds; with those of other processes, once these are known."""

    def __init__(self) -> None:
        self._generated = 0
        self._others: Sequence[tuple[int, float, int, int]] = ()  # as in `Counts`
        self._hits: deque[tuple[int, int]] = deque(maxlen=HIT_WINDOW)
        self._samples: deque[tuple[float, int]] = deque([(time.monotonic(), 0)])

    def prompt(self, prompt_tokens: int, cached_tokens: int) -> None:
        self._hits.append((cached_tokens, prompt_tokens))

    def generated(self, tokens: int) -> None:
        self._generated += tokens

    def add(self, others: Sequence[tuple[int, float, int, int]]) -> None:
        self._others = others

    @property
    def own(self) -> tuple[int, float, int, int]:
        """Of this process, as in `Counts`."""
        hits = [sum(numbers) for numbers in zip(*self._hits, strict=True)] or [0, 0]
        return self._generated, self._own_throughput, *hits

    @property
    def total(self) -> int:
        """Tokens generated."""
        return self._generated + sum(other[0] for other in self._others)

    def sample(self, now: float) -> None:
        self._samples.append((now, self._generated))
        while now - self._samples[0][0] > RATE_WINDOW:
            self._samples.popleft()

    @property
    def gen_throughput(self) -> float:
        """Tokens per second over the last RATE_WINDOW."""
        return self._own_throughput + sum(other[1] for other in self._others)

    @property
    def _own_throughput(self) -> float:
        began, before = self._samples[0]
        seconds = time.monotonic() - began
        return (self._generated - before) / max(seconds, 1.0)

    @property
    def cache_hit_rate(self) -> float:
        """Cached share of the prompt tokens of the last HIT_WINDOW requests of each process."""
        _, _, cached, prompt = map(sum, zip(self.own, *self._others, strict=True))
        return cached / prompt if prompt else 0.0


class Metrics:
    def __init__(self, families: Sequence[str], model_name: str, num_engines: int, page_size: int = 1) -> None:
        self._families = families
        self._model = f'model_name="{_escaped(model_name)}"'
        self._page_size = page_size
        self._counters = dict.fromkeys(
            (
                "prompt_tokens_total",
                "cached_tokens_total",
                "generation_tokens_total",  # as of when somebody asked
                "requests_total",
                "requests_aborted_total",
            ),
            0,
        )
        self._by_label = {"requests_finished_total": Counter({"stop": 0, "length": 0}), "errors_total": Counter()}
        self._histograms = {
            metric.name: Histogram(metric.buckets)
            for metric in CATALOGUE
            if metric.kind == "histogram" and not metric.label
        }
        stretches = next(metric for metric in CATALOGUE if metric.label == "stretch")
        self._stretches = {name: Histogram(stretches.buckets) for name in NAMES}
        self._written = bytearray()  # one WRITTEN after the other
        self._handed: list[float] = []  # what `handed` was told of since these were observed
        self._ttft = self._histograms["time_to_first_token_seconds"]
        self._itl = self._histograms["inter_token_latency_seconds"]
        self._send = self._histograms["response_send_seconds"]
        self.engines = [Rates() for _ in range(num_engines)]
        self._others: Sequence[Counts] = ()

    def counts(self) -> Counts:
        """Of this process."""
        self._catch_up()
        histograms = [histogram.counts for histogram in self._all_histograms()]
        return Counts(self._counters, self._by_label, histograms, [engine.own for engine in self.engines])

    def add(self, others: Sequence[Counts]) -> None:
        """What other processes have counted by now; it is part of all that is said until they are asked again."""
        self._others = others
        for at, engine in enumerate(self.engines):
            engine.add([other.engines[at] for other in others])

    def _all_histograms(self) -> Iterator[Histogram]:
        yield from self._histograms.values()
        yield from self._stretches.values()

    def first_token(self, generation: Generation, now: float) -> None:
        self._ttft.observe(now - generation.timeline.received)
        self._prompt(generation)

    def _prompt(self, generation: Generation) -> None:
        """All of it was computed or found in the cache."""
        prompt_tokens, cached_tokens = generation.prompt.num_tokens, generation.cached_tokens
        self._counters["prompt_tokens_total"] += prompt_tokens
        self._counters["cached_tokens_total"] += cached_tokens
        self.engines[generation.assignment.engine].prompt(prompt_tokens, cached_tokens)

    def tokens(self, engine: int, number: int, gaps: Mapping[float, int]) -> None:
        """What a step gave, and how many of these came how many seconds after the one before. Most gaps are equal."""
        self.engines[engine].generated(number)
        for seconds, times in gaps.items():
            self._itl.observe(seconds, times)

    def finished(self, generation: Generation) -> None:
        if not generation.completion_tokens:  # none was wanted
            self._prompt(generation)
        self._counters["requests_total"] += 1
        self._by_label["requests_finished_total"][generation.finish.reason] += 1

    def written(self, generation: Generation, now: float) -> None:
        """It has ended, and the last of it is about to be handed to the socket, or nobody wants it any more. Once."""
        timeline = generation.timeline
        timeline.written = now
        if generation.finish.reason != "abort":
            generation.arrived.written = now
            self._written += WRITTEN.pack(*timeline.raw(), generation.prompt.num_tokens, generation.completion_tokens)
            if len(self._written) >= MOST_WRITTEN * WRITTEN.size:
                self._observe_written()

    def handed(self, seconds: float) -> None:
        """The last byte of an answer is with the socket, so long after it was written."""
        self._handed.append(seconds)

    def _catch_up(self) -> None:
        """Much at once costs little more than one, so it waits for this until somebody asks."""
        self._counters["generation_tokens_total"] = sum(engine.own[0] for engine in self.engines)
        if self._written or self._handed:
            self._observe_written()

    def _observe_written(self) -> None:
        self._send.observe_all(np.array(self._handed))
        self._handed.clear()
        written, self._written = np.frombuffer(self._written).reshape(-1, len(MARKS) + 2), bytearray()
        marks, prompt, output = in_order(written[:, :-2]), *written[:, -2:].T
        for histogram, seconds in zip(self._stretches.values(), np.diff(marks).T, strict=True):
            histogram.observe_all(seconds)
        at = dict(zip(MARKS, marks.T, strict=True))
        decode = at["last_token"] - at["first_token"]
        for name, values in (
            ("request_time_per_output_token_seconds", decode / np.maximum(output - 1, 1)),
            ("e2e_request_latency_seconds", at["taken"] - at["received"]),
            ("request_queue_time_seconds", at["admitted"] - at["heard"]),
            ("request_prefill_time_seconds", at["first_token"] - at["admitted"]),
            ("request_decode_time_seconds", decode),
            ("request_inference_time_seconds", at["last_token"] - at["admitted"]),
            ("request_prompt_tokens", prompt),
            ("request_generation_tokens", output),
        ):
            self._histograms[name].observe_all(values)

    @property
    def inter_token(self) -> tuple[int, float]:
        """How many tokens came after another one, and how many seconds in all."""
        return self._everybodys(self._itl).totals

    def _everybodys(self, histogram: Histogram) -> Histogram:
        if not self._others:
            return histogram
        at = next(at for at, one in enumerate(self._all_histograms()) if one is histogram)
        return histogram.plus([other.histograms[at] for other in self._others])

    def aborted(self) -> None:
        self._counters["requests_aborted_total"] += 1

    def refused(self, status: int) -> None:
        """A request got an error for an answer."""
        self._by_label["errors_total"][str(status)] += 1

    def sample(self, now: float) -> None:
        """Called about once a second."""
        for engine in self.engines:
            engine.sample(now)

    def page(self, boards: Sequence[Board]) -> str:
        self._catch_up()
        loads = [Load.of(board) for board in boards]
        by_engine = [_of_engine(*engine) for engine in zip(loads, self.engines, strict=True)]
        lines: list[str] = []
        for family in self._families:
            for metric in CATALOGUE:
                for name in metric.names(family):
                    # A name without series has no labels, so a router could not join it with those of other workers.
                    if series := list(self._series(metric, name, family, by_engine)):
                        lines += [f"# HELP {name} {metric.meaning}", f"# TYPE {name} {metric.kind}", *series]
            if family == "vllm":
                lines.append("# TYPE vllm:cache_config_info gauge")
                for engine, load in enumerate(loads):
                    blocks = f'block_size="{self._page_size}",num_gpu_blocks="{load.total // self._page_size}"'
                    lines.append(f'vllm:cache_config_info{{{self._model},engine="{engine}",{blocks}}} 1')
        return "\n".join(lines) + "\n"

    def _series(self, metric: Metric, name: str, family: str, by_engine: Sequence[dict[str, float]]) -> Iterator[str]:
        labels = f'{self._model},engine="0"' if family == "vllm" else self._model
        if metric.label == "dp_rank":
            for engine, values in enumerate(by_engine):
                yield f"{name}{{{self._engine(engine, family)}}} {values[metric.name]}"
        elif metric.label == "stretch":
            for stretch, histogram in self._stretches.items():
                yield self._everybodys(histogram).lines(name, f'{labels},stretch="{stretch}"')
        elif metric.kind == "histogram":
            yield self._everybodys(self._histograms[metric.name]).lines(name, labels)
        elif metric.label:
            counted = sum((Counter(other.by_label[metric.name]) for other in self._others), Counter())
            counted.update(self._by_label[metric.name])
            for value, count in counted.items():
                yield f'{name}{{{labels},{metric.label}="{value}"}} {count}'
        else:
            counted = sum(counters[metric.name] for counters in (self._counters, *(o.counters for o in self._others)))
            yield f"{name}{{{labels}}} {counted}"

    def _engine(self, engine: int, family: str) -> str:
        if family == "vllm":
            return f'{self._model},engine="{engine}"'
        return f'{self._model},dp_rank="{engine}"' if len(self.engines) > 1 else self._model


def _of_engine(load: Load, rates: Rates) -> dict[str, float]:
    return {
        "requests_running": load.running,
        "requests_waiting": load.waiting,
        "kv_usage": load.token_usage,
        "kv_used_tokens": load.used,
        "kv_total_tokens": load.total,
        "kv_free_tokens": load.free,
        "kv_evictable_tokens": load.cached - load.locked,
        "cache_hit_rate": rates.cache_hit_rate,
        "generation_throughput": rates.gen_throughput,
        "retractions_total": load.retractions,
        "evicted_tokens_total": load.evicted,
        "drafts_total": load.drafts,
        "drafted_tokens_total": load.drafted,
        "accepted_draft_tokens_total": load.accepted,
        "host_used_tokens": load.host_used,
        "host_total_tokens": load.host_total,
        "saved_tokens_total": load.saved,
        "restored_tokens_total": load.restored,
    }


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


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
        self.drafts = gauges["drafts_total"]
        self.drafted = gauges["drafted_tokens_total"]
        self.accepted = gauges["accepted_draft_tokens_total"]
        self.host_total = gauges["host_total"]
        self.host_used = gauges["host_used"]
        self.saved = gauges["saved_tokens_total"]
        self.restored = gauges["restored_tokens_total"]

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
