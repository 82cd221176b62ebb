"""The methods "proximal" and "rounding": schedules, floors, dtypes, layouts, resume, patience."""

import copy
import io
import itertools

import pytest
import torch
from torch import nn

from comera_fx.balance import Directions
from comera_fx.config import RankConfig
from comera_fx.modules import TTEmbedding, TTLinear
from comera_fx.spec import TTSpec
from comera_fx.train import RankAdapter, param_groups
from comera_fx.train.methods.deaths import Deaths, above_error

METHODS = ["proximal", "rounding"]
SPEC = TTSpec("tt", (4, 8), (8, 4), (1, 4, 16, 4, 1))
TTM = TTSpec("ttm", (4, 8), (8, 4), (1, 12, 1))
TABLE = TTSpec("ttm", (6, 10), (8, 4), (1, 16, 1))


def linears(spec=SPEC, **options):
    return nn.Sequential(
        TTLinear(spec, 32, 32, **options), nn.Tanh(), TTLinear(spec, 32, 32, **options)
    )


def make(method, model=None, optimizer_class=torch.optim.AdamW, lr=3e-3, seed=1, **config):
    torch.manual_seed(seed)
    model = linears() if model is None else model()
    optimizer = optimizer_class(param_groups(model, lr=lr))
    if "target_ratio" in config:
        config = {"shrink_steps": 50, **config}
    config = {"prune_every": 5, **config}
    return model, optimizer, RankAdapter(model, optimizer, RankConfig(method=method, **config))


def inputs(model, step):
    draws = torch.Generator().manual_seed(step)
    if isinstance(model[0], TTEmbedding):
        return torch.randint(0, 60, (64,), generator=draws)
    return torch.randn(64, 32, generator=draws).to(model[0].cores[0].dtype)


def wanted(model, x):
    if isinstance(model[0], TTEmbedding):
        angles = x[:, None] * torch.arange(1, 33) / 60
        return angles.sin()
    return torch.tanh(x.roll(1, 1))


def train(model, optimizer, adapter, steps):
    losses = []
    for step in steps:
        x = inputs(model, step)
        task = nn.functional.mse_loss(model(x), wanted(model, x))
        optimizer.zero_grad()
        adapter.loss(task).backward()
        optimizer.step()
        adapter.step()
        losses.append(task.item())
    return losses


def sizes(adapter):
    return {entry["step"]: entry["size"] for entry in adapter.history}


# ---- schedules ----


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("warmup", "early", "shrink", "every"), [(0, 0, 50, 5), (7, 0, 40, 4), (10, 15, 30, 5)]
)
def test_the_budget_falls_as_the_cube_of_what_is_left_of_the_way(
    method, warmup, early, shrink, every
):
    model, optimizer, adapter = make(
        method,
        target_ratio=0.4,
        warmup_steps=warmup,
        early_steps=early,
        shrink_steps=shrink,
        prune_every=every,
        gamma=0.0,
        threshold=0.0,
    )
    begin, target = warmup + early, adapter.target_size
    train(model, optimizer, adapter, range(begin + shrink + every))
    start = adapter.initial_size  # nothing is cut early: without strength, and with no threshold
    one_rank = max(2 * mode * 16 for mode in SPEC.mode_sizes)
    is_met = False
    for step, size in sizes(adapter).items():
        share = min(max(step - begin, 0) / shrink, 1)
        budget = target + (start - target) * (1 - share) ** 3
        assert size <= budget
        assert is_met or size > budget - one_rank
        is_met = is_met or size <= target
    met_at = min(step for step, size in sizes(adapter).items() if size <= target)
    assert begin < met_at < begin + shrink + every
    assert adapter.stage == "late"


@pytest.mark.parametrize("method", METHODS)
def test_the_target_is_met_when_the_way_is_over_and_not_much_before(method):
    model, optimizer, adapter = make(method, target_ratio=0.3, shrink_steps=100)
    train(model, optimizer, adapter, range(50))
    assert adapter.size > adapter.target_size
    train(model, optimizer, adapter, range(50, 100))
    assert 0.9 * adapter.target_size < adapter.size <= adapter.target_size


