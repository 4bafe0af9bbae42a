"""A histogram has each observation once, in its bucket, however it came."""

import random
import re

import numpy as np
import pytest

from srt.board import Board, RankRecord
from srt.frontend.generation import Generation, Prompt
from srt.frontend.metrics import MOST_WRITTEN, Histogram, Metrics
from srt.messages import Finish
from srt.observe.timeline import NAMES, Arrival, Timeline

BOUNDS = (0.0, 0.5, 1.0, 4.0)


def read(histogram):
    """Cumulative counts by bound, and the sum, as a scraper reads them."""
    lines = histogram.lines("x", 'a="b"').splitlines()
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


def test_answers_are_observed_however_many_wait_for_it(tmp_path):
    board, metrics = Board.create(str(tmp_path / "board"), 1), Metrics(["lockstep"], "100%s", 1)
    RankRecord(board, 0)
    count = 2 * MOST_WRITTEN + 7
    for at in range(count):
        timeline = Timeline(1.0)
        timeline.parsed, timeline.taken = 2.0, 4.0
        prompt = Prompt("", b"abcd" * (1 + at % 2), None)
        way = timeline, Arrival(1.0)
        generation = Generation(at, "", 0, prompt, None, None, *way, completion_tokens=5, finish=Finish("stop"))
        metrics.written(generation, 4.5)
    page = metrics.page([board])
    board.close()

    def number(series):
        return float(re.search(rf"^lockstep:{re.escape(series)} (\S+)$", page, re.MULTILINE)[1])

    model = 'model_name="100%s"'
    assert number(f"request_prompt_tokens_sum{{{model}}}") == count + count // 2
    assert number(f"request_generation_tokens_sum{{{model}}}") == 5 * count
    for name in NAMES:
        stretch = f'{{{model},stretch="{name}"}}'
        assert number(f"request_stretch_seconds_count{stretch}") == count
        seconds = {"parse": 1.0, "deliver": 2.0, "write": 0.5}.get(name, 0.0)
        assert number(f"request_stretch_seconds_sum{stretch}") == pytest.approx(seconds * count)
