"""``compact``: TT rounding at any time, within the error asked for, to the smallest ranks."""

import copy
import functools

import pytest
import torch
from torch import nn

from comera_fx.config import RankConfig
from comera_fx.errors import RankError
from comera_fx.modules import TTEmbedding, TTLinear, TTModule
from comera_fx.spec import TTSpec
from comera_fx.train import RankAdapter, compact, param_groups

METHODS = ["comera", "proximal", "rounding"]
SPEC = TTSpec("tt", (4, 8), (8, 4), (1, 4, 16, 4, 1))
TTM = TTSpec("ttm", (4, 8), (8, 4), (1, 12, 1))
TABLE = TTSpec("ttm", (6, 10), (8, 4), (1, 16, 1))
KINDS = {
    "tt": lambda: TTLinear(SPEC, 32, 32, dtype=torch.float64),
    "ttm": lambda: TTLinear(TTM, 32, 32, dtype=torch.float64),
    "embedding": lambda: TTEmbedding(TABLE, 60, 32, dtype=torch.float64),
    "padded": lambda: TTEmbedding(TABLE, 60, 32, padding_idx=3, dtype=torch.float64),
}


def make(seed=0):
    torch.manual_seed(seed)
    layers = [TTLinear(SPEC, 32, 32, dtype=torch.float64) for _ in range(2)]
    return nn.Sequential(layers[0], nn.Tanh(), layers[1])


def adapted(method, **config):
    model = make()
    optimizer = torch.optim.AdamW(param_groups(model, lr=3e-3, rank_lr=5e-2))
    config = {"target_ratio": 0.5, "prune_every": 5, **config}
    if config["target_ratio"] is not None:
        pace = {"early_steps": 10} | ({"rho": 0.5} if method == "comera" else {})
        config = {**pace, **config}
    return model, optimizer, RankAdapter(model, optimizer, RankConfig(method=method, **config))


def train(model, optimizer, adapter, steps):
    losses = []
    for step in steps:
        draws = torch.Generator().manual_seed(step)
        x = torch.randn(64, 32, generator=draws, dtype=torch.float64)
        task = nn.functional.mse_loss(model(x), torch.tanh(x.roll(1, 1)))
        optimizer.zero_grad()
        adapter.loss(task).backward()
        optimizer.step()
        adapter.step()
        losses.append(task.item())
    return losses


def weights_of(model):
    """Of every layer, from its cores alone: a row of padding is not theirs."""
    return {
        name: functools.reduce(lambda a, b: torch.tensordot(a, b, dims=1), cores).detach()
        for name, module in model.named_modules()
        if isinstance(module, TTModule) and (cores := module.effective_cores())
    }


def errors(model, before):
    after = weights_of(model)
    return [((after[k] - w).norm() / w.norm()).item() for k, w in before.items()]


def decaying(layer, factor):
    """Have every direction of a bond carry less than the one before it."""
    with torch.no_grad():
        for core in list(layer.cores)[:-1]:
            core *= factor ** torch.arange(core.shape[-1], dtype=core.dtype)


@pytest.mark.parametrize("tol", [0.0, 1e-4, 0.01, 0.1, 0.5])
@pytest.mark.parametrize("kind", KINDS)
def test_the_error_of_every_layer_is_within_the_tolerance(kind, tol):
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": KINDS[kind](), "b": KINDS[kind]()})
    decaying(model["a"], 0.4)
    size = model["a"].tt_params
    before = weights_of(model)
    told = compact(model, tol)
    found = errors(model, before)
    assert max(found) <= max(tol, 1e-12)
    # What is told is a bound: the errors of the bonds of a layer, added in squares.
    assert max(found) <= told + 1e-12 <= tol + 2e-12
    assert model["a"].tt_params < size or tol <= 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_are_the_smallest_for_a_matrix_of_low_rank(kind):
    """Rank 16 that holds rank 3, by zeros that no index shows."""
    torch.manual_seed(0)
    layer = KINDS[kind]()
    with torch.no_grad():
        for core, right in zip(layer.cores, layer.cores[1:], strict=False):
            rank = core.shape[-1]
            basis = torch.linalg.qr(torch.randn(rank, rank, dtype=core.dtype)).Q
            core[..., 3:] = 0.0
            core.copy_(torch.tensordot(core, basis, dims=1))
            right.copy_(torch.tensordot(basis.T, right, dims=1))
    before = weights_of(layer)
    for tol in (1e-9, 1e-3):
        assert compact(layer, tol) <= tol
        assert layer.spec.ranks[1:-1] == (3,) * (layer.num_cores - 1)
        assert max(errors(layer, before)) < 1e-9


def test_one_rank_less_would_be_too_few():
    torch.manual_seed(0)
    layer = TTLinear(TTM, 32, 32, dtype=torch.float64)
    decaying(layer, 0.5)
    full = layer.dense_weight().detach()
    twin = copy.deepcopy(layer)
    tol = 0.03
    compact(layer, tol)
    rank = layer.spec.ranks[1]
    values = torch.linalg.svdvals(_unfolded(full))
    tails = values.square().flip(0).cumsum(0).flip(0).sqrt() / values.norm()
    assert tails[rank] <= tol < tails[rank - 1]
    assert 1 < rank < twin.spec.ranks[1]


