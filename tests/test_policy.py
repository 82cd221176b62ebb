"""policy: which layers get which shape, and the reason of every layer that stays dense."""

from typing import Any

import pytest
import torch
from torch import nn

from comera_fx import policy
from comera_fx.config import OptimizeConfig, PlanConfig
from comera_fx.errors import ConfigError, SpecError
from comera_fx.plan.linear import plan_linear
from comera_fx.policy import Choice, decide, refuse_if_nothing
from comera_fx.spec import TTSpec


def choose(
    model: nn.Module,
    num_tokens: dict[str, int] | None = None,
    functional: dict[str, str] | None = None,
    called: frozenset[str] | None = None,
    **config: Any,
) -> dict[str, Choice]:
    names = frozenset(name for name, _ in model.named_modules())
    choices = decide(
        model,
        OptimizeConfig(**{"min_params": 1, "max_rank": 4, **config}),
        called=names if called is None else called,
        num_tokens=num_tokens or {},
        functional=functional or {},
    )
    return {choice.candidate.name: choice for choice in choices}


def reason(model: nn.Module, name: str = "0", **kwargs: Any) -> str:
    choice = choose(model, **kwargs)[name]
    assert (choice.spec is None) == bool(choice.reason)
    return choice.reason


def linear(in_features: int = 64, out_features: int = 64) -> nn.Linear:
    return nn.Linear(in_features, out_features)


# ---- shapes ----


def test_linear_layers_get_tt_and_embeddings_ttm():
    choices = choose(nn.Sequential(nn.Embedding(100, 64), linear()))
    assert choices["0"].spec.layout == "ttm"
    assert choices["1"].spec.layout == "tt"
    assert choices["1"].spec.in_size == choices["1"].spec.out_size == 64
    assert choices["0"].spec.in_size >= 100


def test_tables_that_train_from_scratch_get_two_wide_cores():
    table = nn.Sequential(nn.Embedding(4096, 256))
    spec = choose(table, init="random", max_rank=32)["0"].spec
    assert spec == TTSpec("ttm", (64, 64), (16, 16), (1, 32, 1))
    layouts = {"0": "tt"}
    spec = choose(table, init="random", max_rank=40, layouts=layouts)["0"].spec
    assert spec == TTSpec("tt", (64, 64), (16, 16), (1, 32, 40, 8, 1))
    given = {"0": ((16, 16, 16), (16, 16))}
    spec = choose(table, init="random", max_rank=8, layouts=layouts, modes=given)["0"].spec
    assert spec == TTSpec("tt", (16, 16, 16), (16, 16), (1, 8, 8, 8, 8, 1))
    decomposed = choose(table, init="decompose", max_rank=32)["0"].spec
    assert decomposed is not None
    assert len(decomposed.in_modes) > 2


def test_modes_ranks_and_layouts_are_taken_by_the_first_pattern_that_matches():
    model = nn.ModuleDict({"a": linear(), "b": linear(), "c": linear()})
    choices = choose(
        model,
        modes={"a": ((16, 4), (4, 16)), "*": ((8, 8), (8, 8))},
        ranks={"a": (1, 2, 3, 2, 1), "[ab]": 2},
        layouts={"b": "ttm"},
    )
    assert choices["a"].spec == TTSpec("tt", (16, 4), (4, 16), (1, 2, 3, 2, 1))
    assert choices["b"].spec == TTSpec("ttm", (8, 8), (8, 8), (1, 2, 1))
    assert choices["c"].spec == TTSpec("tt", (8, 8), (8, 8), (1, 4, 4, 4, 1))


def test_ranks_are_cut_to_what_a_bond_can_use():
    choice = choose(linear(256, 256), modes={"": ((8, 8, 4), (4, 8, 8))}, max_rank=32)[""]
    assert choice.spec.ranks == (1, 8, 32, 32, 32, 8, 1)
    assert choice.spec.num_params == 12416


def test_modes_may_be_lists():
    choice = choose(nn.Sequential(linear()), modes={"0": ([8, 8], [8, 8])})["0"]
    assert choice.spec.in_modes == (8, 8)


