"""kernels_of: every call of a plan's program, its sizes, its reason and its time."""

import re

import pytest

from comera_fx.inspect.kernels import kernels_of, library_of, lookup_lines
from comera_fx.plan import plan_linear
from comera_fx.plan.lookup import plan_lookup
from comera_fx.plan.operations import Product
from comera_fx.spec import TTSpec

TT = TTSpec("tt", (12, 8, 8), (8, 8, 12), (1, 12, 30, 30, 30, 12, 1))
TTM = TTSpec("ttm", (12, 8, 8), (8, 8, 12), (1, 12, 30, 1))


@pytest.mark.parametrize("spec", [TT, TTM], ids=["tt", "ttm"])
@pytest.mark.parametrize("num_tokens", [1, 32, 512, 4096])
def test_calls_are_those_of_the_program(spec, num_tokens):
    plan = plan_linear(spec, num_tokens)
    program, kernels = plan.program, kernels_of(plan)
    ops = (*program.forward, *program.backward)
    assert len(kernels) == len(ops)
    assert [k.phase for k in kernels].count("forward") == len(program.forward)
    for kernel, op in zip(kernels, ops, strict=True):
        call = ("bmm" if op.batched else "mm") if isinstance(op, Product) else "pad"
        assert kernel.call == call
        assert kernel.why
        assert ("copied into order" in kernel.why) == bool(op.copied_slots)
    assert sum(k.seconds for k in kernels) <= plan.seconds - plan.costs.call_seconds + 1e-12


@pytest.mark.parametrize("spec", [TT, TTM], ids=["tt", "ttm"])
@pytest.mark.parametrize("num_tokens", [32, 512])
def test_sizes_add_up_to_the_flops_of_the_plan(spec, num_tokens):
    plan = plan_linear(spec, num_tokens, pad_ranks=False)
    flops = 0
    for kernel in kernels_of(plan):
        batch, m, n, k = re.fullmatch(r"(?:(\d+) of )?(\d+) . (\d+) . (\d+)", kernel.sizes).groups()
        flops += 2 * int(batch or 1) * int(m) * int(n) * int(k)
    assert flops == plan.flops_forward + plan.flops_backward + plan.flops_recomputed


def test_reasons_name_what_is_read():
    kernels = {kernel.makes: kernel for kernel in kernels_of(plan_linear(TT, 32, pad_ranks=False))}
    assert "lie in the middle of x" in kernels["xG1G2 = x * G1G2"].why
    assert kernels["G1G2 = G1 * G2"].why == "both are matrices as they lie: no copy"
    assert kernels["G1G2 = G1 * G2"].sizes == "12 \N{MULTIPLICATION SIGN} 240 " + (
        "\N{MULTIPLICATION SIGN} 12"
    )


def test_messages_that_are_made_again_and_padding_are_told():
    whys = [
        kernel.why
        for num_tokens in (512, 4096, 16384)
        for kernel in kernels_of(plan_linear(TT, num_tokens))
    ]
    assert any("whole tiles" in why for why in whys)
    assert any("made again" in why for why in whys)
    assert any("bias" in why for why in whys)


def test_look_ups_are_by_pair_tables_or_the_dense_table():
    few = lookup_lines(plan_lookup(TTM, 4), 4)
    assert [call for call, _ in few] == ["mm", "mm", "index_select", "bmm"]
    assert "4 at once" in few[-1][1]
    many = lookup_lines(plan_lookup(TTM, 10**9), 10**9)
    assert [call for call, _ in many] == ["mm", "embedding"]
    assert "768" in many[0][1]


def test_libraries():
    assert library_of("cuda") == "cuBLAS"
    assert "torch" in library_of("cpu")
