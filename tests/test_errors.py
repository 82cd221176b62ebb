"""Errors say four things and survive pickling; every setting out of range is refused with one."""

import copy
import pickle
from dataclasses import fields

import pytest

from comera_fx import errors
from comera_fx.config import OptimizeConfig, PlanConfig, RankConfig
from comera_fx.errors import ComeraError, ConfigError

CLASSES = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, ValueError)]


def test_there_is_a_class_per_stage():
    assert sorted(c.__name__ for c in CLASSES) == [
        "CaptureError",
        "ComeraError",
        "ConfigError",
        "InputError",
        "PlanError",
        "RankError",
        "SpecError",
        "WeightError",
    ]


@pytest.mark.parametrize("cls", CLASSES)
def test_an_error_is_four_lines(cls):
    error = cls("fc1 is wrong", got=(7, 6), expected="at most (6, 6)", mend="give larger modes")
    assert isinstance(error, ComeraError)
    assert str(error) == (
        "fc1 is wrong\n"
        "  got:      (7, 6)\n"
        "  expected: at most (6, 6)\n"
        "  mend:     give larger modes"
    )
    assert cls.__doc__


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("duplicate", [lambda e: pickle.loads(pickle.dumps(e)), copy.deepcopy])
def test_an_error_can_be_pickled_and_copied(cls, duplicate):
    error = cls("fc1 is wrong", got=(7, 6), expected="at most (6, 6)", mend="give larger modes")
    again = duplicate(error)
    assert type(again) is cls
    assert str(again) == str(error)
    assert (again.problem, again.got, again.expected, again.mend) == (
        "fc1 is wrong",
        (7, 6),
        "at most (6, 6)",
        "give larger modes",
    )