def test_tokens_seen_or_hinted():
    model = nn.Sequential(linear())
    assert choose(model, num_tokens={"0": 7})["0"].num_tokens == 7
    assert choose(model, num_tokens_hint=9)["0"].num_tokens == 9


# ---- reasons in how the layer is used and what was asked for ----


def test_functional_use():
    choice = choose(nn.Sequential(linear()), functional={"0.weight": "%mm"})["0"]
    assert choice.reason.startswith("its weight is also read without calling the layer")
    assert choice.detail == "%mm"


def test_not_reached():
    model = nn.Sequential(linear(), linear())
    assert reason(model, "1", num_tokens={"0": 4}) == "not called on the example_inputs"
    text = "no call of it is in the captured graph"
    assert reason(model, "1", called=frozenset({"0"})) == text


def test_wishes():
    model = nn.Sequential(linear(), linear(32, 32))
    assert reason(model, "0", exclude=["0"]) == "excluded"
    assert reason(model, "0", targets=["1"]) == "not among the targets"
    assert reason(model, "1", targets=["1"], exclude=["1"]) == "excluded"
    choice = choose(model, min_params=4096)["1"]
    assert choice.reason == "fewer than min_params=4,096 weights"
    assert choice.detail == "1,024"


@pytest.mark.parametrize("rows", [3, 17])
def test_tiny_tables_stay_dense(rows):
    choices = choose(nn.Sequential(nn.Embedding(rows, 16)), max_rank=32, min_params=4096)
    assert choices["0"].spec is None


def test_more_parameters_than_dense():
    choice = choose(nn.Sequential(linear()), max_rank=64, ranks={"0": 64})["0"]
    assert choice.reason == "TT form would hold more parameters than dense"
    assert choice.detail.endswith(" > 4,096")


def test_more_flops_than_dense_unless_named():
    model = nn.Sequential(nn.Linear(64, 64))
    flops = PlanConfig(objective="flops")
    shape: dict[str, Any] = {"layouts": {"0": "ttm"}, "max_rank": 15, "plan": flops}
    slow = choose(model, **shape)["0"]
    assert slow.reason == "TT form would take more FLOPs than dense at 4,096 tokens"
    more, dense = (int(figure.replace(",", "")) for figure in slow.detail.split(" > "))
    assert more > dense == 6 * 4096 * 64 * 64
    assert reason(model, only_if_faster=False, **shape) == ""
    assert reason(model, targets=["*"], **shape) == ""
    assert reason(model, ranks={"0": 15}, layouts={"0": "ttm"}, plan=flops) == ""


@pytest.mark.parametrize("num_tokens", [1, 8, 4096])
def test_slower_than_dense_unless_named(num_tokens):
    """tensorly/torch#35: a factorised layer that is slower than dense at a small size."""
    model = nn.Sequential(nn.Linear(256, 256))
    choice = choose(model, {"0": num_tokens}, max_rank=32)["0"]
    spec = choose(model, {"0": num_tokens}, max_rank=32, only_if_faster=False)["0"].spec
    plan = plan_linear(spec, num_tokens)
    if num_tokens == 4096:
        assert (choice.reason, choice.spec) == ("", spec)
        assert plan.seconds <= plan.dense_seconds
        return
    tokens = "1 token" if num_tokens == 1 else "8 tokens"
    assert choice.spec is None
    assert choice.reason == f"TT form is predicted to be slower than dense at {tokens}"
    ours, dense = plan.seconds, plan.dense_seconds
    assert choice.detail == f"{1e3 * ours:.3f} ms > {1e3 * dense:.3f} ms"
    assert ours > dense
    assert reason(model, num_tokens={"0": num_tokens}, targets=["0"]) == ""


