"""policy: which layers get which shape, and the reason of every layer that stays dense."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from comera_fx.config import OptimizeConfig, PlanConfig
from comera_fx.errors import ConfigError, SpecError
from comera_fx.policy import Choice, decide, refuse_if_nothing
from comera_fx.tt import TTSpec


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


# ---- reasons in the model's structure ----


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
        choices = choose(nn.Sequential(cls(64, 2, 64)))
        text = f"inside nn.{make.__name__}, which reads its weight directly: not supported yet"
        assert choices["0.linear1"].reason == choices["0.linear2"].reason == text
        attention = choices["0.self_attn"]
        assert attention.reason.startswith("nn.MultiheadAttention reads packed weights itself")
        assert choices["0.self_attn.out_proj"].reason.startswith("a subclass of nn.Linear (NonDyn")
        assert not any(choice.spec for choice in choices.values())


def test_linear_put_into_an_attention_module():
    attention = nn.MultiheadAttention(64, 2)
    attention.extra = nn.Sequential(linear())
    assert reason(nn.Sequential(attention), "0.extra.0").startswith("inside nn.MultiheadAttention")


def test_tied_weight_and_tied_bias():
    model = nn.Sequential(linear(), linear(), linear(), linear())
    model[1].weight = model[0].weight
    model[3].bias = model[2].bias
    choices = choose(model)
    for name, what in (("0", "weight"), ("1", "weight"), ("2", "bias"), ("3", "bias")):
        assert choices[name].reason == f"its {what} is tied to another layer: not supported yet"


def test_a_shared_layer_is_not_tied():
    layer = linear()
    choices = choose(nn.Sequential(layer, layer))
    assert list(choices) == ["0"]
    assert choices["0"].candidate.names == ("0", "1")
    assert choices["0"].spec is not None


def test_parametrized_weight():
    model = nn.Sequential(parametrizations.weight_norm(linear()), linear())
    parametrize.register_parametrization(model[1], "weight", nn.Identity())
    choices = choose(model)
    assert list(choices) == ["0", "1"]
    assert {choice.reason for choice in choices.values()} == {"its parameters are parametrized"}


def test_weight_computed_by_a_hook():
    layer = linear()
    weight = layer.weight
    del layer.weight
    layer.register_parameter("weight_v", weight)
    layer.weight = weight * 1
    assert reason(nn.Sequential(layer)).startswith("its weight is computed from others")


def test_hooks_and_own_forward():
    hooked, patched, on_weight = linear(), linear(), linear()
    hooked.register_forward_hook(lambda module, args, output: None)
    patched.forward = lambda x: x
    on_weight.weight.register_post_accumulate_grad_hook(lambda weight: None)
    for layer in (hooked, patched, on_weight):
        assert reason(nn.Sequential(layer)) == "it has hooks, or a forward of its own"


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


def test_layer_that_holds_more():
    layer = linear()
    layer.register_buffer("scale", torch.ones(64))
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
    assert list(choose(nn.Sequential(nn.LayerNorm([4, 8]), nn.PReLU(), nn.BatchNorm1d(8)))) == []


def test_loose_parameter():
    model = nn.Sequential()
    model.position = nn.Parameter(torch.zeros(10, 64))
    model.scale = nn.Parameter(torch.zeros(10))
    choices = choose(model)
    assert list(choices) == ["position"]
    assert choices["position"].reason.startswith("a functional weight, not held by a layer")


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


def test_slower_than_dense_unless_named():
    model = nn.Sequential(nn.Linear(64, 64))
    shape: dict[str, Any] = {"layouts": {"0": "ttm"}, "max_rank": 15}
    slow = choose(model, **shape)["0"]
    assert slow.reason == "TT form would take more FLOPs than dense at 4,096 tokens"
    more, dense = (int(figure.replace(",", "")) for figure in slow.detail.split(" > "))
    assert more > dense == 6 * 4096 * 64 * 64
    assert reason(model, only_if_faster=False, **shape) == ""
    assert reason(model, targets=["*"], **shape) == ""
    assert reason(model, ranks={"0": 15}, layouts={"0": "ttm"}) == ""


def test_tolerance_leaves_the_costs_open():
    assert reason(nn.Sequential(linear()), ranks={"0": 64}, tol=0.1) == ""
    assert reason(nn.Sequential(linear()), ranks={"0": 64}, tol=0.1, init="random") != ""


def test_memory_limit():
    text = reason(nn.Sequential(linear()), plan=PlanConfig(memory_limit_bytes=1))
    assert text == "no plan for 4,096 tokens is within memory_limit_bytes"


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