def _unfolded(weight):
    """``(o1 o2, i1 i2)`` to ``(o1 i1, o2 i2)``: the matrix at the bond of a TTM of two cores."""
    out_modes, in_modes = TTM.out_modes, TTM.in_modes
    return weight.reshape(*out_modes, *in_modes).permute(0, 2, 1, 3).reshape(32, 32)


def test_the_matrix_at_the_bond_is_what_is_said():
    layer = TTLinear(TTM, 32, 32, dtype=torch.float64)
    assert torch.linalg.matrix_rank(_unfolded(layer.dense_weight())) == 12


def test_a_tolerance_of_nothing_keeps_the_function():
    model = make()
    x = torch.randn(7, 32, dtype=torch.float64)
    before = model(x).detach()
    assert compact(model, 0) == 0.0
    torch.testing.assert_close(model(x).detach(), before, rtol=1e-10, atol=1e-12)
    assert [layer.spec for layer in (model[0], model[2])] == [SPEC, SPEC]


def test_a_layer_that_holds_nothing_loses_all_of_it():
    model = make()
    with torch.no_grad():
        model[0].cores[1].zero_()
    with pytest.warns(UserWarning, match="layer '0' have died"):
        assert compact(model, 0.01) <= 0.01
    assert model[0].tt_params == 0
    assert model[2].tt_params > 0
    assert compact(model, 0.01) <= 0.01


# ---- at any time ----


@pytest.mark.parametrize("steps", [0, 7, 25, 90], ids=["before", "early", "late", "after"])
@pytest.mark.parametrize("method", METHODS)
def test_before_in_and_after_adaptation(method, steps):
    model, optimizer, adapter = adapted(method)
    train(model, optimizer, adapter, range(steps))
    twin = copy.deepcopy(model)
    adapter.follow(twin)
    size, before = adapter.size, weights_of(model)
    assert adapter.compact(0.5) <= 0.5
    assert max(errors(model, before)) <= 0.5
    assert adapter.size < size
    assert adapter.size == sum(c.numel() for k in (0, 2) for c in model[k].cores)
    assert max(errors(twin, weights_of(model))) < 1e-10
    losses = train(model, optimizer, adapter, range(steps, steps + 30))
    assert losses[-1] < losses[0]
    for parameter in (*model[0].cores, *model[2].cores):
        assert optimizer.state[parameter]["exp_avg"].shape == parameter.shape


@pytest.mark.parametrize("method", METHODS)
def test_a_target_that_compact_meets_is_met(method):
    model, optimizer, adapter = adapted(method, target_ratio=0.9)
    adapter.compact(0.6)
    assert adapter.size <= adapter.target_size
    train(model, optimizer, adapter, range(5))
    assert adapter.stage == "late"
    ranks = adapter.ranks
    train(model, optimizer, adapter, range(5, 40))
    assert adapter.ranks == ranks


def test_rank_weights_are_ones_afterwards_and_excluded_layers_stay():
    model, optimizer, adapter = adapted("comera", target_ratio=None, exclude=["2"])
    train(model, optimizer, adapter, range(4))
    adapter.compact(0.2)
    assert all((weight == 1).all() for weight in model[0].rank_weights)
    assert model[2].spec == SPEC


def test_optimizers_that_are_named_follow():
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(4, 32, dtype=torch.float64)).square().mean().backward()
    optimizer.step()
    compact(model, 0.3, optimizer)
    for parameter in model.parameters():
        assert optimizer.state[parameter]["exp_avg"].shape == parameter.shape
    compact(model, 0.4, [optimizer])
    model(torch.randn(4, 32, dtype=torch.float64)).square().mean().backward()
    optimizer.step()


# ---- floors ----


