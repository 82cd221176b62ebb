"""write_back: the user's own model, in a copy or in place, with everything else as it was."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from comera_fx.errors import CaptureError, ConfigError
from comera_fx.modules import TTLinear
from comera_fx.spec import TTSpec
from comera_fx.write_back import write_back

SPEC = TTSpec("tt", (4, 2), (2, 4), (1, 4, 5, 4, 1))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.listed = nn.ModuleList([self.first, nn.Linear(8, 8)])
        self.embed = nn.Embedding(8, 8)
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.embed.weight
        self.drop = nn.Dropout(0.5)
        self.settings = {"width": 8}
        self.plain = [self.first]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.listed[1](self.second(self.first(x))))


def replace(*layers: nn.Linear) -> dict[nn.Module, TTLinear]:
    return {layer: TTLinear.from_linear(layer, SPEC) for layer in layers}


def test_the_copy_has_the_new_layer_under_all_of_its_names():
    model = Net()
    new = replace(model.first)

    result = write_back(model, new, inplace=False)

    assert type(result) is Net
    assert result.first is result.listed[0] is result.plain[0] is new[model.first]
    assert type(result.second) is nn.Linear
    assert result.settings == model.settings
    assert result.settings is not model.settings


def test_the_model_that_was_copied_is_untouched():
    model = Net()
    before, modules = copy.deepcopy(model.state_dict()), list(model.modules())

    write_back(model, replace(model.first, model.second), inplace=False)

    assert list(model.modules()) == modules
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())


def test_nothing_is_shared_between_model_and_copy():
    model = Net()
    result = write_back(model, replace(model.first), inplace=False)
    held = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    assert not any(id(tensor) in held for tensor in (*result.parameters(), *result.buffers()))


def test_ties_among_the_rest_are_kept():
    model = Net()
    result = write_back(model, replace(model.first), inplace=False)
    assert result.head.weight is result.embed.weight
    assert result.head.weight is not model.head.weight


def test_flags_and_requires_grad_are_kept():
    model = Net().eval()
    model.drop.train()
    model.second.weight.requires_grad_(False)
    model.first.weight.requires_grad_(False)

    result = write_back(model, replace(model.first), inplace=False)

    assert not result.training
    assert not result.first.training
    assert result.drop.training
    assert not result.second.weight.requires_grad
    assert not any(core.requires_grad for core in result.first.cores)
    assert result.first.bias.requires_grad


def test_dense_weights_that_go_are_never_copied(monkeypatch: pytest.MonkeyPatch):
    model = Net()
    copied = []
    original = nn.Parameter.__deepcopy__

    def record(self: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
        copied.append(self)
        return original(self, memo)

    new = replace(model.first, model.second)
    monkeypatch.setattr(nn.Parameter, "__deepcopy__", record)
    write_back(model, new, inplace=False)

    assert not any(p is model.first.weight or p is model.second.weight for p in copied)
    assert any(p is model.embed.weight for p in copied)


def test_in_place_the_model_itself_is_changed():
    model = Net()
    first = model.first
    new = replace(first)

    assert write_back(model, new, inplace=True) is model
    assert model.first is model.listed[0] is new[first]
    assert list(model.listed._modules) == ["0", "1"]


@pytest.mark.parametrize("inplace", [False, True])
def test_containers(inplace):
    shared = nn.Linear(8, 8)
    model = nn.ModuleDict({"a": nn.Sequential(shared, nn.ReLU()), "b": nn.ModuleList([shared])})
    new = replace(shared)
    result = write_back(model, new, inplace=inplace)
    assert result["a"][0] is result["b"][0] is new[shared]


def test_a_model_that_is_itself_replaced():
    layer = nn.Linear(8, 8)
    new = replace(layer)
    assert write_back(layer, new, inplace=False) is new[layer]
    with pytest.raises(ConfigError, match="cannot be changed in place") as error:
        write_back(layer, new, inplace=True)
    assert "inplace=True for a Linear" in str(error.value)


class Uncopyable(Net):
    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        raise TypeError("cannot pickle a socket\nat all")


class Forgetful(Net):
    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        return type(self)()


def test_a_model_that_cannot_be_copied():
    model = Uncopyable()
    with pytest.raises(CaptureError) as error:
        write_back(model, replace(model.first), inplace=False)
    assert str(error.value).splitlines() == [
        "Uncopyable cannot be copied",
        "  got:      TypeError: cannot pickle a socket",
        "  expected: a model that copy.deepcopy accepts",
        "  mend:     use inplace=True, which changes the model itself",
    ]
    assert isinstance(error.value.__cause__, TypeError)
    assert type(write_back(model, replace(model.first), inplace=True).first) is TTLinear


def test_a_copy_that_forgets_the_replacement_is_refused():
    model = Forgetful()
    with pytest.raises(CaptureError, match="does not hold the layers") as error:
        write_back(model, replace(model.first), inplace=False)
    assert "mend:     use inplace=True" in str(error.value)
