"""L4, each rank: kernels compiled several at a time, before the first of them is launched.

What compiles works for the most part without Python's lock, so it takes threads and no processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction


@contextmanager
def compiled_ahead() -> Iterator[None]:
    """Kernels that are called within are compiled and loaded, and not launched: what they give is not to be read."""
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        run(self, *args, grid=grid, warmup=True, **kwargs)

    JITFunction.run = compile_only
    try:
        with ThreadPoolExecutor(initializer=torch.cuda.set_device, initargs=(torch.cuda.current_device(),)) as threads:
            with triton.AsyncCompileMode(threads) as compiling:
                yield
                kernels = list(compiling.future_kernels.values())
            list(threads.map(_load, kernels))
    finally:
        JITFunction.run = run


def _load(kernel: triton.FutureKernel) -> None:
    """With its launcher, which is compiled, too."""
    kernel.result().run  # noqa: B018