def test_dense_is_timed_at_its_own_sizes_not_at_padded_ones():
    shape: dict[str, Any] = {"modes": {"x": ((16, 16), (16, 16))}, "num_tokens_hint": 512}
    model = nn.ModuleDict({"x": nn.Linear(97, 97), "y": nn.Linear(97, 97)})
    spec = choose(model, **shape)["x"].spec
    assert (spec.in_size, spec.out_size) == (256, 256)
    plan = plan_linear(spec, 512)
    own = plan.costs.dense_seconds(512, (97, 97), 4, needs_input_grad=True)
    assert policy._compared(plan, (97, 97), "time") == (plan.seconds, own)
    assert own < plan.dense_seconds


def test_more_bytes_for_backward_than_dense():
    """With objective "memory" the weights count on both sides: they are kept for backward."""
    memory: dict[str, Any] = {"plan": PlanConfig(objective="memory"), "max_rank": 2}
    model = nn.Sequential(nn.Linear(64, 64))
    few, many = (choose(model, {"0": tokens}, **memory)["0"] for tokens in (64, 4096))
    assert few.reason == ""
    assert many.reason == "TT form would keep more bytes for backward than dense at 4,096 tokens"
    kept = plan_linear(few.spec, 4096, "memory").saved_bytes + 4 * few.spec.num_params
    assert many.detail == f"{kept:,} > {4 * (4096 * 64 + 64 * 64):,}"


def test_speeds_are_those_of_the_weights_device_and_dtype():
    shape: dict[str, Any] = {"max_rank": 4, "num_tokens_hint": 1 << 16}
    wide = choose(nn.Sequential(nn.Linear(64, 64, dtype=torch.float64)), **shape)["0"]
    spec = choose(nn.Sequential(linear()), **shape, only_if_faster=False)["0"].spec
    plans = [plan_linear(spec, 1 << 16, itemsize=size) for size in (4, 8)]
    assert plans[1].seconds > plans[0].seconds
    slower = plans[1].seconds > plans[1].dense_seconds
    assert (wide.spec is None) == slower


def test_tolerance_leaves_the_costs_open():
    assert reason(nn.Sequential(linear()), ranks={"0": 64}, tol=0.1) == ""
    assert reason(nn.Sequential(linear()), ranks={"0": 64}, tol=0.1, init="random") != ""


@pytest.mark.parametrize("targets", [None, ["0"]], ids=["not-named", "named"])
def test_memory_limit_is_that_of_the_plan_that_runs(targets):
    model, shape = nn.Sequential(linear()), {"0": ((8, 8), (8, 8))}
    spec = TTSpec("tt", (8, 8), (8, 8), (1, 4, 4, 4, 1))
    peaks = [plan_linear(spec, num_tokens).peak_bytes for num_tokens in (3000, 4096)]

    def choice(limit: int) -> Choice:
        plan = PlanConfig(memory_limit_bytes=limit)
        return choose(model, {"0": 3000}, modes=shape, targets=targets, plan=plan)["0"]

    refused = choice(peaks[0])
    assert refused.reason == "no plan for 4,096 tokens is within memory_limit_bytes"
    assert refused.detail.startswith("at least ")
    assert choice(peaks[1]).spec == spec


def test_flops_are_compared_at_the_tokens_seen_without_the_limit():
    model = nn.Sequential(linear())
    shape: dict[str, Any] = {"layouts": {"0": "ttm"}, "max_rank": 15}
    plans = [PlanConfig("flops", memory_limit_bytes=limit) for limit in (10**9, None)]
    with_limit, without = (choose(model, {"0": 3000}, plan=p, **shape)["0"] for p in plans)
    assert with_limit.reason == "TT form would take more FLOPs than dense at 3,000 tokens"
    assert with_limit.detail == without.detail
    assert with_limit.detail.endswith(f" > {6 * 3000 * 64 * 64:,}")


# ---- errors ----


