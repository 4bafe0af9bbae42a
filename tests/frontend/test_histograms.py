"""A histogram has each observation once, in its bucket, however it came."""

import random
import re

import numpy as np
import pytest

from srt.frontend.metrics import Histogram

BOUNDS = (0.0, 0.5, 1.0, 4.0)


def read(histogram):
    """Cumulative counts by bound, and the sum, as a scraper reads them."""
    lines = list(histogram.lines("x", 'a="b"'))
    buckets = {
        match[1]: int(match[2]) for line in lines if (match := re.match(r'x_bucket\{le="(\S+)",a="b"\} (\d+)', line))
    }
    total = float(lines[-2].removeprefix('x_sum{a="b"} '))
    assert lines[-1] == f'x_count{{a="b"}} {buckets["+Inf"]}'
    return buckets, total


@pytest.mark.parametrize("seed", range(20))
def test_what_was_observed_is_counted(seed):
    rnd = random.Random(seed)
    histogram, other, seen = Histogram(BOUNDS), Histogram(BOUNDS), []
    for _ in range(rnd.randrange(60)):
        value = rnd.choice([0.0, 0.25, 0.5, 0.75, 1.0, 3.0, 9.0])
        if rnd.random() < 0.2:
            seen += [value, 0.3]
            histogram.observe_all(np.array([value, 0.3]))
        elif rnd.random() < 0.2:
            seen.append(value)
            other.observe(value)
        elif rnd.random() < 0.2:
            histogram.totals  # noqa: B018  whoever looks changes nothing
        else:
            times = rnd.randrange(1, 4)
            seen += [value] * times
            histogram.observe(value, times)
    expected = {str(bound): sum(value <= bound for value in seen) for bound in BOUNDS} | {"+Inf": len(seen)}
    assert read(histogram.plus([other.counts])) == (expected, pytest.approx(sum(seen)))
