"""The program that splits requests' time, before the real frontend."""

import json

import pytest

from srt.observe import anatomy
from srt.observe.anatomy import WIRE, Sample, Split
from srt.observe.timeline import NAMES


@pytest.mark.parametrize("more", [[], ["--stream"]])
def test_it_splits_what_it_measures(server, capsys, more):
    flags = ["--base-url", f"http://127.0.0.1:{server.port}", "--prompt", "5", "--output", "1", "4"]
    anatomy.main([*flags, "--repeats", "3", "--concurrency", "1", "2", *more])
    *lines, last = capsys.readouterr().out.splitlines()
    splits = json.loads(last)
    assert [(split["concurrency"], split["output"], split["samples"]) for split in splits] == [
        (1, 1, 3), (2, 1, 4), (1, 4, 3), (2, 4, 4),
    ]  # fmt: skip
    for split in splits:
        assert list(split["ms"]) == [*NAMES, WIRE]
        assert min(split["ms"].values()) >= 0
        assert 0 < max(split["ms"].values()) <= split["wall_ms"]
    assert sum("grows most" in line for line in lines) == 2


@pytest.mark.parametrize(("wall", "told", "adds_up"), [(1.0, 0.9901, True), (1.0, 0.989, False), (0.01, 0.0091, True)])
def test_one_percent_or_one_millisecond(wall, told, adds_up):
    assert Sample(wall, 5, {"prefill": told}).adds_up == adds_up


def test_the_picture(tmp_path):
    pytest.importorskip("matplotlib")
    split = Split(1, 16, 64, 1.0, {**dict.fromkeys(NAMES, 0.07), WIRE: 0.0}, 1, 1)
    anatomy.draw([split], str(tmp_path / "a.png"))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
