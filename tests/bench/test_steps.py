"""The check before timing must fail on a version that computes anything else."""

import pytest
import torch
from torch import nn

from bench.steps import Version, check, compare, make_data, step
from bench.versions import FixedPath, draw_cores, factors, make
from tests.bench.sizes import TINY_SQUARE as SPEC

CORES = draw_cores(SPEC)


class OtherOutput(FixedPath):
    def forward(self, x):
        return super().forward(x) * 1.001


class OtherInputGrad(FixedPath):
    def forward(self, x):
        return super().forward(2 * x - x.detach())


class OtherCoreGrad(FixedPath):
    def forward(self, x):
        first, *rest = self.cores
        left, right = factors([2 * first - first.detach(), *rest], len(SPEC.in_modes))
        return x @ left @ right


class MissingCoreGrad(FixedPath):
    def forward(self, x):
        first, *rest = self.cores
        left, right = factors([first.detach(), *rest], len(SPEC.in_modes))
        return x @ left @ right


def versions_with(layer):
    dense = make("dense", SPEC, CORES)
    return {"dense": Version(dense, [dense]), "other": Version(layer, [layer])}


def only(layers):
    return layers[0]


def data(*, trains=True):
    return make_data(8, SPEC.in_size, [SPEC.out_size], trains=trains)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (OtherOutput, "other: output 0 is not the reference's"),
        (OtherInputGrad, "other: gradient of the input is not the reference's"),
        (OtherCoreGrad, r"other: gradient of cores\.0 in layer 0 is not the reference's"),
        (MissingCoreGrad, r"other: gradient of cores\.0 in layer 0 is missing"),
    ],
)
def test_what_differs_is_refused(wrong, message):
    with pytest.raises(AssertionError, match=message):
        compare(versions_with(wrong(SPEC, CORES)), only, data(), repeats=1)


def test_other_numbers_are_refused():
    other = FixedPath(SPEC, draw_cores(SPEC, seed=1))
    with pytest.raises(AssertionError, match="other: output 0"):
        check(versions_with(other), only, data())


def test_other_outputs_are_refused_where_nothing_trains():
    with pytest.raises(AssertionError, match="other: output 0"):
        check(versions_with(OtherOutput(SPEC, CORES)), only, data(trains=False))


def test_only_the_wrong_layer_of_a_chain_is_named():
    cores = [draw_cores(SPEC, seed) for seed in range(3)]
    dense = [make("dense", SPEC, numbers) for numbers in cores]
    other = [FixedPath(SPEC, cores[0]), FixedPath(SPEC, cores[1]), OtherCoreGrad(SPEC, cores[2])]
    versions = {
        name: Version(nn.Sequential(*layers), layers)
        for name, layers in (("dense", dense), ("other", other))
    }
    with pytest.raises(AssertionError, match=r"other: gradient of cores\.0 in layer 2"):
        check(versions, lambda layers: nn.Sequential(*layers), data())


def test_gradients_are_none_before_every_step():
    held = []

    class Watched(FixedPath):
        def forward(self, x):
            held.extend(p.grad for p in (x, *self.cores))
            return super().forward(x)

    ms, repeats = compare(versions_with(Watched(SPEC, CORES)), only, data(), repeats=2)
    num_steps = 1 + 2 * 3  # the check, then an unmeasured and two measured turns of two steps
    assert held == [None] * (1 + SPEC.num_cores) * num_steps
    assert (list(ms), repeats) == (["dense", "other"], 2)


def test_forward_only_makes_no_gradients():
    layer = make("ours", SPEC, CORES)
    (output,) = step(layer, data(trains=False))
    assert not output.requires_grad
    assert all(parameter.grad is None for parameter in layer.parameters())


def test_the_global_generator_stays_where_it_is():
    state = torch.get_rng_state()
    data()
    draw_cores(SPEC)
    assert torch.equal(state, torch.get_rng_state())
