"""Shared by the executor's tests."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels then run on CPU tensors


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Matrices this small only lose to the threads' barriers, most of all beside other work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
