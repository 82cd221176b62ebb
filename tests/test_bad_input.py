"""Every fault of a user: an error of four lines, and a model that is as it was before."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import comera_fx
from comera_fx import CaptureError, ComeraError, ConfigError, OptimizeConfig, SpecError, WeightError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(100, 64)
        self.fc1, self.fc2 = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.relu(self.fc1(self.embed(ids))))


class DistributedDataParallel(Net):
    """Stands for torch's own, which needs a process group."""


class Locked(Net):
    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        raise RuntimeError("cannot copy an open socket")


def spoiled(value: float) -> Net:
    model = Net()
    model.fc2.weight.data[3, 5] = value
    return model


def config(**settings: Any) -> OptimizeConfig:
    usual = {"init": "random", "max_rank": 4, "only_if_faster": False}
    return OptimizeConfig(**{**usual, **settings})


SQUARE = ((8, 8), (8, 8))
FAULTS: dict[str, tuple[type[ComeraError], str, Callable[[], nn.Module], dict[str, Any]]] = {
    "in modes too small": (
        SpecError, "the in_modes given for fc1 are too small",
        Net, {"config": config(modes={"fc1": ((4, 4), (8, 8))})},
    ),
    "out modes too small": (
        SpecError, "the out_modes given for embed are too small",
        Net, {"config": config(modes={"embed": ((10, 10), (8, 4))})},
    ),
    "too few ranks": (
        SpecError, "the shape asked for fc1 is malformed",
        Net, {"config": config(modes={"fc1": SQUARE}, ranks={"fc1": (1, 4, 1)})},
    ),
    "end ranks that are not 1": (
        SpecError, "the shape asked for fc1 is malformed",
        Net, {"config": config(modes={"fc1": SQUARE}, ranks={"fc1": (2, 4, 4, 4, 1)})},
    ),
    "ttm modes of unequal number": (
        SpecError, "the shape asked for embed is malformed",
        Net, {"config": config(modes={"embed": ((10, 10), (4, 4, 4))})},
    ),
    "pattern without a layer": (
        ConfigError, "OptimizeConfig.targets has a pattern that matches no layer",
        Net, {"config": config(targets=["fc1", "fc3"])},
    ),
    "NaN in a weight": (
        WeightError, "the weight of fc2 holds NaN or infinity",
        lambda: spoiled(float("nan")), {"config": config(init="decompose")},
    ),
    "infinity in a weight": (
        WeightError, "the weight of fc2 holds NaN or infinity",
        lambda: spoiled(float("inf")), {"config": config(init="decompose")},
    ),
    "NaN in a weight, random init": (
        WeightError, "the weight of fc2 holds NaN or infinity",
        lambda: spoiled(float("nan")), {"config": config()},
    ),
    "nothing large enough": (
        ConfigError, "nothing in the model would be compressed",
        Net, {"config": config(min_params=10_000)},
    ),
    "no layers": (
        ConfigError, "nothing in the model would be compressed",
        lambda: nn.Sequential(nn.ReLU()), {},
    ),
    "inputs of the wrong shape": (
        CaptureError, "Sequential fails on the example_inputs",
        lambda: nn.Sequential(nn.Linear(64, 64)), {"example_inputs": torch.zeros(2, 65)},
    ),
    "inputs of the wrong number": (
        CaptureError, "Net fails on the example_inputs",
        Net, {"example_inputs": (torch.zeros(2, dtype=torch.long), 1)},
    ),
    "inputs of the wrong kind": (
        ConfigError, "example_inputs cannot be turned into the arguments of a call",
        Net, {"example_inputs": 3},
    ),
    "config of the wrong type": (
        ConfigError, "the config is of the wrong type",
        Net, {"config": {"max_rank": 4}},
    ),
    "wrapped model": (
        ConfigError, "the model is wrapped already",
        DistributedDataParallel, {"config": config()},
    ),
    "model that cannot be copied": (
        CaptureError, "Locked cannot be copied",
        Locked, {"config": config()},
    ),
    "one layer in place": (
        ConfigError, "a model that is itself one layer cannot be changed in place",
        lambda: nn.Linear(64, 64), {"config": config(), "inplace": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "in-place"])
@pytest.mark.parametrize(("error", "problem", "make", "arguments"), FAULTS.values(), ids=FAULTS)
@pytest.mark.filterwarnings("ignore:decomposition loses")
def test_error_of_four_lines_and_model_unchanged(error, problem, make, arguments, inplace):
    model = make()
    arguments = {"inplace": inplace, **arguments}
    if isinstance(model, Locked):
        arguments["inplace"] = False
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modules = [(name, module, type(module)) for name, module in model.named_modules()]
    attributes = [dict(vars(module)) for module in model.modules()]

    with pytest.raises(error) as caught:
        comera_fx.optimize(model, **arguments)

    lines = str(caught.value).splitlines()
    assert problem in lines[0]
    assert [line[:12] for line in lines[1:]] == ["  got:      ", "  expected: ", "  mend:     "]
    assert all(len(line) > 12 for line in lines[1:])
    assert [(name, module, type(module)) for name, module in model.named_modules()] == modules
    assert [dict(vars(module)) for module in model.modules()] == attributes
    after = model.state_dict()
    assert after.keys() == before.keys()
    for name, value in before.items():
        torch.testing.assert_close(after[name], value, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("init", ["decompose", "random"])
def test_the_mend_for_a_weight_that_is_not_finite_helps(init):
    with pytest.raises(WeightError) as caught:
        comera_fx.optimize(spoiled(float("nan")), config=config(init=init))
    assert str(caught.value).splitlines()[1:] == [
        "  got:      entries from nan to nan",
        "  expected: finite numbers, for either init",
        "  mend:     repair or initialise the weight, or leave the layer out with exclude=",
    ]
    left_out = config(init="random", exclude=["fc2"])
    assert comera_fx.explain(comera_fx.optimize(spoiled(float("nan")), config=left_out)).compressed


@pytest.mark.parametrize("verb", ["optimize", "explain", "graph"])
def test_something_that_is_no_module(verb):
    with pytest.raises(ConfigError) as caught:
        getattr(comera_fx, verb)(lambda x: x)
    assert str(caught.value).splitlines() == [
        f"{verb} works on modules",
        "  got:      function",
        "  expected: a torch.nn.Module",
        "  mend:     pass the model itself",
    ]


@pytest.mark.parametrize("folder", [None, 3])
def test_a_folder_to_dump_to_that_is_no_path(folder):
    with pytest.raises(ConfigError) as caught, comera_fx.dump_to(folder):
        pass
    assert str(caught.value).splitlines() == [
        "dump_to writes into a folder",
        f"  got:      {folder!r}",
        "  expected: a path",
        "  mend:     write comera_fx.dump_to('diffs')",
    ]


class TakesDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 64)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.fc(batch["x"])


class TakesList(TakesDict):
    def forward(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return self.fc(batch[0] + batch[1])


@pytest.mark.parametrize(
    ("model", "argument", "text"),
    [
        (TakesDict(), {"x": torch.ones(2, 64)}, '({"x": x},)'),
        (TakesList(), [torch.ones(2, 64), torch.ones(2, 64)], "([x],)"),
    ],
    ids=["dict", "list"],
)
def test_the_mend_for_a_model_of_one_dict_or_list_helps(model, argument, text):
    with pytest.raises(CaptureError) as caught:
        comera_fx.optimize(model, argument, config=config())
    assert caught.value.mend == (
        "give inputs of the right number, shapes, dtypes and device; "
        f"a single dict or list argument is written {text}"
    )
    result = comera_fx.optimize(model, (argument,), config=config())
    assert comera_fx.explain(result).capture == "export"


def test_the_cause_of_a_failing_model_is_kept():
    with pytest.raises(CaptureError) as caught:
        comera_fx.optimize(Net(), torch.full((2,), 1000))
    assert isinstance(caught.value.__cause__, IndexError)


class Sealed(Net):
    """Takes no attributes once it is made."""

    def __init__(self) -> None:
        super().__init__()
        vars(self)["sealed"] = True

    def __setattr__(self, name: str, value: Any) -> None:
        if "sealed" in vars(self):
            raise AttributeError(f"{name} cannot be set")
        super().__setattr__(name, value)

    def register_module(self, name: str, module: nn.Module | None) -> None:
        raise AttributeError(f"{name} cannot be registered")


@pytest.mark.parametrize("inplace", [False, True], ids=["copy", "in-place"])
def test_a_class_that_refuses_attributes_is_optimised_whole(inplace):
    model = Sealed()
    result = comera_fx.optimize(model, config=config(), inplace=inplace)
    assert (result is model) == inplace
    report = comera_fx.explain(result)
    assert [layer.name for layer in report.compressed] == ["embed", "fc1", "fc2"]
    assert report.capture == "symbolic_trace"


def test_batch_of_the_wrong_shape_after_optimize():
    model = comera_fx.optimize(nn.Sequential(nn.Linear(64, 64)), config=config())
    with pytest.raises(comera_fx.InputError) as caught:
        model(torch.zeros(2, 63))
    assert len(str(caught.value).splitlines()) == 4


def test_optimizer_from_before_optimize_is_refused():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    result = comera_fx.optimize(model, config=config(), inplace=True)
    with pytest.raises(comera_fx.RankError) as caught:
        comera_fx.RankAdapter(result, optimizer)
    assert len(str(caught.value).splitlines()) == 4


def test_errors_are_value_errors_that_can_be_pickled():
    with pytest.raises(ValueError, match="optimize works on modules") as caught:
        comera_fx.optimize(None)
    assert str(copy.copy(caught.value)) == str(caught.value)


@pytest.mark.filterwarnings("ignore:decomposition loses")
@pytest.mark.parametrize("fill", ["zeros", "rows", "huge"])
def test_odd_but_finite_weights_are_decomposed(fill):
    model = nn.Sequential(nn.Linear(64, 64))
    weight = model[0].weight.data
    values = {"zeros": 0 * weight, "rows": weight[:1].expand(64, 64), "huge": 1e30 * weight}
    weight.copy_(values[fill])
    result = comera_fx.optimize(model, config=OptimizeConfig(max_rank=8, modes={"0": SQUARE}))
    assert torch.isfinite(result[0].weight.detach()).all()