@pytest.mark.parametrize("method", METHODS)
def test_without_a_way_the_target_is_met_at_the_first_cut(method):
    model, optimizer, adapter = make(method, target_ratio=0.5, shrink_steps=0)
    train(model, optimizer, adapter, range(4))
    assert adapter.size == adapter.initial_size
    train(model, optimizer, adapter, range(4, 5))
    assert adapter.size <= adapter.target_size


@pytest.mark.parametrize("method", METHODS)
def test_once_the_target_is_met_ranks_stay(method):
    model, optimizer, adapter = make(method, target_ratio=0.5, shrink_steps=10)
    train(model, optimizer, adapter, range(15))
    ranks = adapter.ranks
    train(model, optimizer, adapter, range(15, 60))
    assert adapter.ranks == ranks


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_added_to_the_task_loss(method):
    model, _, adapter = make(method, target_ratio=0.5, warmup_steps=1)
    for _ in range(3):
        task = torch.tensor(2.0, requires_grad=True)
        assert adapter.loss(task) is task
        adapter.step()
    assert all(not layer.rank_weights for layer in (model[0], model[2]))


def test_proximal_weakens_what_the_next_cut_takes():
    model, optimizer, adapter = make("proximal", target_ratio=0.5)
    train(model, optimizer, adapter, range(4))
    twin = copy.deepcopy(model)
    adapter._method.prune("late", 0.5)
    smaller = [
        (ours.dense_weight().norm() / theirs.dense_weight().norm()).item()
        for ours, theirs in zip((model[0], model[2]), (twin[0], twin[2]), strict=True)
    ]
    adapter2 = make("rounding", lambda: twin, target_ratio=0.5)[2]
    adapter2._method.prune("late", 0.5)
    assert adapter2.ranks == adapter.ranks
    for layer, cut, share in zip((model[0], model[2]), (twin[0], twin[2]), smaller, strict=True):
        assert layer.dense_weight().norm() < cut.dense_weight().norm()
        assert share > 0.8


# ---- floors ----


@pytest.mark.parametrize("method", METHODS)
def test_floors_and_excluded_layers(method):
    with pytest.warns(UserWarning, match="is out of reach"):
        model, optimizer, adapter = make(
            method, target_ratio=0.01, min_rank=2, min_ranks={"2": 3}, shrink_steps=20
        )
    train(model, optimizer, adapter, range(30))
    assert adapter.ranks == {"0": [2, 2, 2], "2": [3, 3, 3]}
    model, optimizer, adapter = make(method, target_ratio=0.5, exclude=("2",), shrink_steps=20)
    train(model, optimizer, adapter, range(30))
    assert list(adapter.ranks) == ["0"]
    assert model[2].spec == SPEC
    assert adapter.size <= adapter.target_size == SPEC.num_params // 2


def test_a_model_that_learns_slowly_is_not_worn_away():
    model, optimizer, adapter = make("proximal", lr=1e-4)
    norms = [layer.dense_weight().norm().item() for layer in (model[0], model[2])]
    losses = train(model, optimizer, adapter, range(600))
    for layer, norm in zip((model[0], model[2]), norms, strict=True):
        assert layer.dense_weight().norm().item() > 0.8 * norm
    assert sum(losses[-20:]) < sum(losses[:20])


@pytest.mark.parametrize(
    ("method", "strength"), [("proximal", {"gamma": 0.95}), ("rounding", {"threshold": 0.9})]
)
def test_floors_hold_in_the_early_stage(method, strength):
    model, optimizer, adapter = make(method, min_rank=1, min_ranks={"0": 2}, **strength)
    train(model, optimizer, adapter, range(60))
    for name, floor in (("0", 2), ("2", 1)):
        assert min(adapter.ranks[name]) == floor
    assert adapter.size < adapter.initial_size / 4


