"""Edits and filters of logits against the same rules in float64, row by row."""

import math

import numpy as np
import pytest
import torch
from test_sampling import draw, noise

from srt.kernels.edits import Biases, Masks, Penalties, edited
from srt.kernels.filtering import least_kept
from srt.kernels.sampling import filtered


def expected_least(scaled_V, top_k, top_p, min_p):
    """By a full sort, in float64."""
    values = np.sort(scaled_V.double().cpu().numpy())[::-1]
    values = values[values > -np.inf]
    kept = values[:top_k] if top_k > 0 else values
    least = kept[-1]
    if top_p < 1:
        mass = np.cumsum(np.exp(kept - values[0]))
        least = kept[min(int(np.searchsorted(mass, top_p * mass[-1])), len(kept) - 1)]
    return max(least, values[0] + math.log(min_p) if min_p > 0 else -np.inf)


def filters(num_rows, device):
    every = [(k, p, m) for k in (0, 1, 7, 40, 10**6) for p in (1.0, 0.3, 0.9, 0.999) for m in (0.0, 0.05, 1.0)]
    chosen = [every[(7 * row + 3) % len(every)] for row in range(num_rows)]
    top_k, top_p, min_p = zip(*chosen, strict=True)
    return (
        torch.tensor(top_k, device=device),
        torch.tensor(top_p, device=device),
        torch.tensor(min_p, device=device),
    )