@pytest.mark.parametrize("field", ["modes", "ranks", "layouts", "targets", "exclude"])
def test_pattern_that_matches_nothing(field):
    values = {"modes": ((8, 8), (8, 8)), "ranks": 4, "layouts": "tt"}
    pattern = "encodr.fc1"
    given = {pattern: values[field]} if field in values else [pattern]
    model = nn.ModuleDict({"encoder": nn.ModuleDict({"fc1": linear(), "fc2": linear()})})
    with pytest.raises(ConfigError) as error:
        choose(model, **{field: given})
    assert str(error.value).splitlines() == [
        f"OptimizeConfig.{field} has a pattern that matches no layer",
        "  got:      'encodr.fc1'",
        "  expected: an fnmatch pattern over qualified names; the closest are "
        "'encoder.fc1', 'encoder.fc2'",
        "  mend:     correct the name, or use a wildcard such as '*.fc1'",
    ]


def test_patterns_tell_upper_from_lower_case():
    model = nn.ModuleDict({"fc": linear(), "FC": linear()})
    choices = choose(model, targets=["F*"])
    assert (choices["fc"].reason, choices["FC"].reason) == ("not among the targets", "")
    with pytest.raises(ConfigError, match="matches no layer"):
        choose(model, exclude=["Fc"])


def test_pattern_that_names_a_container():
    model = nn.ModuleDict({"encoder": nn.Sequential(linear()), "head": linear()})
    with pytest.raises(ConfigError, match=r"write 'encoder\.\*' for the layers inside"):
        choose(model, exclude=["encoder"])


def test_pattern_that_names_a_layer_without_a_matrix():
    assert reason(nn.Sequential(linear(), nn.ReLU()), exclude=["1"]) == ""


def test_modes_that_are_too_small():
    with pytest.raises(SpecError) as error:
        choose(nn.ModuleDict({"fc": linear(96, 64)}), modes={"fc": ((8, 8), (8, 8))})
    assert str(error.value).splitlines() == [
        "the in_modes given for fc are too small",
        "  got:      (8, 8), whose product is 64",
        "  expected: a product of at least 96, the layer's in size",
        "  mend:     enlarge the modes; a product above 96 is padded",
    ]


def test_ranks_of_the_wrong_length_name_the_layer():
    with pytest.raises(SpecError) as error:
        choose(
            nn.ModuleDict({"fc": linear()}),
            modes={"fc": ((8, 8), (8, 8))},
            ranks={"fc": (1, 4, 1)},
        )
    assert str(error.value).splitlines() == [
        "the shape asked for fc is malformed: TTSpec.ranks is malformed",
        "  got:      '3 ranks for 4 cores', with modes (8, 8) -> (8, 8)",
        "  expected: one rank more than there are cores",
        "  mend:     give 5 ranks",
    ]


def test_modes_of_unequal_number_in_ttm_name_the_layer():
    with pytest.raises(SpecError, match="the shape asked for fc is malformed"):
        choose(
            nn.ModuleDict({"fc": linear()}),
            modes={"fc": ((8, 8), (4, 4, 4))},
            layouts={"fc": "ttm"},
        )


def test_nothing_to_compress_lists_reasons_not_layers():
    model = nn.Sequential(*(linear(4, 4) for _ in range(28)), nn.Conv1d(4, 4, 1), nn.LSTM(4, 4))
    with pytest.raises(ConfigError) as error:
        refuse_if_nothing(list(choose(model, min_params=4096).values()))
    assert str(error.value).splitlines() == [
        "nothing in the model would be compressed",
        "  got:      28 layers (0, ...): fewer than min_params=4,096 weights; "
        "28: convolutions are not supported; 29: recurrent layers are not supported",
        "  expected: an nn.Linear or nn.Embedding that is supported, asked for and large enough",
        "  mend:     change targets, exclude, min_params, max_rank or only_if_faster, as the "
        "reasons say",
    ]


def test_model_without_weights():
    with pytest.raises(ConfigError, match="a model without weight matrices"):
        refuse_if_nothing(list(choose(nn.Sequential(nn.ReLU())).values()))


class Unsure(nn.Sequential):
    """Has no truth value, as a compiled module has none."""

    def __bool__(self) -> bool:
        raise TypeError("no truth value")


def test_a_child_is_not_asked_for_its_truth_value():
    model = nn.Sequential(Unsure(linear(), nn.LayerNorm(64)))
    assert choose(model, exclude=["0.1"])["0.0"].spec is not None