# ---- optimizers, dtypes, kinds of layers ----


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("optimizer_class", "lr"),
    [
        (torch.optim.SGD, 0.1),
        (lambda groups: torch.optim.SGD(groups, momentum=0.9, nesterov=True), 0.03),
        (torch.optim.Adam, 3e-3),
        (lambda groups: torch.optim.AdamW(groups, amsgrad=True), 3e-3),
        (torch.optim.RMSprop, 1e-3),
        (torch.optim.Adagrad, 1e-2),
        (torch.optim.NAdam, 3e-3),
        (torch.optim.Adamax, 3e-3),
    ],
    ids=["sgd", "momentum", "adam", "amsgrad", "rmsprop", "adagrad", "nadam", "adamax"],
)
def test_optimizers_go_on_after_cuts(method, optimizer_class, lr):
    model, optimizer, adapter = make(
        method, optimizer_class=optimizer_class, lr=lr, target_ratio=0.5, shrink_steps=30
    )
    losses = train(model, optimizer, adapter, range(60))
    assert adapter.size <= adapter.target_size
    assert sum(losses[-5:]) < sum(losses[:5])
    for parameter in model.parameters():
        for entry in optimizer.state[parameter].values():
            is_number = not isinstance(entry, torch.Tensor) or entry.ndim == 0
            assert is_number or entry.shape == parameter.shape


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes_stay(method, dtype):
    model, optimizer, adapter = make(
        method, lambda: linears(dtype=dtype), target_ratio=0.5, shrink_steps=30
    )
    losses = train(model, optimizer, adapter, range(60))
    assert adapter.size <= adapter.target_size
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert sum(losses[-5:]) < sum(losses[:5])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "model",
    [
        lambda: linears(TTM),
        lambda: nn.Sequential(TTEmbedding(TABLE, 60, 32), nn.Tanh(), TTLinear(SPEC, 32, 32)),
        lambda: nn.Sequential(
            TTEmbedding(TTSpec("tt", (6, 10), (8, 4), (1, 6, 16, 4, 1)), 60, 32, padding_idx=0)
        ),
    ],
    ids=["ttm", "embedding", "tt embedding"],
)
def test_layouts_and_embeddings(method, model):
    model, optimizer, adapter = make(method, model, target_ratio=0.5, shrink_steps=30)
    losses = train(model, optimizer, adapter, range(60))
    held = sum(core.numel() for layer in model for core in getattr(layer, "cores", ()))
    assert held == adapter.size <= adapter.target_size
    assert sum(losses[-5:]) < sum(losses[:5])


# ---- resume ----


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("stop", [12, 30, 33, 62])  # early, trials pending, late, target met
def test_a_run_resumed_in_mid_schedule_gives_the_same_numbers(method, stop):
    config = {"target_ratio": 0.4, "warmup_steps": 5, "early_steps": 15, "shrink_steps": 40}
    model, optimizer, adapter = make(method, gamma=0.02, regrow=0.3, **config)
    train(model, optimizer, adapter, range(stop))
    stored = io.BytesIO()
    torch.save([part.state_dict() for part in (model, optimizer, adapter)], stored)
    straight = train(model, optimizer, adapter, range(stop, 80))

    model2, optimizer2, adapter2 = make(method, gamma=0.02, regrow=0.3, seed=9, **config)
    stored.seek(0)
    states = torch.load(stored, weights_only=True)
    for part, state in zip((model2, optimizer2, adapter2), states, strict=True):
        part.load_state_dict(state)
    assert train(model2, optimizer2, adapter2, range(stop, 80)) == straight
    assert adapter2.history == adapter.history
    assert adapter2.state_dict() == adapter.state_dict()
    for ours, theirs in zip(model.parameters(), model2.parameters(), strict=True):
        assert torch.equal(ours, theirs)


# ---- what dies early ----


def fade(layer, bond, kept, scale):
    """Leave all but some directions of a bond a share of what they have."""
    with torch.no_grad():
        layer.cores[bond][..., kept:] *= scale


