"""What the live page tells of GPUs, where there are some."""

import pytest

from srt.frontend.live_page import _Gpus


@pytest.mark.gpu
def test_gpus_tell_of_their_use():
    gpus = _Gpus(1).usage()
    assert gpus
    for gpu in gpus:
        assert 0 <= gpu["use"] <= 100
        assert 0 < gpu["memory"] < gpu["total"]


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["0", "1"]),
        ("", ["0", "1"]),
        ("3", ["3"]),
        ("2, 5,7", ["2", "5"]),
        ("GPU-a1,GPU-b2", ["GPU-a1", "GPU-b2"]),
    ],
)
def test_two_ranks_gpus_are_those_that_cuda_shows_them(monkeypatch, visible, names):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert _Gpus(2).names == names
