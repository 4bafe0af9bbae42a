"""L4, each rank: how many tokens the KV pool holds. Pure arithmetic, and the numbers it starts from on a CPU."""

from __future__ import annotations

import math
from dataclasses import dataclass

from srt.model_config import ModelError


@dataclass(frozen=True)
class MemoryPlan:
    """`pool_tokens` are usable tokens, a whole number of pages; the spare page comes on top. Sizes in bytes."""

    pool_tokens: int
    bytes_per_token: int
    page_size: int
    weights: int
    free_before: int
    free_after: int
    fraction: float
    budget_tokens: int  # what the memory would hold, before max_total_tokens

    @property
    def pool_bytes(self) -> int:
        return (self.pool_tokens + self.page_size) * self.bytes_per_token

    def __str__(self) -> str:
        capped = "" if self.pool_tokens == self.budget_tokens else f", of {self.budget_tokens} that would fit"
        return (
            f"weights {gib(self.weights)}; KV pool {self.pool_tokens} tokens{capped}, {gib(self.pool_bytes)} at "
            f"{self.bytes_per_token} bytes a token (free after load {gib(self.free_after)} - free before "
            f"{gib(self.free_before)} x (1 - {self.fraction:g}))"
        )


def plan_memory(
    *,
    free_before: int,
    free_after: int,
    fraction: float,
    bytes_per_token: int,
    page_size: int,
    max_total_tokens: int | None,
) -> MemoryPlan:
    """pool = free after load - free before load x (1 - fraction), in whole pages, one of which is the spare one.

    `fraction` is thus the share of what was free that weights and pool may take together. Raises ModelError if not even
    one page fits.
    """
    budget = free_after - int(free_before * (1 - fraction))
    page_bytes = page_size * bytes_per_token
    budget_tokens = max(budget // page_bytes - 1, 0) * page_size
    pool_tokens = budget_tokens
    if max_total_tokens is not None:
        pool_tokens = min(pool_tokens, max(max_total_tokens // page_size, 1) * page_size)
    if pool_tokens == 0:
        needed = max(free_before - free_after, 0) + 2 * page_bytes
        least = math.ceil(1000 * needed / free_before) / 1000
        way = f"raise it to {least:g} at least, or " if least < 1 else ""
        raise ModelError(
            f"weights and the KV cache's first pages take {mib(needed)}, but --mem-fraction-static {fraction:g} of "
            f"{mib(free_before)} of free memory is {mib(fraction * free_before)}: {way}serve a smaller model"
        )
    return MemoryPlan(
        pool_tokens=pool_tokens,
        bytes_per_token=bytes_per_token,
        page_size=page_size,
        # Others come and go meanwhile, so the difference may even be negative.
        weights=max(free_before - free_after, 0),
        free_before=free_before,
        free_after=free_after,
        fraction=fraction,
        budget_tokens=budget_tokens,
    )


def gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def mib(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB"


CGROUP_LIMITS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def available_ram() -> int:
    """Bytes this process may still take: MemAvailable, or what the control group has left if that is less."""
    available = _mem_available()
    for limit_path, usage_path in CGROUP_LIMITS:
        limit, usage = _read_int(limit_path), _read_int(usage_path)
        if limit is not None and usage is not None:
            available = min(available, max(limit - usage, 0))
    return available


def own_ram() -> int:
    """Bytes this process has written to, as weights are; what is only mapped from files does not count."""
    return _read_field("/proc/self/status", "RssAnon")


def _mem_available() -> int:
    return _read_field("/proc/meminfo", "MemAvailable")


def _read_field(path: str, name: str) -> int:
    with open(path) as file:
        for line in file:
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    raise OSError(f"{path} has no {name}")


def _read_int(path: str) -> int | None:
    """None for a file that is not there or that says "max"."""
    try:
        with open(path) as file:
            text = file.read().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
