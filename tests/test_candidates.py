"""candidates: the layers that hold a weight matrix, and why some cannot be rewritten."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from comera_fx.candidates import find_candidates, structural_reasons


def reasons(model: nn.Module) -> dict[str, str]:
    candidates = find_candidates(model)
    found = structural_reasons(model, candidates)
    return {candidate.name: found.get(candidate.name, "") for candidate in candidates}


def reason(model: nn.Module, name: str = "0") -> str:
    return reasons(model)[name]


def linear() -> nn.Linear:
    return nn.Linear(64, 64)


def test_supported_layers_have_no_reason():
    assert reason(nn.Sequential(linear())) == ""
    assert reason(nn.Sequential(nn.Embedding(100, 64, padding_idx=0))) == ""


def test_subclass():
    class Scaled(nn.Linear):
        pass

    text = "a subclass of nn.Linear (Scaled), not the class itself"
    assert reason(nn.Sequential(Scaled(64, 64))) == text


@pytest.mark.parametrize(
    "make",
    [nn.TransformerEncoderLayer, nn.TransformerDecoderLayer],
    ids=["encoder", "decoder"],
)
def test_inside_layers_that_read_weights_themselves(make):
    class Mine(make):
        pass

    for cls in (make, Mine):
        found = reasons(nn.Sequential(cls(64, 2, 64)))
        text = f"inside nn.{make.__name__}, which reads its weight directly: not supported yet"
        assert found["0.linear1"] == found["0.linear2"] == text
        packed = "nn.MultiheadAttention reads packed weights itself"
        assert found["0.self_attn"].startswith(packed)
        assert found["0.self_attn.out_proj"].startswith("a subclass of nn.Linear (NonDyn")
        assert all(found.values())


def test_linear_put_into_an_attention_module():
    attention = nn.MultiheadAttention(64, 2)
    attention.extra = nn.Sequential(linear())
    assert reason(nn.Sequential(attention), "0.extra.0").startswith("inside nn.MultiheadAttention")


def test_tied_weight_and_tied_bias():
    model = nn.Sequential(linear(), linear(), linear(), linear())
    model[1].weight = model[0].weight
    model[3].bias = model[2].bias
    found = reasons(model)
    for name, what in (("0", "weight"), ("1", "weight"), ("2", "bias"), ("3", "bias")):
        assert found[name] == f"its {what} is tied to another layer: not supported yet"


def test_a_shared_layer_is_not_tied():
    layer = linear()
    model = nn.Sequential(layer, layer)
    assert reasons(model) == {"0": ""}
    assert find_candidates(model)[0].names == ("0", "1")


def test_parametrized_weight():
    model = nn.Sequential(parametrizations.weight_norm(linear()), linear())
    parametrize.register_parametrization(model[1], "weight", nn.Identity())
    assert reasons(model) == dict.fromkeys(["0", "1"], "its parameters are parametrized")


def test_weight_computed_by_a_hook():
    layer = linear()
    weight = layer.weight
    del layer.weight
    layer.register_parameter("weight_v", weight)
    layer.weight = weight * 1
    assert reason(nn.Sequential(layer)).startswith("its weight is computed from others")


def test_own_forward():
    layer = linear()
    layer.forward = lambda x: x
    assert reason(nn.Sequential(layer)) == "its forward was replaced"


HOOKS: dict[str, Callable[[nn.Linear], object]] = {
    "forward": lambda layer: layer.register_forward_hook(lambda *_: None),
    "forward_pre": lambda layer: layer.register_forward_pre_hook(lambda *_: None),
    "backward": lambda layer: layer.register_full_backward_hook(lambda *_: None),
    "backward_pre": lambda layer: layer.register_full_backward_pre_hook(lambda *_: None),
    "save": lambda layer: layer.register_state_dict_post_hook(lambda *_: None),
    "save_pre": lambda layer: layer.register_state_dict_pre_hook(lambda *_: None),
    "load": lambda layer: layer.register_load_state_dict_post_hook(lambda *_: None),
    "load_pre": lambda layer: layer.register_load_state_dict_pre_hook(lambda *_: None),
    "gradient": lambda layer: layer.weight.register_hook(lambda grad: None),
    "optimizer in backward": lambda layer: layer.bias.register_post_accumulate_grad_hook(
        lambda bias: None
    ),
}


@pytest.mark.parametrize("register", HOOKS.values(), ids=HOOKS)
def test_hooks(register):
    layer = linear()
    register(layer)
    assert reason(nn.Sequential(layer)) == "it has hooks"


def test_weights_without_values():
    assert reason(nn.Sequential(nn.LazyLinear(64))) == "a lazy layer that has no weight yet"
    on_meta = nn.Linear(64, 64, device="meta")
    assert reason(nn.Sequential(on_meta)) == "its weight is on the meta device"


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn])
def test_dtypes(dtype):
    layer = linear()
    layer.weight = nn.Parameter(torch.zeros(64, 64).to(dtype), requires_grad=False)
    assert reason(nn.Sequential(layer)) == f"its weight is of dtype {dtype}"


class Wrapped(torch.Tensor):
    pass


def test_tensor_subclass():
    layer = linear()
    layer.weight = nn.Parameter(torch.zeros(64, 64).as_subclass(Wrapped))
    assert reason(nn.Sequential(layer)) == "its weight is a Wrapped of layout torch.strided"


HUNG_ON: dict[str, Callable[[nn.Module], object]] = {
    "buffer": lambda layer: layer.register_buffer("scale", torch.ones(64), persistent=False),
    "parameter": lambda layer: layer.register_parameter("scale", nn.Parameter(torch.ones(64))),
    "module": lambda layer: layer.register_module("adapter", nn.Linear(64, 2)),
}


@pytest.mark.parametrize("register", HUNG_ON.values(), ids=HUNG_ON)
@pytest.mark.parametrize("make", [linear, lambda: nn.Embedding(100, 64)], ids=["linear", "table"])
def test_layer_that_holds_more(register, make):
    layer = make()
    register(layer)
    assert reason(nn.Sequential(layer)) == "it holds more than a weight and a bias"


@pytest.mark.parametrize(
    "option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}]
)
def test_embedding_options(option):
    text = f"the option {next(iter(option))} of nn.Embedding is not supported yet"
    assert reason(nn.Sequential(nn.Embedding(100, 64, **option))) == text


@pytest.mark.parametrize(
    ("module", "start"),
    [
        (nn.MultiheadAttention(64, 2), "nn.MultiheadAttention reads packed weights itself"),
        (nn.EmbeddingBag(100, 64), "nn.EmbeddingBag is not supported yet"),
        (nn.Conv2d(3, 8, 3), "convolutions are not supported"),
        (nn.LSTM(64, 64), "recurrent layers are not supported"),
        (nn.Bilinear(8, 8, 8), "nn.Bilinear is not supported"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_kinds_that_are_not_supported(module, start):
    assert reason(nn.Sequential(module)).startswith(start)


def test_norms_and_activations_are_not_listed():
    assert reasons(nn.Sequential(nn.LayerNorm([4, 8]), nn.PReLU(), nn.BatchNorm1d(8))) == {}


def test_loose_parameter():
    model = nn.Sequential()
    model.position = nn.Parameter(torch.zeros(10, 64))
    model.scale = nn.Parameter(torch.zeros(10))
    found = reasons(model)
    assert list(found) == ["position"]
    assert found["position"].startswith("a functional weight, not held by a layer")


def test_hugging_face_conv1d_is_known_without_importing_transformers():
    code = """
import sys, torch, types
module = types.ModuleType("transformers.pytorch_utils")
sys.modules[module.__name__] = module
class Conv1D(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(64, 64))
Conv1D.__module__ = module.__name__
from comera_fx.candidates import find_candidates
print([candidate.kind for candidate in find_candidates(torch.nn.Sequential(Conv1D()))])
print("transformers" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["['conv1d']", "False"]
