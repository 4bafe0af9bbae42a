"""What the live page tells of GPUs, where there are some."""

import pytest

from srt.frontend.live_page import _Gpus


@pytest.mark.gpu
def test_gpus_tell_of_their_use():
    gpus = _Gpus().usage()
    assert gpus
    for gpu in gpus:
        assert 0 <= gpu["use"] <= 100
        assert 0 < gpu["memory"] < gpu["total"]
