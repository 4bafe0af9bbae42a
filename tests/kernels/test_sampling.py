"""Sampling kernels against the CPU's noise and plain torch in float32."""

import numpy as np
import pytest
import torch

from srt.executor.noise import Noise, row_keys
from srt.kernels.edits import Masks, edited
from srt.kernels.sampling import best_of_shard, best_of_shards, gumbel_argmax, write_tokens


def draw(num_rows, num_tokens, device, random, dtype=torch.float32, padding=5):
    logits = torch.randn((num_rows, num_tokens + padding), device=device, generator=random) * 3
    logits[:, num_tokens:] = 1000.0  # likely, and yet never to be taken
    temperature = torch.tensor([0.0, 0.6, 1.0, 1.7], device=device).repeat(num_rows // 4 + 1)[:num_rows]
    seeds = torch.randint(2**62, (num_rows,), device=device, generator=random) * 2 + 1
    positions = torch.randint(1, 131072, (num_rows,), device=device, generator=random)
    return logits.to(dtype), temperature, seeds, positions


def noise(seeds, positions, num_tokens):
    """The CPU's, [S, V]."""
    source = Noise(num_tokens)
    keys = row_keys(seeds.cpu().numpy(), positions.cpu().numpy())
    return torch.stack([-source.negative_gumbel(key) for key in keys])


def scores(logits, temperature, seeds, positions, num_tokens):
    """What the token is the argmax of, float32 on the CPU."""
    x, t = logits[:, :num_tokens].float().cpu(), temperature.cpu()[:, None]
    return torch.where(t > 0, x / t.clamp(min=1e-9) + noise(seeds, positions, num_tokens), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "num_tokens"), [(1, 331), (7, 5003), (40, 70000), (256, 151936)])
def test_gumbel_argmax(num_rows, num_tokens, dtype, device, random):
    if device.type == "cpu" and num_rows > 7:
        num_rows, num_tokens = 3, 3001
    inputs = draw(num_rows, num_tokens, device, random, dtype)
    tokens = gumbel_argmax(*inputs, num_tokens)
    assert tokens.dtype == torch.int32
    expected = scores(*inputs, num_tokens)
    chosen = expected.gather(1, tokens.cpu().long()[:, None])[:, 0]
    assert (chosen >= expected.amax(1) - 1e-4).all()
    greedy = (inputs[1] == 0).cpu()
    assert torch.equal(tokens.cpu()[greedy].long(), expected[greedy].argmax(1))


def test_noise_is_the_documented_function(device):
    """Flat logits: the token is where the noise is largest, for many seeds. Near-ties aside, it is the CPU's."""
    num_rows, num_tokens = 64, 700
    seeds = torch.arange(num_rows, device=device) * 7919 + 2**62
    positions = torch.arange(num_rows, device=device) * 13
    zeros = torch.zeros((num_rows, num_tokens), device=device)
    tokens = gumbel_argmax(zeros, torch.ones(num_rows, device=device), seeds, positions, num_tokens)
    two = noise(seeds, positions, num_tokens).topk(2)
    clear = two.values[:, 0] - two.values[:, 1] > 1e-4
    assert clear.sum() > 55
    assert torch.equal(tokens.cpu().long()[clear], two.indices[:, 0][clear])


def test_any_batch_gives_the_same_tokens(device, random):
    logits, temperature, seeds, positions = draw(6, 2500, device, random)
    together = gumbel_argmax(logits, temperature, seeds, positions, 2500)
    for row in range(6):
        part = slice(row, row + 1)
        alone = gumbel_argmax(logits[part], temperature[part], seeds[part], positions[part], 2500)
        assert torch.equal(alone, together[part])


def test_ties_go_to_the_lowest_id(device):
    logits = torch.zeros((2, 5000), device=device)
    logits[0, [4000, 1700, 40]] = 2.0
    logits[1, [4999, 1030]] = 1.0
    zeros = torch.zeros(2, dtype=torch.int64, device=device)
    assert gumbel_argmax(logits, zeros.float(), zeros, zeros, 5000).tolist() == [40, 1030]


