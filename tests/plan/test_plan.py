"""Plans: exact costs as integers, texts, limits, sharing of messages."""

from math import prod

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from comera_fx.errors import ConfigError, PlanError
from comera_fx.modules import TTLinear
from comera_fx.plan import plan_linear
from comera_fx.spec import TTSpec

SPEC = TTSpec("tt", (12, 8, 8), (8, 8, 12), (1, 12, 30, 30, 30, 12, 1))


def spec_of(ins: list[int], outs: list[int], rank: int) -> TTSpec:
    ranks = (1, *(rank,) * (len(ins) + len(outs) - 1), 1)
    return TTSpec("tt", tuple(ins), tuple(outs), ranks).clipped()


def modes(least: int, most: int, max_size: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(least, most), min_size=1, max_size=max_size)


small_specs = st.builds(spec_of, modes(1, 5, 2), modes(1, 5, 2), st.integers(1, 6))
wide_specs = st.builds(spec_of, modes(2, 16, 3), modes(2, 16, 3), st.integers(1, 40))


@pytest.mark.parametrize(
    ("num_tokens", "forward", "without_input_grad"),
    [
        (1, 78_912, 227_520),
        (32, 2_004_480, 5_276_160),
        (512, 25_044_480, 63_336_960),
        (4096, 190_195_200, 476_213_760),
    ],
)
def test_multiply_adds_of_the_paper_layer(num_tokens, forward, without_input_grad):
    full = plan_linear(SPEC, num_tokens, objective="flops", needs_input_grad=True)
    assert full.flops_forward == 2 * forward
    assert full.flops_forward + full.flops_backward == 3 * 2 * forward
    part = plan_linear(SPEC, num_tokens, objective="flops", needs_input_grad=False)
    assert part.flops_forward + part.flops_backward == 2 * without_input_grad
    assert full.flops_padding == full.flops_recomputed == 0


def test_flops_equal_a_hand_count():
    # modes 4,5,5 -> 5,4,5 at rank 3 and 1,000 tokens: L (100 x 3) and R (3 x 100) are built,
    # then x L and (x L) R.
    spec = TTSpec("tt", (4, 5, 5), (5, 4, 5), (1, 3, 3, 3, 3, 3, 1))
    left = 4 * 3 * 5 * 3 + 20 * 3 * 5 * 3
    right = 4 * 3 * 3 * 5 + 20 * 3 * 5 * 3
    apply = 1000 * 100 * 3 * 2
    plan = plan_linear(spec, 1000, "flops")
    assert plan.flops_forward == 2 * (left + right + apply)
    assert plan.flops_backward == 2 * plan.flops_forward


def fixed_path_flops(spec: TTSpec, num_tokens: int) -> int:
    """Contract all left cores to L, all right cores to R, then (x L) R."""
    num_in = len(spec.in_modes)

    def chain(first: int, last: int) -> int:
        total, width = 0, spec.mode_sizes[first]
        for k in range(first + 1, last):
            total += (
                width * spec.ranks[first] * spec.ranks[k] * spec.mode_sizes[k] * (spec.ranks[k + 1])
            )
            width *= spec.mode_sizes[k]
        return total

    def right_chain() -> int:
        total, width = 0, spec.mode_sizes[-1]
        for k in range(spec.num_cores - 2, num_in - 1, -1):
            total += spec.ranks[k] * spec.mode_sizes[k] * spec.ranks[k + 1] * width
            width *= spec.mode_sizes[k]
        return total

    middle = spec.ranks[num_in]
    apply = num_tokens * middle * (spec.in_size + spec.out_size)
    return 2 * (chain(0, num_in) + right_chain() + apply)


@settings(deadline=None, derandomize=True, max_examples=500)
@given(wide_specs, st.sampled_from([1, 7, 64, 1000]))
def test_never_more_flops_than_the_fixed_path(spec, num_tokens):
    plan = plan_linear(spec, num_tokens, "flops")
    assert plan.flops_forward <= fixed_path_flops(spec, num_tokens)
    assert plan.flops_forward + plan.flops_backward == 3 * plan.flops_forward


def all_trees(tensors):
    """Every rooted binary tree over ``tensors`` as (cost, indices); leaves are index sets."""
    if len(tensors) == 1:
        yield 0, tensors[0]
        return
    first, *rest = tensors
    for mask in range(1 << len(rest)):
        inside = [first] + [t for k, t in enumerate(rest) if mask >> k & 1]
        outside = [t for k, t in enumerate(rest) if not mask >> k & 1]
        if not outside:
            continue
        for left_cost, left in all_trees(inside):
            for right_cost, right in all_trees(outside):
                union = left | right
                cost = left_cost + right_cost + 2 * prod(SIZES[i] for i in union)
                yield cost, left ^ right


