"""Find the layers of a model that hold weight matrices, and say which cannot be rewritten."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from comera_fx.modules import TTModule
from comera_fx.replay import has_no_values

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_READS_WEIGHTS_ITSELF = (
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)
_MODULE_HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, _NormBase)

_UNSUPPORTED = {
    "attention": "nn.MultiheadAttention reads packed weights itself: not supported yet",
    "embedding_bag": "nn.EmbeddingBag is not supported yet",
    "conv1d": "Hugging Face Conv1D is not supported yet",
    "conv": "convolutions are not supported",
    "recurrent": "recurrent layers are not supported",
    "bilinear": "nn.Bilinear is not supported",
    "parameter": "a functional weight, not held by a layer that can be swapped: not supported yet",
    "tt": "already in TT form",
}


@dataclass(frozen=True, eq=False)
class Candidate:
    """A layer that holds a weight matrix, or a matrix that a module of another kind holds.

    Args:
        name: First qualified name in ``named_modules``; of the parameter for kind "parameter".
        names: All of its qualified names: a layer may be registered in several places.
        module: The layer, or the owner of the parameter.
        kind: "linear" and "embedding" can be rewritten; the others are listed with a reason.
        num_params: Numbers in its weight matrices; biases are left out.
    """

    name: str
    names: tuple[str, ...]
    module: nn.Module
    kind: str
    num_params: int

    @property
    def sizes(self) -> tuple[int, int]:
        """In and out size of the weight: of features, or rows and columns of a table."""
        module = self.module
        if isinstance(module, nn.Linear):
            return module.in_features, module.out_features
        assert isinstance(module, nn.Embedding), f"a {self.kind} has no pair of sizes"
        return module.num_embeddings, module.embedding_dim

    @property
    def shown(self) -> str:
        """The name as messages show it."""
        return self.name or "(the model itself)"


def find_candidates(model: nn.Module) -> list[Candidate]:
    """Return every layer that holds a weight matrix, in the order of ``named_modules``."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    return [c for module, all_names in names.items() for c in _candidates(module, all_names)]


def _candidates(module: nn.Module, names: list[str]) -> Iterator[Candidate]:
    kind = _kind(module)
    own = {
        key: param
        for key, param in module._parameters.items()
        if param is not None and (has_no_values(param) or param.dim() > 1)
    }
    if isinstance(module, TTModule):
        yield Candidate(names[0], tuple(names), module, "tt", module.dense_params)
    elif kind is not None:
        yield Candidate(names[0], tuple(names), module, kind, _num_params(module, own))
    elif not isinstance(module, (*_NORMS, parametrize.ParametrizationList)):
        for key, param in own.items():
            full = tuple(f"{name}.{key}" if name else key for name in names)
            yield Candidate(full[0], full, module, "parameter", _numel(param))


def _kind(module: nn.Module) -> str | None:
    kinds: tuple[tuple[str, type | tuple[type, ...]], ...] = (
        ("linear", nn.Linear),
        ("embedding", nn.Embedding),
        ("embedding_bag", nn.EmbeddingBag),
        ("attention", nn.MultiheadAttention),
        ("conv", _ConvNd),
        ("recurrent", (nn.RNNBase, nn.RNNCellBase)),
        ("bilinear", nn.Bilinear),
    )
    for kind, classes in kinds:
        if isinstance(module, classes):
            return kind
    # By name: transformers is no dependency and takes seconds to import.
    lineage = {f"{cls.__module__}.{cls.__name__}" for cls in type(module).__mro__}
    return "conv1d" if "transformers.pytorch_utils.Conv1D" in lineage else None


def _num_params(module: nn.Module, own: dict[str, nn.Parameter]) -> int:
    if isinstance(module, nn.Linear):
        return module.in_features * module.out_features
    if isinstance(module, nn.Embedding):
        return module.num_embeddings * module.embedding_dim
    return sum(map(_numel, own.values()))


def _numel(param: nn.Parameter) -> int:
    return 0 if is_lazy(param) else prod(param.shape)


def structural_reasons(model: nn.Module, candidates: list[Candidate]) -> dict[str, str]:
    """Return why candidates cannot be rewritten, by name; those that can be are missing."""
    owners = Counter(
        id(param)
        for module in model.modules()
        for param in module._parameters.values()
        if param is not None
    )
    guarded = _names_inside(model)
    reasons = {}
    for candidate in candidates:
        reason = _unsupported(candidate, guarded) or _layer_reason(candidate.module, owners)
        if reason:
            reasons[candidate.name] = reason
    return reasons


def _names_inside(model: nn.Module) -> dict[str, str]:
    """Map the names of all modules inside of those that read their weights to the readers."""
    inside: dict[str, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        parent = name.rpartition(".")[0] if name else None
        if parent is not None and parent in inside:
            inside[name] = inside[parent]
        for known in _READS_WEIGHTS_ITSELF:
            if isinstance(module, known):
                inside.setdefault(name, known.__name__)
    return inside


def _unsupported(candidate: Candidate, inside: dict[str, str]) -> str:
    module, kind = candidate.module, candidate.kind
    if kind in _UNSUPPORTED:
        return _UNSUPPORTED[kind]
    if parametrize.is_parametrized(module):
        return "its parameters are parametrized"
    exact = nn.Linear if kind == "linear" else nn.Embedding
    if type(module) is not exact:
        if isinstance(module, nn.modules.lazy.LazyModuleMixin):
            return "a lazy layer that has no weight yet"
        return f"a subclass of nn.{exact.__name__} ({type(module).__name__}), not the class itself"
    for name in candidate.names:
        reader = inside.get(name.rpartition(".")[0]) if name else None
        if reader:
            return f"inside nn.{reader}, which reads its weight directly: not supported yet"
    return ""


def _layer_reason(module: nn.Module, owners: Counter[int]) -> str:
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if weight is None:
        return "its weight is computed from others (weight_norm or the like)"
    if owners[id(weight)] > 1:
        return "its weight is tied to another layer: not supported yet"
    if bias is not None and owners[id(bias)] > 1:
        return "its bias is tied to another layer: not supported yet"
    if "forward" in vars(module):
        return "its forward was replaced"
    if _has_hooks(module):
        return "it has hooks"
    if has_no_values(weight):
        return "its weight is on the meta device"
    if type(weight) is not nn.Parameter or weight.layout is not torch.strided:
        return f"its weight is a {type(weight).__name__} of layout {weight.layout}"
    if weight.dtype not in _FLOATS:
        return f"its weight is of dtype {weight.dtype}"
    if set(module._parameters) - {"weight", "bias"} or module._buffers or module._modules:
        return "it holds more than a weight and a bias"
    return _embedding_reason(module) if isinstance(module, nn.Embedding) else ""


def _has_hooks(module: nn.Module) -> bool:
    return any(getattr(module, hooks) for hooks in _MODULE_HOOKS) or any(
        getattr(param, hooks, None)
        for param in module._parameters.values()
        for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks")
    )


def _embedding_reason(module: nn.Embedding) -> str:
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, option) not in (None, False):
            return f"the option {option} of nn.Embedding is not supported yet"
    return ""
