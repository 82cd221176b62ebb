"""The compilers that take over a planned graph."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, cast, get_args

from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

from comera_fx.backend.decompositions import faster_on_cpu
from comera_fx.backend.operators import boxed
from comera_fx.backend.options import Inner, Options
from comera_fx.backend.partition import PartitionByMemory, partition_in_order
from comera_fx.errors import ConfigError

FALLBACK: dict[str, Inner] = {"cpu": "aot_eager", "cuda": "inductor"}
TABLES = Path(__file__).parents[1]
"""Folder of the tables ``inner_<device type>.json``."""
Compiled = Callable[..., Any]


def compile_graph(gm: fx.GraphModule, example_inputs: Sequence[Any], options: Options) -> Compiled:
    """Compile a planned graph, forward and backward.

    Args:
        gm: The graph; it holds no operator of ours.
        example_inputs: What it takes.
        options: Those of the backend.

    Raises:
        ConfigError: If the inner compiler does not run on the device.
    """
    device_type = device_type_of(example_inputs)
    inner = best_inner(device_type) if options.inner == "auto" else options.inner
    if inner == "cudagraphs" and device_type != "cuda":
        raise ConfigError(
            "inner='cudagraphs' needs a CUDA device",
            got=f"inputs on {device_type}",
            expected="inputs and parameters on cuda",
            mend="leave inner out, or move the model",
        )
    compilers: dict[str, Callable[..., Compiled]] = {
        "eager": _eager,
        "aot_eager": partial(_operators, fallback_random=options.fallback_random),
        "inductor": partial(_inductor, mode=options.mode, fallback_random=options.fallback_random),
        "cudagraphs": _cudagraphs,
    }
    return compilers[inner](gm, list(example_inputs))


def device_type_of(example_inputs: Sequence[Any]) -> str:
    """Return the type of device that a graph runs on."""
    types = {x.device.type for x in example_inputs if isinstance(x, Tensor)}
    return "cuda" if "cuda" in types else "cpu"


@lru_cache(maxsize=8)
def best_inner(device_type: str) -> Inner:
    """Return what ``inner="auto"`` takes on a device.

    From the table that ``python -m bench.compile --write-auto`` wrote for its type; without one,
    "inductor" on CUDA and "aot_eager" elsewhere.

    Raises:
        ConfigError: If the table names none.
    """
    path = TABLES / f"inner_{device_type}.json"
    if not path.exists():
        return FALLBACK.get(device_type, "aot_eager")
    table = json.loads(path.read_text())
    inner: Inner = table.get("inner", "")
    if inner not in get_args(Inner)[1:]:
        raise ConfigError(
            f"{path.name} names no inner compiler",
            got=repr(inner),
            expected=f"one of {', '.join(get_args(Inner)[1:])}",
            mend="write the table anew: python -m bench.compile --write-auto",
        )
    return inner


def count(name: str, number: int = 1) -> None:
    """Add to ``torch._dynamo.utils.counters["comera_fx"]``."""
    counters["comera_fx"][name] += number


def _eager(gm: fx.GraphModule, example_inputs: list[Any]) -> Compiled:
    count("forward_graphs")
    return gm.forward


def _operators(gm: fx.GraphModule, example_inputs: list[Any], *, fallback_random: bool) -> Compiled:
    def counted(kind: str) -> Callable[..., Compiled]:
        def compile_one(part: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
            count(f"{kind}_graphs")
            return boxed(part, inputs, is_backward=kind == "backward")

        return compile_one

    backend = aot_autograd(
        fw_compiler=counted("forward"),
        bw_compiler=counted("backward"),
        inference_compiler=counted("inference"),
        partition_fn=partition_in_order,
        keep_inference_input_mutations=True,
        decompositions={} if fallback_random else faster_on_cpu(),
    )
    compiled: Compiled = backend(gm, example_inputs)
    return compiled


def _inductor(
    gm: fx.GraphModule, example_inputs: list[Any], *, mode: str, fallback_random: bool
) -> Compiled:
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def counted(part: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        kind = "backward" if kwargs.get("is_backward") else "forward"
        count("inference_graphs" if kwargs.get("is_inference") else f"{kind}_graphs")
        return compile_fx_inner(part, inputs, **kwargs)

    patches = {} if mode == "default" else dict(list_mode_options(mode))
    patches["fallback_random"] = fallback_random
    patches["custom_partitioner_fn"] = PartitionByMemory()
    hits = counters["aot_autograd"]["autograd_cache_hit"]
    compiled: Any = compile_fx(gm, example_inputs, inner_compile=counted, config_patches=patches)
    if counters["aot_autograd"]["autograd_cache_hit"] > hits:
        count("cached_graphs")
    return cast(Compiled, compiled)


def _cudagraphs(gm: fx.GraphModule, example_inputs: list[Any]) -> Compiled:
    from torch._dynamo.backends.cudagraphs import CudagraphsBackend

    count("forward_graphs")
    compiled: Compiled = CudagraphsBackend()(gm, example_inputs)
    return compiled
