"""What a step computes: priorities, budget, admission and retraction, seen in the plans that the loop makes."""

from __future__ import annotations

from shared.simulation import Setting, Simulation, request


def test_admission_leaves_the_pages_that_decode_rows_need_in_the_same_step():
    """Three rows enter a new page in the step in which a fourth request asks for one of the three that are left."""
    setting = Setting(page_size=16, num_pages=9, context_length=64, token_budget=128, eos_one_in=10**9)
    script = {1: [request(rid, [rid] * 30, 6) for rid in range(3)], 4: [request(3, [3] * 16, 1)]}
    simulation = Simulation(setting, script).run()
    simulation.check()
    assert simulation.planner.retractions == 0
