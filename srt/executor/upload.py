"""L4, each rank: small arrays of a step on their way to the device."""

from __future__ import annotations

import numpy as np
import torch


def upload(device: torch.device, *arrays: np.ndarray) -> tuple[torch.Tensor, ...]:
    """Integers of any type, each array one-dimensional, as int64 on the device, in one copy that nobody waits for.

    It goes through pinned memory of torch's, which is not used again before the device has read it.
    """
    if device.type == "cpu":
        return tuple(torch.from_numpy(array.astype(np.int64)) for array in arrays)
    # Each begins at 16 bytes: kernels are compiled anew for pointers that do not.
    begins = np.cumsum([0, *(len(array) + len(array) % 2 for array in arrays)])
    packed = np.zeros(begins[-1], np.int64)
    for begin, array in zip(begins, arrays, strict=False):
        packed[begin : begin + len(array)] = array
    on_device = torch.from_numpy(packed).pin_memory().to(device, non_blocking=True)
    return tuple(on_device[begin : begin + len(array)] for begin, array in zip(begins, arrays, strict=False))


def upload_floats(device: torch.device, *arrays: np.ndarray) -> tuple[torch.Tensor, ...]:
    """The same for float32, or what becomes it."""
    words = upload(device, *(array.astype(np.float32).view(np.int32) for array in arrays))
    return tuple(word.int().view(torch.float32) for word in words)
