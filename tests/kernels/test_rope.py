"""Rotation, per-head norms and the K/V store against complex numbers in float32, and against the layer's own turns."""

import pytest
import torch

from srt.kernels.rope import rotate_and_store

EPS = 1e-6


def turns(num_positions, head_dim):
    frequencies = 10000.0 ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float64), frequencies)
    return torch.stack((angles.cos(), angles.sin()), dim=1).float()


def rotated(x_NSC, turns_N2F):
    complex_turns = torch.complex(turns_N2F[:, 0], turns_N2F[:, 1])[:, None]
    return torch.view_as_real(torch.view_as_complex(x_NSC.unflatten(-1, (-1, 2)).contiguous()) * complex_turns).flatten(
        2
    )


def normalised(x_NSC, weight_C):
    return x_NSC / (x_NSC.square().mean(-1, keepdim=True) + EPS).sqrt() * weight_C.float()


@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("side_by_side", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (32, 8, 128), (16, 8, 128), (2, 1, 80), (4, 4, 256)]
)
def test_rotate_and_store(num_heads, num_kv_heads, head_dim, side_by_side, with_norms, device, random):
    num_tokens, num_slots, num_positions = 5, 23, 40
    size = (num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    qkv = torch.randn(size, device=device, generator=random).bfloat16()
    table = turns(num_positions, head_dim).to(device)
    positions = torch.tensor([0, 39, 7, 7, 21], device=device)
    slots = torch.tensor([22, 1, 5, 0, 13], device=device)
    before = torch.randn((2, num_slots, num_kv_heads, head_dim), device=device, generator=random).bfloat16()
    if side_by_side:  # a slot's keys and values next to each other in memory
        before = before.transpose(0, 1).contiguous().transpose(0, 1)
    kv = before.clone()
    weights = [torch.rand(head_dim, device=device, generator=random).bfloat16() + 0.5 for _ in range(2)]
    q = rotate_and_store(qkv, table, positions, slots, kv, *(weights if with_norms else ()), eps=EPS)

    expected_q, expected_k, expected_v = qkv.float().split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if with_norms:
        expected_q, expected_k = normalised(expected_q, weights[0]), normalised(expected_k, weights[1])
    close = {"rtol": 8e-3, "atol": 1e-5}
    torch.testing.assert_close(q.float(), rotated(expected_q, table[positions]), **close)
    torch.testing.assert_close(kv[0, slots].float(), rotated(expected_k, table[positions]), **close)
    assert torch.equal(kv[1, slots].float(), expected_v)
    others = [slot for slot in range(num_slots) if slot not in slots.tolist()]
    assert torch.equal(kv[:, others], before[:, others])


def test_queries_go_where_they_are_wanted(device, random):
    qkv = torch.randn((2, 48, 128), device=device, generator=random).bfloat16()
    places = torch.tensor([3, 1], device=device)
    kv = torch.zeros((2, 5, 8, 128), dtype=torch.bfloat16, device=device)
    expected = rotate_and_store(qkv, turns(4, 128).to(device), places, places, kv)
    room = torch.zeros((2, 32, 128), dtype=torch.bfloat16, device=device)
    q = rotate_and_store(qkv, turns(4, 128).to(device), places, places, kv, q_NHC=room)
    assert q is room
    assert torch.equal(q, expected)


def test_a_slot_beyond_32_bits_of_elements(device, random):
    """The last slot of a pool whose layer has more than 2³¹ elements."""
    if device.type == "cpu":
        pytest.skip("takes 4 GiB of device memory")
    num_slots = 2**31 // 1024 + 7
    kv = torch.empty((2, num_slots, 8, 128), dtype=torch.bfloat16, device=device)
    qkv = torch.randn((1, 48, 128), device=device, generator=random).bfloat16()
    last = torch.tensor([num_slots - 1], device=device)
    rotate_and_store(qkv, turns(4, 128).to(device), torch.tensor([0], device=device), last, kv)
    assert torch.equal(kv[0, -1], qkv[0, 32:40])
    assert torch.equal(kv[1, -1], qkv[0, 40:])


@pytest.mark.gpu
def test_an_fp8_cache():
    """Larger numbers than it has become the largest."""
    random = torch.Generator("cuda").manual_seed(2)
    qkv = torch.randn((3, 48, 128), device="cuda", generator=random).bfloat16()
    qkv[1, 40:] *= 1000
    kv = torch.zeros((2, 8, 8, 128), device="cuda").to(torch.float8_e4m3fn)
    positions = torch.zeros(3, dtype=torch.int64, device="cuda")
    rotate_and_store(qkv, turns(4, 128).cuda(), positions, torch.tensor([1, 2, 3], device="cuda"), kv)
    for stored, given in ((kv[0, 1:4], qkv[:, 32:40]), (kv[1, 1:4], qkv[:, 40:])):
        assert torch.equal(stored.float(), given.float().clamp(-448, 448).to(torch.float8_e4m3fn).float())