@pytest.mark.parametrize("tol", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("method", METHODS)
def test_ranks_are_not_cut_below_their_floors(method, tol):
    config = {"target_ratio": None, "min_rank": 3, "min_ranks": {"2": 6}}
    model, _, adapter = adapted(method, **config)
    for layer in (model[0], model[2]):
        decaying(layer, 0.1)
    adapter.compact(tol)
    least = [min(adapter.ranks[name]) for name in ("0", "2")]
    assert least[0] >= 3
    assert least[1] == 4  # what the outer bonds have
    assert adapter.ranks["2"][1] >= 6
    assert tol < 0.9 or adapter.ranks == {"0": [3, 3, 3], "2": [4, 6, 4]}


@pytest.mark.parametrize("how", ["compact", "early", "late"])
@pytest.mark.parametrize("method", METHODS)
def test_bonds_that_hold_less_than_their_floor_stay_as_they_are(method, how):
    model, optimizer, adapter = adapted(
        method, target_ratio=None if how == "early" else 0.5, min_rank=4, patience=1, gamma=0.0
    )
    with torch.no_grad():
        for core in list(model[0].cores)[:-1]:
            core[..., 2:] = 0.0
    before = weights_of(model)
    twin = copy.deepcopy(model)
    adapter.follow(twin)
    if how == "compact":
        adapter.compact(1e-9)
    else:
        adapter._method.prune(how, 0.01)
    assert min(map(min, adapter.ranks.values())) == 4
    assert max(errors(model, before)[:1]) < 1e-9
    assert [twin[k].spec for k in (0, 2)] == [model[k].spec for k in (0, 2)]
    losses = train(model, optimizer, adapter, range(20))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("how", ["compact", "early", "late"])
@pytest.mark.parametrize("method", METHODS)
def test_a_layer_that_begins_at_zero_comes_to_life(method, how):
    """Its last core is zero, as where a dense weight of zeros was rewritten."""
    target = None if how == "early" else 0.5
    model, optimizer, adapter = adapted(method, target_ratio=target, min_rank=1, prune_every=50)
    with torch.no_grad():
        model[0].cores[-1].zero_()
    if how == "compact":
        adapter.compact(0.1)
    else:
        adapter._method.prune(how, 0.01)
    assert min(adapter.ranks["0"]) >= 1
    train(model, optimizer, adapter, range(30))
    assert model[0].cores[-1].abs().max() > 1e-3
    assert adapter.diagnose() == []


# ---- what is refused ----


@pytest.mark.parametrize("tol", [-0.1, 1, 1.5, float("nan"), float("inf"), "0.1", None, True])
@pytest.mark.parametrize("in_adaptation", [False, True])
def test_bad_tolerances_are_refused_and_change_nothing(tol, in_adaptation):
    if in_adaptation:
        model, _, adapter = adapted("rounding")
        call = adapter.compact
    else:
        model = make()
        call = lambda tol: compact(model, tol)  # noqa: E731
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(RankError, match="tolerance of compact is out of range") as caught:
        call(tol)
    assert f"got:      {tol!r}" in str(caught.value)
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("how", ["step", "compact", "alone"])
@pytest.mark.parametrize("method", METHODS)
def test_cores_that_are_not_finite_are_refused_and_nothing_changes(method, how, value):
    model, _, adapter = adapted(method, prune_every=1, regrow=0.0 if method == "comera" else 0.3)
    adapter.loss(torch.tensor(1.0))
    adapter.step()
    with torch.no_grad():
        model[2].cores[1][0, 1, 2] = value
    before = copy.deepcopy(model.state_dict())
    if how == "alone":
        del adapter  # which would refuse it
        act = lambda: compact(model, 0.1)  # noqa: E731
    else:
        adapter.loss(torch.tensor(1.0))
        act = {"step": adapter.step, "compact": lambda: adapter.compact(0.1)}[how]
    with pytest.raises(RankError, match="layer '2' has numbers that are not finite") as caught:
        act()
    assert len(str(caught.value).splitlines()) == 4
    for name, entry in model.state_dict().items():
        torch.testing.assert_close(entry, before[name], rtol=0, atol=0, equal_nan=True)


def test_a_model_without_layers_of_ranks_is_refused():
    with pytest.raises(RankError, match="no TT layer whose ranks could adapt"):
        compact(nn.Linear(4, 4), 0.1)


@pytest.mark.parametrize("method", METHODS)
def test_a_model_with_an_adapter_is_left_to_it(method):
    model, optimizer, adapter = adapted(method)
    train(model, optimizer, adapter, range(3))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RankError) as caught:
        compact(model, 0.3, optimizer)
    assert str(caught.value) == (
        "a RankAdapter is at work on the model, and must make its cuts\n"
        "  got:      compact(model, ..) with an adapter for layer '0'\n"
        "  expected: a model without an adapter that is still in use\n"
        "  mend:     call adapter.compact(tol) instead, or delete the adapter first"
    )
    for name, entry in model.state_dict().items():
        torch.testing.assert_close(entry, before[name], rtol=0, atol=0)
    train(model, optimizer, adapter, range(3, 20))
    del adapter
    assert 0 < compact(model, 0.3, optimizer) <= 0.3


@pytest.mark.parametrize(
    ("arguments", "name", "got"),
    [
        ((None, 0.1), "model", "NoneType"),
        ((make(), 0.1, None), "optimizer", "NoneType"),
        ((make(), 0.1, [torch.optim.SGD([torch.zeros(1)], lr=0.1), 3]), "optimizer", "int"),
    ],
)
def test_what_is_no_model_or_optimizer_is_refused(arguments, name, got):
    with pytest.raises(RankError) as caught:
        compact(*arguments)
    assert str(caught.value) == (
        f"compact got the wrong type of {name}\n"
        f"  got:      {got}\n"
        "  expected: an nn.Module, a tolerance, and a torch optimizer or several\n"
        "  mend:     write compact(model, 0.01, optimizer), or leave the optimizer out"
    )
