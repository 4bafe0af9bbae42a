"""Shared: what this host can do, found without loading torch."""

from __future__ import annotations

import ctypes


def cuda_device_count() -> int:
    """Devices the driver shows; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for it, on x86."""
    with open("/proc/cpuinfo") as file:
        return any("avx512_bf16" in line.split() for line in file if line.startswith("flags"))
