"""Packed multiplications against float64, by whatever kernels this CPU has."""

from __future__ import annotations

import pytest
import torch

from srt.executor.memory_plan import own_ram
from srt.kernels import cpu
from srt.layers.cpu_linear import (
    FEW_ROWS,
    FbgemmFloat16,
    OneDnn,
    Plain,
    filled_up,
    packed,
    packs_float16,
    packs_float32,
    works,
)


@pytest.mark.parametrize("spend_memory", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float16, 1e-6), (torch.bfloat16, 4e-3)])
def test_any_number_of_rows(dtype, tolerance, compiled, bias, spend_memory, monkeypatch):
    monkeypatch.setattr(cpu, "AVAILABLE", compiled and cpu.AVAILABLE)
    generator = torch.Generator().manual_seed(1)
    weight = (torch.randn((150, 70), generator=generator) * 0.05).to(dtype)
    bias_O = torch.randn(150, generator=generator).to(dtype) if bias else None
    multiply = packed(weight, bias_O, spend_memory)
    for num_rows in (1, 2, FEW_ROWS, FEW_ROWS + 1, 16, 33):
        x = torch.randn((num_rows, 70), generator=generator)
        expected = x.double() @ weight.double().T + (0 if bias_O is None else bias_O.double())
        result = multiply(x)
        assert result.dtype == torch.float32
        assert (result.double() - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize("compiled", [True, False])
def test_weights_beyond_float16_are_not_cut_off(compiled, monkeypatch):
    monkeypatch.setattr(cpu, "AVAILABLE", compiled and cpu.AVAILABLE)
    weight = torch.full((4, 8), 1e6, dtype=torch.bfloat16)
    assert packed(weight, None, False)(torch.ones(1, 8))[0, 0].item() == pytest.approx(8e6, rel=1e-2)


def test_what_does_not_work_is_found_out():
    assert works(Plain, torch.float32)
    assert works(FbgemmFloat16, torch.float16) == packs_float16()

    def wrong(weight, bias):
        return lambda x: OneDnn(weight, bias)(x) + 1

    def missing(weight, bias):
        return torch.ops.quantized.no_such_operator(weight, bias)

    assert not works(wrong, torch.float32)
    assert not works(missing, torch.float32)


def test_rows_are_filled_up_to_few_numbers():
    assert [filled_up(rows) for rows in (0, 1, 8, 9, 16, 17, 64, 65, 1024)] == [0, 1, 8, 10, 16, 20, 64, 80, 1024]
    assert all(rows <= filled_up(rows) <= 1.25 * rows for rows in range(2000))
    assert len({filled_up(rows) for rows in range(1, 1025)}) == 36


@pytest.mark.skipif(not packs_float32(), reason="oneDNN does not multiply packed float32 here")
def test_numbers_of_rows_cost_no_memory_each():
    multiply = OneDnn(torch.randn(64, 192), None)
    before = own_ram()
    for num_rows in range(300):
        assert len(multiply(torch.zeros(num_rows, 192))) == num_rows
    assert own_ram() - before < 40e6