SIZES: dict[str, int] = {}


@settings(deadline=None, derandomize=True, max_examples=60)
@given(small_specs, st.sampled_from([1, 2, 9]))
def test_fewest_flops_of_all_single_trees(spec, num_tokens):
    plan = plan_linear(spec, num_tokens, "flops")
    SIZES.clear()
    SIZES.update(plan.network.size_of)
    leaves = [frozenset(indices) for indices in plan.network.indices]
    assert plan.flops_forward == min(cost for cost, _ in all_trees(leaves))


def test_repr_is_a_table_with_totals_and_dense_beside_it():
    text = repr(plan_linear(TTSpec("tt", (4,), (6,), (1, 2, 1)), 8, "flops"))
    assert "dense  forward 384  backward 768" in text
    assert "bytes  peak" in text


def test_networkx_holds_every_message_once():
    plan = plan_linear(SPEC, 512)
    graph = plan.to_networkx()
    steps = (*plan.steps.forward, *plan.steps.backward)
    assert len({step.out.name for step in steps}) == len(steps)
    made = [name for name, kind in graph.nodes(data="kind") if kind not in ("leaf", "target")]
    assert sorted(made) == sorted(step.out.name for step in steps)
    assert sum(graph.nodes[name]["flops"] for name in made) == (
        plan.flops_forward + plan.flops_backward
    )
    assert graph.nodes["y"]["kind"] == "result"
    assert graph.nodes["dx"]["kind"] == "gradient"
    assert {name for name, saved in graph.nodes(data="saved") if saved} >= {"x", "G1"}


def test_unwanted_input_gradient_is_not_computed():
    names = [
        step.out.name for step in plan_linear(SPEC, 512, needs_input_grad=False).steps.backward
    ]
    assert "dx" not in names
    assert [f"dG{k}" in names for k in range(1, 7)] == [True] * 6