NAN, INF = float("nan"), float("inf")
COUNT_1 = ("an int of at least 1", "give an int, 1 or more")
COUNT_0 = ("an int of at least 0", "give an int, 0 or more")
RANKS = ("an int of at least 1, or a tuple", "write 30 or (1, 12, 30, 30, 30, 12, 1)")
MODES = ("a pair (in_modes, out_modes)", "write ((12, 8, 8), (8, 8, 12))")
PATTERNS, MAPPING = "a sequence of patterns", "a mapping from patterns"
OR_NONE = ("an int of at least 1, or None", "leave it None for the default")
WEIGHT = ("a finite number, 0 or more", "give 0 to switch it off")
REFUSED = [
    (PlanConfig, "objective", ["fast", None], ("'time', 'flops' or 'memory'", "use the default")),
    (
        PlanConfig,
        "memory_limit_bytes",
        [0, -1, 1.5, True, "1GB"],
        ("a positive number of bytes, or None", "leave it None for no limit"),
    ),
    (PlanConfig, "pad_ranks", [None, 1, "no"], ("True or False", "give False")),
    (PlanConfig, "autotune", [None, 1, "no"], ("True or False", "give True to time plans")),
    (OptimizeConfig, "autotune", [None, 1, "no"], ("True or False", "give True to time plans")),
    (OptimizeConfig, "share", [None, 1, "no"], ("True or False", "give False to have every")),
    (OptimizeConfig, "max_rank", [0, -3, 2.5, None, True, "32"], COUNT_1),
    (OptimizeConfig, "min_params", [-1, 0.5, None], COUNT_0),
    (OptimizeConfig, "num_tokens_hint", [0, 1e3], COUNT_1),
    (OptimizeConfig, "tol", [-0.1, 1, 5.0, NAN], ("a relative error", "use tol=0.05 for 5 %")),
    (
        OptimizeConfig,
        "init",
        ["zeros", None],
        ("'decompose' or 'random'", "use 'decompose' for trained weights, 'random' from scratch"),
    ),
    (
        OptimizeConfig,
        "layouts",
        [{"fc1": "cp"}, {"fc1": None}],
        ("'tt' or 'ttm'", "use 'tt' for linear layers, 'ttm' for embeddings"),
    ),
    (OptimizeConfig, "targets", ["fc1"], (PATTERNS, "write targets=['fc1']")),
    (OptimizeConfig, "targets", [[1], 1, iter(["fc1"])], (PATTERNS, "write targets=['*.fc1']")),
    (OptimizeConfig, "exclude", ["fc1"], (PATTERNS, "write exclude=['fc1']")),
    (OptimizeConfig, "exclude", [None, 3, (None,)], (PATTERNS, "write exclude=['*.fc1']")),
    (OptimizeConfig, "ranks", [None, 8, [("fc1", 8)]], (MAPPING, "write ranks={'*.fc1': 30}")),
    (OptimizeConfig, "layouts", [None, "ttm"], (MAPPING, "write layouts={'*.fc1': 'ttm'}")),
    (
        OptimizeConfig,
        "modes",
        [None, ((8, 8), (8, 8))],
        (MAPPING, "write modes={'*.fc1': ((8, 8), (8, 8))}"),
    ),
    (
        OptimizeConfig,
        "plan",
        [None, "flops", PlanConfig],
        ("a PlanConfig", "write plan=comera_fx.PlanConfig(objective='flops')"),
    ),
    (
        OptimizeConfig,
        "seed",
        [None, "a", 2**70, 2**64, -1, 0.5, True],
        ("an int, 0 or more, below 2**64", "give a small int such as 0"),
    ),
    (
        OptimizeConfig,
        "only_if_faster",
        [None, "no", 0],
        ("True or False", "give False to compress whatever the speed"),
    ),
    (OptimizeConfig, "ranks", [{"fc1": bad} for bad in (0, 2.5, (), (1, 0, 1), "8", True)], RANKS),
    (
        OptimizeConfig,
        "modes",
        [{"fc1": bad} for bad in (8, (), ((8, 8),), ((8, 8), ()), ((8, 0), (8,)), ((2.0,), (8,)))],
        MODES,
    ),
    (RankConfig, "method", ["magnitude", None], ("'comera', 'proximal' or", "use the default")),
    (
        RankConfig,
        "target_ratio",
        [0, -0.5, 1.5, NAN],
        ("0 < target_ratio <= 1", "use target_ratio=0.5 for half"),
    ),
    (RankConfig, "target_params", [0, 2.5, True], OR_NONE),
    (RankConfig, "target_bytes", [0, 2.5], OR_NONE),
    (RankConfig, "gamma", [-1, INF, NAN, "1", None], WEIGHT),
    (RankConfig, "beta", [-1e-9, INF], WEIGHT),
    (RankConfig, "threshold", [-0.01, NAN], WEIGHT),
    (
        RankConfig,
        "threshold",
        [1, 2.0],
        ("below 1, the value at which rank weights start", "use the default, 0.01"),
    ),
    (RankConfig, "w1", [-1, INF], WEIGHT),
    (RankConfig, "w2", [-1, NAN], WEIGHT),
    (RankConfig, "rho", [-1, "0.1"], WEIGHT),
    (RankConfig, "warmup_steps", [-1, 0.5], COUNT_0),
    (RankConfig, "early_steps", [-1, 1.5], ("an int of at least 0, or None", "leave it None")),
    (RankConfig, "shrink_steps", [-1, 1.5], ("an int of at least 0, or None", "leave it None")),
    (RankConfig, "steps_per_epoch", [0, 1.5], OR_NONE),
    (RankConfig, "plateau", [0, True, INF], OR_NONE),
    (RankConfig, "early_epochs", [-1, NAN, "2"], ("a number of epochs, 0 or more", "leave it")),
    (RankConfig, "patience", [0, 1.5, None], COUNT_1),
    (RankConfig, "regrow", [-1, NAN, None], WEIGHT),
    (RankConfig, "regrow", [1, 2.0], ("a share below 1", "use method='proximal' or")),
    (RankConfig, "balance", [None, 1], ("True or False", "give False for the rank weights")),
    (RankConfig, "skip_nonfinite", [None, "no"], ("True or False", "give False where no step")),
    (
        RankConfig,
        "min_ranks",
        [None, 4, {"fc1": -1}, {1: 4}],
        ("a mapping from patterns to ints, 0 or more", "write min_ranks={'*.fc1': 4}"),
    ),
    (RankConfig, "prune_every", [0, None], COUNT_1),
    (RankConfig, "min_rank", [-1, True], COUNT_0),
    (RankConfig, "exclude", ["fc1"], (PATTERNS, "write exclude=['fc1']")),
    (RankConfig, "exclude", [None, [1]], (PATTERNS, "write exclude=['*.fc1']")),
]


@pytest.mark.parametrize(
    ("config", "field", "value", "texts"),
    [(cls, field, value, texts) for cls, field, values, texts in REFUSED for value in values],
)
def test_a_setting_out_of_range_is_refused(config, field, value, texts):
    with pytest.raises(ConfigError) as caught:
        config(**{field: value})
    is_entry = isinstance(value, dict) and config is OptimizeConfig
    name = f"{config.__name__}.{field}" + ("['fc1']" if is_entry else "")
    got = value["fc1"] if is_entry else value
    expected, mend = texts
    problem, *lines = str(caught.value).splitlines()
    assert problem == f"{name} is out of range"
    assert lines[0] == f"  got:      {got!r}"
    assert lines[1].startswith(f"  expected: {expected}")
    assert lines[2].startswith("  mend:     ")
    assert mend in lines[2]


