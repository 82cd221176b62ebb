import pytest

from comera_fx.demo.config import DemoConfig, conflict, first_cycle, second_cycle
from comera_fx.errors import ConfigError

CONFIG = DemoConfig(steps=100, warmup_steps=10, final_lr=0.1, second_peak=0.5)


def test_the_first_cycle_rises_then_falls_to_the_final_share():
    shares = [first_cycle(step, CONFIG) for step in range(CONFIG.steps)]
    assert shares[:10] == pytest.approx([0.1 * (step + 1) for step in range(10)])
    assert max(shares) == shares[9] == 1.0
    assert shares[9:] == sorted(shares[9:], reverse=True)
    assert shares[-1] == pytest.approx(0.1)


def test_the_second_cycle_goes_on_from_the_first_and_ends_where_it_did():
    shares = [second_cycle(step, 50, CONFIG) for step in range(70)]
    assert CONFIG.final_lr < shares[0] < CONFIG.second_peak
    assert max(shares) == shares[9] == pytest.approx(0.5)
    assert shares[9:] == sorted(shares[9:], reverse=True)
    assert shares[49:] == pytest.approx([CONFIG.final_lr] * 21)


@pytest.mark.parametrize("steps", [1, 2, 3, 15])
def test_runs_shorter_than_the_warm_up_have_a_schedule_too(steps):
    config = DemoConfig(steps=steps, warmup_steps=10)
    assert all(0 < first_cycle(step, config) <= 1 for step in range(steps))
    assert all(0 <= second_cycle(step, steps, config) <= 1 for step in range(2 * steps))


def test_a_second_cycle_of_no_steps_stays_low():
    assert second_cycle(0, 0, CONFIG) == CONFIG.final_lr


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("steps", 0, "1 or more"),
        ("rank", 0, "1 or more"),
        ("target_ratio", 1.5, "above 0, at most 1, such as 0.5 for half"),
        ("seed", -1, "0 or more"),
        ("num_heads", 3, "a divisor of the width, 256"),
    ],
)
def test_settings_out_of_range_say_what_would_do(name, value, expected):
    with pytest.raises(ConfigError) as caught:
        DemoConfig(**{name: value})
    flag, default = "--" + name.replace("_", "-"), getattr(DemoConfig, name)
    assert str(caught.value) == (
        f"the demo's {name} is out of range\n"
        f"  got:      {value}\n"
        f"  expected: {expected}\n"
        f"  mend:     give another {flag}, or leave it out for {default}"
    )


def test_settings_that_differ_from_the_resumed_run_are_named():
    assert conflict({"rank": 32, "steps": 240}, DemoConfig()) is None
    assert str(conflict({"rank": 16, "seed": 1, "steps": 240}, DemoConfig())) == (
        "some settings differ from those of the run that is resumed, and are not used\n"
        "  got:      rank=16, seed=1\n"
        "  expected: rank=32, seed=0\n"
        "  mend:     leave out --resume to start a new run with them"
    )