@pytest.mark.parametrize(("num_tokens", "width"), [(2500, 1250), (1300, 1300), (700, 234)])
def test_the_best_of_shards_is_the_best_of_all(num_tokens, width, device, random):
    """Also where the last shard has fewer tokens, or none."""
    logits, *parameters = draw(6, num_tokens, device, random, padding=2 * width)
    logits[4, :num_tokens] = 1.0  # ties
    logits[5, :num_tokens] = float("nan")
    shards = []
    for start in range(0, max(num_tokens, 2 * width), width):
        tokens = range(start, max(min(start + width, num_tokens), start))
        shards.append(best_of_shard(logits[:, start : start + width], *parameters, tokens))
    assert torch.equal(best_of_shards(torch.stack(shards)), gumbel_argmax(logits, *parameters, num_tokens))


@pytest.mark.parametrize(("num_rows", "num_tokens"), [(6, 1300), (64, 128256)])
def test_masks_as_if_the_logits_were_edited(num_rows, num_tokens, device, random):
    """Every third row has none; also in shards, none of which begins with a word of the mask, and one has no token."""
    if device.type == "cpu" and num_rows > 6:  # interpreted
        num_rows, num_tokens = 4, 130
    logits, *parameters = draw(num_rows, num_tokens, device, random, padding=num_tokens)
    indices = torch.arange(num_rows, dtype=torch.int32, device=device)
    indices[::3] = -1
    bits = torch.randint(-(2**31), 2**31, (num_rows, num_tokens // 32 + 3), device=device, generator=random).int()
    bits[1] = 0
    bits[1, 2] = 1 << 7
    masks = Masks(indices, bits)
    expected = gumbel_argmax(edited(logits, num_tokens, masks=masks), *parameters, num_tokens)
    assert expected[1] == 71
    shards, width = [], num_tokens // 2 + 3
    for start in (0, width, 3 * width):
        tokens = range(start, max(min(start + width, num_tokens), start))
        shards.append(best_of_shard(logits[:, start : start + width], *parameters, tokens, masks=masks))
    whole = best_of_shard(logits, *parameters, range(num_tokens), masks=masks)
    assert torch.equal(whole[1].view(torch.int32), expected)
    assert torch.equal(best_of_shards(torch.stack(shards)), expected)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_allowed_is_drawn_though_it_be_no_number(temperature, device):
    logits = torch.zeros((3, 2000), device=device)
    logits[0] = float("nan")
    logits[1, 1300:] = float("-inf")
    logits[2, 1300:] = float("inf")
    zeros = torch.zeros(3, dtype=torch.int64, device=device)
    bits = torch.zeros((1, 63), dtype=torch.int32, device=device)
    bits[0, [41, 43]] = 1 << 5
    masks = Masks(zeros, bits)
    best = best_of_shard(logits, zeros + temperature, zeros, zeros, range(2000), masks=masks)
    assert best[1].view(torch.int32).tolist() == [1317] * 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_no_number_spoils_its_own_row_only(temperature, device, random):
    logits, _, seeds, positions = draw(3, 2000, device, random)
    t = torch.full((3,), temperature, device=device)
    expected = gumbel_argmax(logits, t, seeds, positions, 2000).tolist()
    for bad in (float("nan"), float("inf"), float("-inf")):
        broken = logits.clone()
        broken[1] = bad
        tokens = gumbel_argmax(broken, t, seeds, positions, 2000).tolist()
        assert tokens[::2] == expected[::2]
        assert 0 <= tokens[1] < 2000


def test_only_what_reaches_the_least_is_drawn(device, random):
    logits, _, seeds, positions = draw(6, 900, device, random)
    t = torch.full((6,), 0.8, device=device)
    least = (logits[:, :900] / 0.8).topk(4).values[:, -1].contiguous()
    tokens = gumbel_argmax(logits, t, seeds, positions, 900, least)
    x = scores(logits, t, seeds, positions, 900).masked_fill(
        (logits[:, :900] / t[:, None] < least[:, None]).cpu(), -100
    )
    chosen = x.gather(1, tokens.cpu().long()[:, None])[:, 0]
    assert (chosen >= x.amax(1) - 1e-4).all()


def test_write_tokens(device):
    table = torch.zeros((5, 9), dtype=torch.int32, device=device)
    rows, positions = torch.tensor([3, -1, 0], device=device), torch.tensor([8, 2, 0], device=device)
    write_tokens(torch.tensor([7, 8, 9], dtype=torch.int32, device=device), rows, positions, table)
    expected = np.zeros((5, 9), np.int32)
    expected[3, 8], expected[0, 0] = 7, 9
    np.testing.assert_array_equal(table.cpu().numpy(), expected)