@pytest.mark.parametrize("threshold", [1e-3, 1e-2, 0.1])
def test_rounding_cuts_each_bond_to_its_error_early(threshold):
    model, _, adapter = make("rounding", threshold=threshold, patience=1)
    fade(model[0], 1, 5, 0.3 * threshold)
    before = [layer.dense_weight().detach() for layer in (model[0], model[2])]
    adapter._method.prune("early", 0.0)
    assert adapter.ranks["0"][1] == 5
    for layer, full in zip((model[0], model[2]), before, strict=True):
        error = (layer.dense_weight() - full).norm() / full.norm()
        assert error <= threshold * 3**0.5  # of three bonds


@pytest.mark.parametrize("share", [0.5, 2.0])
def test_proximal_takes_for_dead_what_is_below_its_share_of_the_largest(share):
    adapter = make("proximal", gamma=0.0, threshold=0.05, patience=1)[2]
    bonds = adapter._layers.balanced(["0"])["0"]
    values = bonds[1].values
    factors = torch.ones_like(values)
    factors[5:] = share * 0.05 * values[0] / values[5:]
    bonds[1] = bonds[1].scaled(factors)
    adapter._layers.turn({"0": bonds})
    adapter._method.prune("early", 0.0)
    assert adapter.ranks["0"][1] == (5 if share < 1 else 16)


@pytest.mark.parametrize("method", METHODS)
def test_a_rank_dead_at_one_cut_only_survives(method):
    model, _, adapter = make(method, gamma=0.0, threshold=0.01, patience=2)
    fade(model[0], 1, 5, 1e-3)
    adapter._method.prune("early", 0.0)
    assert adapter.ranks["0"] == [4, 16, 4]
    fade(model[0], 1, 5, 1e3)
    adapter._method.prune("early", 0.0)
    assert adapter.ranks["0"] == [4, 16, 4]
    fade(model[0], 1, 5, 1e-3)
    adapter._method.prune("early", 0.0)
    assert adapter.ranks["0"] == [4, 16, 4]
    adapter._method.prune("early", 0.0)
    assert adapter.ranks["0"][1] == 5


def bond_of(*values):
    values = torch.tensor(values, dtype=torch.float64)
    eye = torch.eye(len(values), dtype=torch.float64)
    return {"fc": [Directions(values, eye, eye)]}


def live(values, largest):
    return int((values > 0.01 * largest).sum())


@pytest.mark.parametrize("patience", [1, 2, 3])
def test_as_many_die_as_were_dead_at_every_one_of_the_last_cuts(patience):
    for dead in itertools.product([0, 1, 2], repeat=patience):
        deaths = Deaths(patience, {"fc": 0})
        counts = [deaths.alive(bond_of(*[1.0] * (4 - n), *[1e-4] * n), live)["fc"][0] for n in dead]
        assert counts == [*[4] * (patience - 1), 4 - min(dead)]


def test_what_has_gone_is_not_counted_among_the_dead_again():
    deaths = Deaths(2, {"fc": 0})
    counts = [
        deaths.alive(bond_of(*values), live)["fc"][0]
        for values in ([1.0, 1.0, 1e-4, 1e-4], [1.0, 1.0, 1e-4, 1e-4], [1.0, 1e-4], [1.0, 1e-4])
    ]
    assert counts == [4, 2, 2, 1]


def test_a_layer_that_fades_as_a_whole_dies_beside_what_it_was():
    deaths = Deaths(1, {"fc": 0})
    assert deaths.alive(bond_of(1.0, 0.5), live) == {"fc": [2]}
    assert deaths.alive(bond_of(0.011, 0.005), live) == {"fc": [1]}
    assert Deaths(1, {"fc": 1}).alive(bond_of(1.0), lambda *_: 0) == {"fc": [1]}
    assert deaths.alive(bond_of(0.009), live) == {"fc": [0]}


def test_the_error_is_that_of_all_that_is_left_out():
    values = torch.tensor([4.0, 3.0, 0.4, 0.3], dtype=torch.float64)
    whole = values.norm().item()
    assert above_error(values, 0.5 / whole * 1.0001) == 2
    assert above_error(values, 0.5 / whole * 0.9999) == 3
    assert above_error(values, 0.0) == 4
    assert above_error(values, 1.0) == 0
    assert above_error(values[:0], 0.1) == 0
