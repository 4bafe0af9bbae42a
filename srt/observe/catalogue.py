"""Shared: every metric there is, with its exact meaning and its names in each family. `python -m srt.observe.catalogue`
prints the page about them, which is `srt/observe/METRICS.md`.

A family is the set of names, with a prefix, that the dashboards, autoscalers and routers of one server know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from srt.observe.timeline import STRETCHES

SHORT = (
    *(1e-5, 3e-5, 1e-4, 3e-4, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05),
    *(0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 500.0),
)
TTFT = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
ITL = (
    0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08,
    0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8,
)  # fmt: skip
E2E = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400, 600, 1200, 1800, 2400)
PHASE = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


@dataclass(frozen=True)
class Metric:
    name: str  # in the family lockstep
    kind: Literal["gauge", "counter", "histogram"]
    meaning: str
    sglang: tuple[str, ...] = ()
    vllm: tuple[str, ...] = ()
    label: str = ""  # that tells its series apart, beside the model's name
    buckets: tuple[float, ...] = ()

    def names(self, family: str) -> list[str]:
        """With the family's prefix; none if it has no such metric."""
        return [f"{family}:{name}" for name in ((self.name,) if family == "lockstep" else getattr(self, family))]


def _gauge(name: str, meaning: str, sglang: str, vllm: str = "") -> Metric:
    """Of each engine; `dp_rank` tells several apart."""
    return Metric(name, "gauge", meaning, (sglang,), (vllm,) if vllm else (), "dp_rank")


def _count(name: str, meaning: str, sglang: str = "", vllm: str = "") -> Metric:
    """Of each engine, since its start."""
    return Metric(name, "counter", meaning, (sglang,) if sglang else (), (vllm,) if vllm else (), "dp_rank")


def _times(name: str, buckets: tuple[float, ...], meaning: str, sglang: str = "", vllm: str = "") -> Metric:
    return Metric(name, "histogram", meaning, (sglang,) if sglang else (), (vllm,) if vllm else (), "", buckets)


def _everywhere(name: str, buckets: tuple[float, ...], meaning: str) -> Metric:
    return _times(name, buckets, meaning, name, name)


