import pytest

import srt.scheduler.planner


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    """Rows that share a token are read together, since prompts are short here."""
    monkeypatch.setattr(srt.scheduler.planner, "SHARED_LEAST", 1)
