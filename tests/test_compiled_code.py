"""Compiled code is dropped for the parameters that it reads, and for no others."""

import gc
import subprocess
import sys
import types
import weakref

import pytest
import torch
from torch import nn
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

from comera_fx import compiled_code
from comera_fx.compiled_code import forget_code, note_code
from comera_fx.modules import TTLinear
from comera_fx.spec import TTSpec

SPEC = TTSpec("tt", (2, 4), (4, 2), (1, 2, 4, 2, 1))


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def noting(gm, example_inputs):
    note_code([x for x in example_inputs if isinstance(x, nn.Parameter)])
    return gm.forward


def reader(layer):
    """A compiled function of its own code that reads a layer."""

    def read(x):
        return layer(x)

    read = types.FunctionType(
        read.__code__.replace(), read.__globals__, "read", None, read.__closure__
    )
    return read, torch.compile(read, backend=noting, fullgraph=True)


def num_versions(function):
    return len(_debug_get_cache_entry_list(function.__code__))


def test_code_that_reads_a_parameter_is_dropped():
    layers = [TTLinear(SPEC, 8, 8) for _ in range(2)]
    (first, run_first), (second, run_second) = (reader(layer) for layer in layers)
    # Equal code, which must not pass for the same.
    assert first.__code__ == second.__code__
    assert first.__code__ is not second.__code__
    for run in (run_first, run_second):
        run(torch.ones(2, 8))
    forget_code([layers[1].cores[0]])
    assert (num_versions(first), num_versions(second)) == (1, 0)
    run_second(torch.ones(2, 8))
    forget_code(layers[0].parameters())
    assert (num_versions(first), num_versions(second)) == (0, 1)


def test_nothing_is_dropped_for_no_parameters():
    layer = TTLinear(SPEC, 8, 8)
    read, run = reader(layer)
    run(torch.ones(2, 8))
    forget_code([])
    assert num_versions(read) == 1


def test_code_of_another_backend_is_dropped_where_it_reads_cores():
    layer, dense = TTLinear(SPEC, 8, 8), nn.Linear(8, 8)

    def read(x):
        return layer(x)

    def read_dense(x):
        return dense(x)

    for function in (read, read_dense):
        torch.compile(function, backend="eager", fullgraph=True)(torch.ones(2, 8))
    forget_code(layer.parameters())
    assert (num_versions(read), num_versions(read_dense)) == (0, 1)


def test_outside_of_a_compile_nothing_is_noted():
    parameter = nn.Parameter(torch.ones(2))
    note_code([parameter])
    assert parameter not in compiled_code._codes
    forget_code([parameter])


def test_neither_parameters_nor_code_are_kept_alive():
    layer = TTLinear(SPEC, 8, 8)
    read, run = reader(layer)
    run(torch.ones(2, 8))
    held = [weakref.ref(layer.cores[0]), weakref.ref(read.__code__)]
    assert layer.cores[0] in compiled_code._codes
    torch._dynamo.reset()
    del layer, read, run
    gc.collect()
    assert [reference() for reference in held] == [None, None]


def test_dynamo_is_not_imported_where_nothing_was_compiled():
    program = (
        "import sys, torch; from comera_fx.compiled_code import forget_code; "
        "forget_code([torch.nn.Parameter(torch.ones(2))]); "
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
