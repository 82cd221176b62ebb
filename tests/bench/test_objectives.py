from types import SimpleNamespace

from bench import objectives
from tests.bench.sizes import TINY_WIDE, tiny

PLANS = {
    "flops": SimpleNamespace(flops_forward=10**6, program=SimpleNamespace(copied_bytes=30)),
    "time": SimpleNamespace(flops_forward=2 * 10**6, program=SimpleNamespace(copied_bytes=40)),
}


def test_a_row_holds_both_objectives_and_ratios_of_their_medians(monkeypatch):
    ran = []

    def medians_ms(versions, repeats, *, prepare):
        for name, run in versions.items():
            prepare(name)
            run()
            ran.append(name)
        return {"dense": 3.0, "flops": 4.5, "time": 1.5}

    monkeypatch.setattr(objectives, "medians_ms", medians_ms)
    row = objectives.row_for(tiny(TINY_WIDE), repeats=2)
    assert ran == ["dense", "flops", "time"]
    assert (row["layer"], row["ranks"]) == ("tiny", "1x3x4x5x4x3x1")
    assert (row["dense_ms"], row["flops_ms"], row["time_ms"]) == (3.0, 4.5, 1.5)
    assert (row["flops_over_time"], row["dense_over_time"]) == (3.0, 2.0)
    # What the plans cost is of the plans, not of the clock.
    monkeypatch.setattr(objectives, "plan_linear", lambda spec, tokens, objective: PLANS[objective])
    row = objectives.row_for(tiny(TINY_WIDE), repeats=2)
    assert (row["flops_mflops"], row["time_mflops"]) == (1, 2)
    assert (row["flops_copied_bytes"], row["time_copied_bytes"]) == (30, 40)
