"""Kernels run compiled where a GPU is (marker `gpu`), and under Triton's interpreter on CPU tensors elsewhere."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    if request.param == "cpu" and torch.cuda.is_available():
        pytest.skip("with a GPU kernels run compiled")
    return torch.device(request.param)


@pytest.fixture
def random(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(1)
