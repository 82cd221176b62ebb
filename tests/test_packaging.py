"""What importing costs, and that what is built installs and works outside the checkout."""

import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = ("numba", "rich", "typer", "matplotlib", "safetensors", "transformers")

IMPORTS = f"""
import sys

import comera_fx
import torch

model = torch.nn.Sequential(torch.nn.Embedding(512, 64), torch.nn.Linear(64, 256))
ids = torch.arange(8)
config = comera_fx.OptimizeConfig(max_rank=4, only_if_faster=False)
small = comera_fx.optimize(model, (ids,), config=config)
assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in model.parameters()) / 4
small(ids).sum().backward()
repr(comera_fx.explain(small))
print(sorted(set({HEAVY!r}) & set(sys.modules)))
"""

INSTALLED = """
from pathlib import Path

import comera_fx
import comera_fx.kernels
import comera_fx.passes.pipeline

folder = Path(comera_fx.__file__).parent
print(folder.parent)
print(Path(comera_fx.kernels.__file__).parent.relative_to(folder))
print(Path(comera_fx.passes.pipeline.__file__).relative_to(folder))
print((folder / "py.typed").exists())
print(comera_fx.__version__)
"""


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=environment or None, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_import_and_optimize_load_no_heavy_package(tmp_path):
    assert run(sys.executable, "-c", IMPORTS, cwd=tmp_path) == "[]\n"


def copy_of_the_sources(target: Path) -> Path:
    """A copy of what git tracks or would track: no caches and no build of before can leak in."""
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target / name)
    return target


@pytest.mark.slow
def test_sdist_and_wheel_install_outside_the_checkout(tmp_path):
    sources = copy_of_the_sources(tmp_path / "sources")
    built, installed = tmp_path / "dist", tmp_path / "installed"
    # With no further flag, the wheel is built from the sdist: so this checks both.
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", built, cwd=sources)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert {path.name for path in built.iterdir()} == {
        f"comera_fx-{version}.tar.gz",
        f"comera_fx-{version}-py3-none-any.whl",
    }
    shutil.rmtree(sources)
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet"]
    run(*pip, "--target", installed, next(built.glob("*.whl")), cwd=tmp_path)
    said = run(sys.executable, "-c", INSTALLED, cwd=tmp_path, PYTHONPATH=str(installed))
    assert said.splitlines() == [str(installed), "kernels", "passes/pipeline.py", "True", version]
