"""The examples in docstrings run and print what they say."""

import doctest
import importlib
import pkgutil

import pytest
import torch
from torch import nn

import comera_fx
from comera_fx import OptimizeConfig, RankAdapter, RankConfig, optimize, param_groups


def modules():
    for module in pkgutil.walk_packages(comera_fx.__path__, "comera_fx."):
        yield module.name
    for room in ("passes", "kernels"):
        package = importlib.import_module(f"comera_fx.{room}")
        yield from (m.name for m in pkgutil.iter_modules(package.__path__, f"comera_fx.{room}."))


def setting():
    """What an example may take as given: a user's model, batches and loss."""
    model = optimize(nn.Sequential(nn.Linear(256, 256)), config=OptimizeConfig(init="random"))
    return {
        "torch": torch,
        "comera_fx": comera_fx,
        "optimize": optimize,
        "OptimizeConfig": OptimizeConfig,
        "RankAdapter": RankAdapter,
        "RankConfig": RankConfig,
        "param_groups": param_groups,
        "model": model,
        "batches": [(torch.randn(4, 256), torch.randn(4, 256))],
        "criterion": nn.functional.mse_loss,
    }


@pytest.mark.parametrize("name", sorted(set(modules())))
def test_examples(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    failures = []
    for example in doctest.DocTestFinder().find(module, name):
        example.globs |= setting()
        runner.run(example, out=failures.append)
    assert not failures, "".join(failures)


def test_examples_are_found():
    found = doctest.DocTestFinder().find(importlib.import_module("comera_fx.plan.linear"))
    assert sum(len(test.examples) for test in found) >= 2