CATALOGUE = (
    _gauge(
        "requests_running", "requests that have a row and memory, as of the last step", "num_running_reqs",
        "num_requests_running",
    ),
    _gauge(
        "requests_waiting", "requests in the queue or waiting for their grammar, as of the last step", "num_queue_reqs",
        "num_requests_waiting",
    ),
    _gauge(
        "kv_usage", "share of the KV pool, 0 to 1, that running requests hold or lock", "token_usage",
        "kv_cache_usage_perc",
    ),
    _gauge("kv_used_tokens", "tokens of the KV pool that running requests hold or lock", "num_used_tokens"),
    _gauge("kv_total_tokens", "tokens that the KV pool holds", "max_total_num_tokens"),
    _gauge("kv_free_tokens", "tokens of the KV pool that hold nothing", "kv_available_tokens"),
    _gauge("kv_evictable_tokens", "tokens cached that no running request uses", "kv_evictable_tokens"),
    _gauge("cache_hit_rate", "cached share of the prompt tokens of the last 128 requests that began", "cache_hit_rate"),
    _gauge("generation_throughput", "generated tokens per second, over the last 10 s", "gen_throughput"),
    Metric(
        "prompt_tokens_total", "counter",
        "prompt tokens of requests whose first token has come, or that want none and are done",
        ("prompt_tokens_total",), ("prompt_tokens_total", "prefix_cache_queries_total"),
    ),
    Metric(
        "cached_tokens_total", "counter", "of these, those that were cached when the request was first admitted",
        ("cached_tokens_total",), ("prompt_tokens_cached_total", "prefix_cache_hits_total"),
    ),
    Metric(
        "generation_tokens_total", "counter", "tokens that came from the engine",
        ("generation_tokens_total",), ("generation_tokens_total",),
    ),
    Metric(
        "requests_total", "counter", "choices that came to their end, by a stop or by length", ("num_requests_total",)
    ),
    Metric(
        "requests_finished_total", "counter", "the same, by what ended them",
        vllm=("request_success_total",), label="finished_reason",
    ),
    Metric(
        "requests_aborted_total", "counter",
        "choices that ended before: their client left or asked for it, or the engine could not go on with them",
        ("num_aborted_requests_total",),
    ),
    Metric("errors_total", "counter", "HTTP answers with a status of 400 or more, by status", label="status"),
    _count(
        "retractions_total", "times that a running request gave its memory back and waited again",
        "num_retracted_requests_total", "num_preemptions_total",
    ),
    _count(
        "evicted_tokens_total", "cached tokens that left the KV pool to make room for others", "evicted_tokens_total"
    ),
    _count(
        "drafts_total", "times that tokens were expected behind a request's newest one and checked in a step with it",
        vllm="spec_decode_num_drafts_total",
    ),
    _count("drafted_tokens_total", "the tokens of these", vllm="spec_decode_num_draft_tokens_total"),
    _count(
        "accepted_draft_tokens_total", "of these, those that became output; the others were refused, or too late",
        vllm="spec_decode_num_accepted_tokens_total",
    ),
    _gauge("host_used_tokens", "cached tokens in host memory", "hicache_host_used_tokens"),
    _gauge(
        "host_total_tokens", "tokens that host memory has room for; 0 without `--hierarchical-cache-gb`",
        "hicache_host_total_tokens",
    ),
    _count("saved_tokens_total", "tokens moved from the KV pool to host memory", "hicache_backup_tokens_total"),
    _count("restored_tokens_total", "tokens moved from host memory back to the KV pool", "load_back_tokens_total"),
    _everywhere(
        "time_to_first_token_seconds", TTFT, "from `received` until the frontend has the first token"
    ),
    _everywhere(
        "inter_token_latency_seconds", ITL,
        "between tokens as the frontend gets them; k tokens that come together count k times, with a k-th each",
    ),
    _everywhere(
        "request_time_per_output_token_seconds", ITL,
        "from `first_token` to `last_token`, over the number of tokens less one; 0 for one token",
    ),
    _everywhere("e2e_request_latency_seconds", E2E, "from `received` to `taken`"),
    _times(
        "request_queue_time_seconds", PHASE, "from `heard` to `admitted`", "queue_time_seconds",
        "request_queue_time_seconds",
    ),
    _times(
        "request_prefill_time_seconds", PHASE, "from `admitted` to `first_token`", vllm="request_prefill_time_seconds"
    ),
    _times(
        "request_decode_time_seconds", PHASE, "from `first_token` to `last_token`", vllm="request_decode_time_seconds"
    ),
    _times(
        "request_inference_time_seconds", PHASE, "from `admitted` to `last_token`",
        vllm="request_inference_time_seconds",
    ),
    _times("request_prompt_tokens", TOKENS, "tokens of the prompt", "prompt_tokens_histogram", "request_prompt_tokens"),
    _times(
        "request_generation_tokens", TOKENS, "tokens of the output", "generation_tokens_histogram",
        "request_generation_tokens",
    ),
    _times(
        "response_send_seconds", SHORT,
        "from `written` of an answer's last choice until its last byte is with the socket: of each HTTP answer one",
    ),
    Metric(
        "request_stretch_seconds", "histogram", "each stretch of a request's way, see below", label="stretch",
        buckets=SHORT,
    ),
)  # fmt: skip


def page() -> str:
    lines = [
        "# Metrics",
        "",
        "Made by `python -m srt.observe.catalogue`. `/metrics` has them under the names of the families that",
        "`--metrics-names` lists: `lockstep`, `sglang`, `vllm`, each with its prefix, as in `lockstep:kv_usage`.",
        "All have the label `model_name`; what is told by engine has `dp_rank` if there are several; those of the",
        "family `vllm` have `engine`.",
        "",
        "Histograms get one observation for each choice that comes to its end, before the last byte of its answer is",
        "handed to the socket (`inter_token_latency_seconds`: one for each token but the first). Aborted choices are",
        "counted, not observed.",
        "",
        "| lockstep: | sglang: | vllm: | kind | meaning |",
        "|---|---|---|---|---|",
    ]
    for metric in CATALOGUE:
        label = f" {{{metric.label}}}" if metric.label else ""
        others = [", ".join(f"`{name}`" for name in names) for names in (metric.sglang, metric.vllm)]
        lines.append(f"| `{metric.name}`{label} | {' | '.join(others)} | {metric.kind} | {metric.meaning} |")
    lines += [
        "",
        "The family `vllm` also has `cache_config_info`, with the KV pool as labels `block_size` and `num_gpu_blocks`.",
        "",
        "## The way of a request",
        "",
        "The stretches begin with `received`, and each begins where the one before it ended, so they add up. What a",
        "request need not do takes 0 s.",
        "",
        "| stretch | from | to | what happens |",
        "|---|---|---|---|",
        *(f"| {name} | `{begin}` | `{end}` | {meaning} |" for name, begin, end, meaning in STRETCHES),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(page(), end="")