class Copies(TorchDispatchMode):
    """Counts the numbers that copying operators write."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        aten = torch.ops.aten
        if func.overloadpacket in (aten.clone, aten._to_copy, aten.copy_):
            self.sizes.append(out.numel())
        return out


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_tokens", [1, 16, 32, 128, 512, 4096])
def test_copies_are_those_of_the_plan_and_none_holds_tokens_at_large_batches(num_tokens, bias):
    layer = TTLinear(SPEC, 768, 768, bias=bias)
    x = torch.randn(num_tokens, 768, requires_grad=True)
    program = plan_linear(SPEC, num_tokens).program
    with Copies() as copies:
        layer(x).backward(torch.ones(num_tokens, 768))
    # Padding copies a core, and the bias into it; autograd makes its gradient, a view, contiguous.
    cores = {core.numel() for core in layer.cores}
    cores |= {768} if bias and program.folded_bias else set()
    assert 4 * sum(n for n in copies.sizes if n not in cores) <= program.copied_bytes
    assert 4 * sum(copies.sizes) >= program.copied_bytes
    if num_tokens >= 128:
        assert max(copies.sizes, default=0) < num_tokens * 768
        assert program.bias_fits


def test_saved_bytes_are_what_autograd_keeps():
    spec = TTSpec("tt", (8, 16, 8), (8, 16, 8), (1, 8, 32, 32, 32, 8, 1))
    layer = TTLinear(spec, 1024, 1024)
    x = torch.randn(8192, 1024, requires_grad=True)
    kept: dict[int, int] = {}

    def pack(tensor):
        kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x)
    cores = {core.data_ptr() for core in layer.cores}
    measured = sum(size for pointer, size in kept.items() if pointer not in cores)
    plan = plan_linear(spec, 8192)
    assert measured == plan.saved_bytes
    dense = (x.numel() + 1024 * 1024) * 4
    assert sum(kept.values()) <= dense


def test_peak_bytes_are_what_training_allocates():
    layer = TTLinear(SPEC, 768, 768, bias=False)
    x = torch.randn(512, 768, requires_grad=True)
    grad = torch.randn(512, 768)
    layer(x).backward(grad)
    x.grad = None
    with torch.profiler.profile(profile_memory=True) as profile:
        y = layer(x)
        y.backward(grad)
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    now, peak = 0, 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    given = x.numel() + grad.numel()
    held_by_the_caller = y.numel()
    measured = peak + 4 * (given - held_by_the_caller)
    assert plan_linear(SPEC, 512).peak_bytes == pytest.approx(measured, rel=0.02)


def test_memory_limit_refuses_plans_above_it():
    peak = plan_linear(SPEC, 512).peak_bytes
    assert plan_linear(SPEC, 512, memory_limit_bytes=peak).peak_bytes <= peak
    with pytest.raises(PlanError, match="stays below the memory limit") as caught:
        plan_linear(SPEC, 512, memory_limit_bytes=1000)
    assert caught.value.mend == "raise the limit, or use smaller batches or ranks"


def test_no_tokens_is_an_error():
    with pytest.raises(PlanError, match="at least one token"):
        plan_linear(SPEC, 0)


@pytest.mark.parametrize("num_cores", range(2, 13))
def test_chains_of_any_length_have_a_plan(num_cores):
    num_in = num_cores // 2
    spec = TTSpec(
        "tt", (2,) * num_in, (2,) * (num_cores - num_in), (1, *(3,) * (num_cores - 1), 1)
    ).clipped()
    plan = plan_linear(spec, 16, "flops")
    assert plan.flops_backward == 2 * plan.flops_forward
    assert plan.flops_forward <= fixed_path_flops(spec, 16)


def test_a_plan_for_inference_counts_and_keeps_nothing_of_the_backward_pass():
    plan = plan_linear(SPEC, 512, needs_input_grad=False, needs_core_grad=False)
    assert plan.steps.backward == ()
    assert plan.flops_backward == plan.dense_flops_backward == 0
    assert plan.saved_bytes == 0
    assert plan.seconds < plan_linear(SPEC, 512).seconds
    assert plan.dense_seconds < plan_linear(SPEC, 512).dense_seconds


def test_without_gradients_the_plan_for_inference_runs():
    layer = TTLinear(SPEC, 768, 768)
    x = torch.randn(4, 768)
    expected = layer(x)
    with torch.no_grad(), Copies() as copies:
        torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-5)
    plan = plan_linear(SPEC, 4, needs_input_grad=False, needs_core_grad=False)
    assert 4 * sum(copies.sizes) == plan.program.copied_bytes


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        ({"num_tokens": 64.5}, PlanError, "at least one token"),
        ({"num_tokens": "64"}, PlanError, "at least one token"),
        ({"itemsize": 0}, PlanError, "numbers have no such size"),
        ({"spec": "tt"}, PlanError, "nothing to plan"),
        ({"spec": TTSpec("tt", (2,), (2,), (1, 0, 1))}, PlanError, "nothing to plan"),
        ({"objective": "speed"}, ConfigError, "PlanConfig.objective"),
        ({"pad_ranks": 1}, ConfigError, "PlanConfig.pad_ranks"),
        ({"memory_limit_bytes": -1}, ConfigError, "PlanConfig.memory_limit_bytes"),
    ],
)
def test_wrong_arguments_are_refused(given, error, text):
    with pytest.raises(error, match=text) as caught:
        plan_linear(**{"spec": SPEC, "num_tokens": 64, **given})
    assert caught.value.mend


def test_objective_memory_takes_the_fastest_of_about_the_fewest_bytes():
    memory, time = (plan_linear(SPEC, 4096, each) for each in ("memory", "time"))
    assert memory.saved_bytes + memory.peak_bytes <= time.saved_bytes + time.peak_bytes
    assert memory.seconds < 2 * time.seconds


def test_a_device_is_no_type_of_device():
    for device_type in ("cuda:0", None, torch.device("cuda"), []):
        with pytest.raises(PlanError, match="no type of device"):
            plan_linear(SPEC, 64, device_type=device_type)


@pytest.mark.parametrize("name", ["needs_input_grad", "needs_core_grad"])
def test_whether_gradients_are_wanted_is_true_or_false(name):
    with pytest.raises(PlanError, match="neither true nor false"):
        plan_linear(SPEC, 64, **{name: "no"})


@pytest.mark.parametrize("num_tokens", [True, 10**400, 1 << 41])
def test_such_numbers_of_tokens_are_refused(num_tokens):
    with pytest.raises(PlanError, match="at least one token"):
        plan_linear(SPEC, num_tokens)


def test_more_indices_than_names_are_refused():
    spec = TTSpec("tt", (2,) * 15, (2,) * 15, (1, *(2,) * 29, 1))
    with pytest.raises(PlanError, match="more modes and bonds"):
        plan_linear(spec, 4)


@pytest.mark.parametrize("num_tokens", [1, 16, 4096])
def test_a_weight_read_by_its_other_side_costs_what_its_transpose_costs(num_tokens):
    ranks = (1, 5, 17, 9, 4, 1)
    turned = TTSpec("tt", (8, 4, 4), (6, 8), ranks).turned()
    reversed_ = TTSpec("tt", (8, 6), (4, 4, 8), ranks[::-1])
    mine, theirs = (plan_linear(spec, num_tokens, "flops") for spec in (turned, reversed_))
    assert mine.flops_forward == theirs.flops_forward
    assert mine.flops_backward == theirs.flops_backward
    mine, theirs = (plan_linear(spec, num_tokens) for spec in (turned, reversed_))
    assert mine.seconds == pytest.approx(theirs.seconds, rel=0.05)
