"""load: MODULE:FACTORY leads to a model, or to an error that says what to write."""

import sys

import pytest
import torch
from torch import nn

from comera_fx.errors import ConfigError
from comera_fx.inspect.factory import load

HERE = "tests.inspect.models"


def test_a_model_alone_and_a_model_with_inputs():
    model, example_inputs = load(f"{HERE}:dense")
    assert isinstance(model, nn.Module)
    assert example_inputs is None
    model, example_inputs = load(f"{HERE}:with_inputs")
    assert model(*example_inputs).shape == (2, 7, 5)


def test_a_module_of_the_working_folder_and_a_dotted_name(tmp_path, monkeypatch):
    text = "from torch import nn\nclass Models:\n    @staticmethod\n    def small():\n"
    (tmp_path / "models_of_a_user.py").write_text(text + "        return nn.Linear(2, 3), None\n")
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    try:
        model, example_inputs = load("models_of_a_user:Models.small")
    finally:
        sys.modules.pop("models_of_a_user", None)
    assert (model.in_features, example_inputs) == (2, None)
    assert sys.path == path


def test_a_module_that_does_not_import_itself(tmp_path, monkeypatch):
    (tmp_path / "needs_more.py").write_text("import a_package_that_is_not_there\n")
    (tmp_path / "is_broken.py").write_text("raise RuntimeError('first\\nsecond')\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="module needs_more cannot be imported") as caught:
        load("needs_more:make")
    assert "a_package_that_is_not_there" in str(caught.value)
    with pytest.raises(ConfigError, match="module is_broken cannot be imported") as caught:
        load("is_broken:make")
    assert caught.value.got == "RuntimeError: first"


@pytest.mark.parametrize(
    ("target", "problem", "said"),
    [
        ("", "no factory is named", "MODULE:FACTORY"),
        ("torch.nn", "no factory is named", "comera-fx inspect my_package.my_module:make_model"),
        (":make", "no factory is named", "MODULE:FACTORY"),
        ("torch.nn:", "no factory is named", "MODULE:FACTORY"),
        ("not_there_at_all:make", "the module is not there", "No module named"),
        ("torch.not_there:make", "the module is not there", "No module named"),
        (f"{HERE}:missing", "the factory is not there", "name one of: "),
        (f"{HERE}:dense.missing", "the factory is not there", "write comera-fx inspect"),
        (f"{HERE}:not_callable", "what is named is no factory", "of type int"),
        (f"{HERE}:breaks", f"{HERE}:breaks fails", "RuntimeError: no weights here"),
        (f"{HERE}:a_list", "the factory returns no model", "returned a list"),
        ("torch.nn:Linear", "torch.nn:Linear fails", "TypeError"),
    ],
)
def test_every_fault_has_four_lines(target, problem, said):
    with pytest.raises(ConfigError) as caught:
        load(target)
    lines = str(caught.value).splitlines()
    assert lines[0] == problem
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["got", "expected", "mend"]
    assert said in str(caught.value)


def test_a_tuple_that_is_no_pair(monkeypatch):
    monkeypatch.setattr(torch, "three", lambda: (nn.Identity(), 1, 2), raising=False)
    with pytest.raises(ConfigError, match="returns no model") as caught:
        load("torch:three")
    assert "a tuple of Identity, int, int" in caught.value.got