@pytest.mark.parametrize("spread", [3.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "num_tokens"), [(60, 700), (4, 20000), (200, 128256)])
def test_least_kept(num_rows, num_tokens, dtype, spread, device, random):
    """A wide spread, which the first look decides, and a nearly flat one, where it does not. bfloat16 has many ties."""
    if device.type == "cpu":  # interpreted
        num_rows, num_tokens = {60: (8, 400), 4: (1, 9000), 200: (1, 300)}[num_rows]
    logits, temperature, _, _ = draw(num_rows, num_tokens, device, random, dtype)
    logits[:, :num_tokens] *= spread / 3
    top_k, top_p, min_p = filters(num_rows, device)
    least = least_kept(logits, temperature, top_k, top_p, min_p, num_tokens)
    for row in range(0, num_rows, max(num_rows // 60, 1)):
        wanted = top_k[row].item(), top_p[row].item(), min_p[row].item()
        if temperature[row] == 0 or wanted == (0, 1.0, 0.0):
            assert least[row] == -math.inf
            continue
        scaled = logits[row, :num_tokens].double() / temperature[row].double()
        expected = expected_least(scaled, *wanted)
        kept, expected_kept = (int((scaled >= bound - 1e-5).sum()) for bound in (least[row].item(), expected))
        if wanted[1] == 1:
            assert kept == expected_kept, wanted
        else:  # sums of thousands of float32 masses may end one or two tokens earlier or later
            assert abs(kept - expected_kept) <= max(expected_kept // 500, 1 if dtype == torch.float32 else 200), wanted


def test_a_row_with_one_finite_logit(device):
    logits = torch.full((3, 300), -math.inf, device=device)
    logits[:, 77] = torch.tensor([1.0, -4.0, math.inf])
    one = torch.ones(3, device=device)
    least = least_kept(logits, one, torch.tensor([5, 0, 0], device=device), one * 0.5, one * 0, 300)
    assert (logits[:, 77] >= least).all()
    nothing = torch.full((3, 300), -math.inf, device=device)
    assert (least_kept(nothing, one, one.int(), one * 0.5, one * 0, 300) == -math.inf).all()


VOCAB, WIDTH = 331, 340


def history(device, random, num_rows=8):
    table = torch.randint(0, WIDTH + 9, (num_rows + 3, 90), device=device, generator=random, dtype=torch.int32)
    rows = torch.randperm(num_rows + 3, device=device, generator=random)[:num_rows]
    lengths = torch.randint(20, 90, (num_rows,), device=device, generator=random)
    prompt_lens = torch.randint(1, 20, (num_rows,), device=device, generator=random)
    return rows, lengths, prompt_lens, table


def penalised(logits_V, tokens, prompt_len, repetition, presence, frequency):
    x = logits_V.double().cpu().numpy().copy()
    known = [token for token in tokens if token < WIDTH]
    for token in dict.fromkeys(known):
        x[token] = x[token] / repetition if x[token] > 0 else x[token] * repetition
    output = [token for token in tokens[prompt_len:] if token < WIDTH]
    for token in dict.fromkeys(output):
        x[token] -= presence + frequency * output.count(token)
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_penalties(dtype, device, random):
    logits = (torch.randn((8, WIDTH), device=device, generator=random) * 3).to(dtype)
    rows, lengths, prompt_lens, table = history(device, random)
    repetition = torch.tensor([1.0, 1.3, 0.8, 1.0, 1.0, 1.5, 1.0, 2.0], device=device)
    presence = torch.tensor([0.0, 0.0, 0.0, 0.7, 0.0, -0.5, 0.0, 0.1], device=device)
    frequency = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.4, 0.3, 0.0, 0.2], device=device)
    penalties = Penalties(repetition, presence, frequency, rows, lengths, prompt_lens, table)
    result = edited(logits, VOCAB, penalties)
    for row in range(8):
        tokens = table[rows[row], : lengths[row]].tolist()
        values = (repetition[row].item(), presence[row].item(), frequency[row].item())
        expected = penalised(logits[row], tokens, int(prompt_lens[row]), *values)
        np.testing.assert_allclose(result[row].cpu().numpy(), expected, rtol=1e-5, atol=1e-5)


def test_biases_and_bans(device, random):
    logits = torch.randn((3, WIDTH), device=device, generator=random)
    biases = Biases(
        torch.tensor([0, 2, 2, 0, 0, 1], device=device),
        torch.tensor([7, 7, 330, WIDTH + 4, 7, WIDTH - 1], device=device),
        torch.tensor([2.5, -100.0, 1.25, 9.0, -math.inf, 3.0], device=device),
    )
    expected = logits.clone()
    expected[0, 7] = -math.inf
    expected[2, 7] -= 100
    expected[2, 330] += 1.25
    expected[1, WIDTH - 1] += 3
    torch.testing.assert_close(edited(logits, VOCAB, biases=biases), expected)


def test_masks(device, random):
    """Rows 0 and 2 have masks; what row 2's allows is banned already, so that the mask alone decides."""
    logits = torch.randn((3, WIDTH), device=device, generator=random)
    allowed = torch.rand((2, 352), device=device, generator=random) < 0.3
    allowed[1] = False
    allowed[1, [9, 40]] = True
    bits = torch.from_numpy(np.packbits(allowed.cpu().numpy(), axis=1, bitorder="little").view(np.int32)).to(device)
    bans = Biases(*(torch.tensor(x, device=device) for x in ([2, 2], [9, 40], [-math.inf, -math.inf])))
    result = edited(logits, VOCAB, biases=bans, masks=Masks(torch.tensor([0, -1, 1], device=device), bits))
    expected = logits[:, :VOCAB].clone()
    expected[0][~allowed[0, :VOCAB]] = -math.inf
    expected[2] = -math.inf
    expected[2, [9, 40]] = 0
    assert torch.equal(result[:, :VOCAB], expected)


def test_filtered_draws_what_the_rules_leave(device, random):
    """All edits and filters at once."""
    num_rows = 24 if device.type == "cuda" else 5
    logits, temperature, seeds, positions = draw(num_rows, VOCAB, device, random, padding=WIDTH - VOCAB)
    top_k, top_p, min_p = filters(num_rows, device)
    rows, lengths, prompt_lens, table = history(device, random, num_rows)
    repetition = torch.where(torch.arange(num_rows, device=device) % 2 == 0, 1.2, 1.0)
    zeros = torch.zeros(num_rows, device=device)
    penalties = Penalties(repetition, zeros, zeros + 0.1, rows, lengths, prompt_lens, table)
    tokens = filtered(logits, temperature, seeds, positions, VOCAB, top_k, top_p, min_p, penalties=penalties)
    gumbel = noise(seeds, positions, VOCAB).double().numpy()
    for row in range(num_rows):
        known = table[rows[row], : lengths[row]].tolist()
        x = penalised(logits[row], known, int(prompt_lens[row]), repetition[row].item(), 0.0, zeros[row].item() + 0.1)
        x = x[:VOCAB]
        t = temperature[row].item()
        if t > 0:
            x = x / t
            least = expected_least(torch.from_numpy(x), top_k[row].item(), top_p[row].item(), min_p[row].item())
            x = np.where(x >= least - 1e-5, x + gumbel[row], -np.inf)
        assert x[tokens[row]] >= x.max() - 1e-4