@pytest.mark.parametrize("config", [PlanConfig, OptimizeConfig, RankConfig])
def test_every_setting_with_a_range_is_tried(config):
    tried = {field for cls, field, _, _ in REFUSED if cls is config}
    assert tried == {field.name for field in fields(config)}


@pytest.mark.parametrize("field", ["ranks", "layouts", "modes"])
def test_keys_that_are_no_patterns_are_refused(field):
    with pytest.raises(ConfigError, match=f"OptimizeConfig.{field} is out of range") as caught:
        OptimizeConfig(**{field: {1: 8}})
    assert caught.value.expected == MAPPING


def test_two_targets_are_refused():
    with pytest.raises(ConfigError) as caught:
        RankConfig(target_ratio=0.5, target_bytes=4096)
    assert str(caught.value) == (
        "RankConfig target is out of range\n"
        "  got:      {'target_ratio': 0.5, 'target_params': None, 'target_bytes': 4096}\n"
        "  expected: at most one target\n"
        "  mend:     keep one of the three"
    )


@pytest.mark.parametrize(
    ("settings", "expected", "mend"),
    [
        (
            {"gamma": 1.0},
            "below 1 with method='proximal'",
            "or method='comera', where",
        ),
        (
            {"beta": 0.5},
            "left out with method='proximal'",
            "leave out beta, or use method=",
        ),
        ({"w1": 2.0, "method": "rounding"}, "left out with method='rounding'", "leave out w1"),
        ({"w2": 0.0}, "left out with method='proximal'", "leave out w2"),
        ({"rho": 0.5, "method": "rounding"}, "left out with method='rounding'", "leave out rho"),
        ({"shrink_steps": 50, "method": "comera"}, "None with method='comera'", "raise rho"),
        ({"steps_per_epoch": 7}, "None without early_epochs", "give early_epochs too"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_settings_that_a_method_does_not_read_are_refused(settings, expected, mend):
    with pytest.raises(ConfigError) as caught:
        RankConfig(**settings)
    name, got = next(iter(settings.items()))
    problem, *lines = str(caught.value).splitlines()
    assert problem == f"RankConfig.{name} is out of range"
    assert lines[0] == f"  got:      {got!r}"
    assert lines[1].startswith(f"  expected: {expected}")
    assert mend in lines[2]
    assert len(lines) == 3


@pytest.mark.parametrize(
    "settings",
    [
        {"early_steps": 0},
        {"early_epochs": 2.5, "steps_per_epoch": 7},
        {"plateau": 3},
        {"shrink_steps": 50},
        {"shrink_steps": 50, "method": "rounding"},
        {"regrow": 0.1},
        {"w1": 2.0, "method": "comera"},
        {"w2": 0.0, "method": "comera"},
        {"rho": 0.5, "method": "comera"},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_that_do_nothing_without_a_target_are_refused(settings):
    name, got = next(iter(settings.items()))
    with pytest.raises(ConfigError) as caught:
        RankConfig(**settings)
    assert str(caught.value) == (
        f"RankConfig.{name} is out of range\n"
        f"  got:      {got!r}\n"
        "  expected: left out without a target, where the early stage has no end\n"
        f"  mend:     give a target such as target_ratio=0.5, or leave out {name}"
    )
    for target in ({"target_ratio": 0.5}, {"target_params": 9}, {"target_bytes": 9}):
        assert getattr(RankConfig(**settings, **target), name) == got


def test_settings_at_the_ends_of_their_ranges_are_taken():
    PlanConfig(memory_limit_bytes=1)
    OptimizeConfig(max_rank=1, min_params=0, num_tokens_hint=1, tol=0, seed=2**64 - 1)
    OptimizeConfig(targets={"a"}, exclude=("b", "c"), plan=PlanConfig())
    OptimizeConfig(ranks={"a": 1, "b": (1, 4, 1)}, modes={"a": ([4, 4], [2, 8])}, targets=[])
    RankConfig(target_ratio=1, threshold=0, early_steps=0, warmup_steps=0, prune_every=1)
    RankConfig(method="comera", beta=0, min_rank=0, exclude=["head"])
    RankConfig(method="comera", w1=0, w2=0, rho=1, target_bytes=1)
    RankConfig(method="comera", gamma=100.0)
    RankConfig(gamma=0, beta=0.0, w1=1, rho=0.1, target_ratio=1, early_epochs=0, steps_per_epoch=1)
    assert RankConfig(target_params=1).target_params == 1
