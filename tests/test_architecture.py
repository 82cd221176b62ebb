"""Imports only point down the stack, and packaging lists every package."""

import ast
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "comera_fx": ROOT / "comera_fx",
    "comera_fx.passes": ROOT / "passes",
    "comera_fx.kernels": ROOT / "kernels",
}
PACKAGE = "__init__"  # the room of names that `from comera_fx import name` finds
LAYERS = [  # lowest first; rooms on one line never import one another
    {"errors"},
    {"config", "lazy", "compiled_code", "op_inputs"},
    {"spec", "balance"},
    {"kernels", "tt", "shapes"},
    {"plan"},
    {"lower"},
    {"ops"},
    {"tt_module"},
    {"share"},
    {"modules", "replay"},
    {"candidates", "measure", "sharing"},
    {"capture", "passes", "write_back", "train", "policy", "layer_report"},
    {"report", "io", "lowering"},
    {"inspect"},
    {"backend"},
    {"api"},
    {PACKAGE},
    {"demo"},
    {"cli"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def room(module: str) -> str | None:
    """The room a dotted name lies in, ``None`` outside the package."""
    package, *parts = module.split(".")
    if package != "comera_fx":
        return None
    return parts[0] if parts and parts[0] in LEVEL else PACKAGE


def rooms_of_import(node: ast.Import | ast.ImportFrom) -> set[str | None]:
    if isinstance(node, ast.Import):
        return {room(alias.name) for alias in node.names}
    if node.module == "comera_fx":
        return {room(f"comera_fx.{alias.name}") for alias in node.names}
    return {room(node.module or "")}


def faults_of(path: Path, here: str) -> Iterator[str]:
    if here not in LEVEL:
        yield f"LAYERS does not know {here}"
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield f"relative import in line {node.lineno}"
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for there in sorted(rooms_of_import(node) - {None, here}):
                if LEVEL[there] >= LEVEL[here]:
                    yield f"{here} imports {there} in line {node.lineno}"


def wrong_imports(folders: dict[str, Path]) -> list[str]:
    """One line per import that does not point down or is relative, and per unknown room."""
    wrong = []
    for package, folder in folders.items():
        for path in sorted(folder.rglob("*.py")):
            module = [*package.split("."), *path.relative_to(folder).with_suffix("").parts]
            wrong += [f"{'/'.join(module)}.py: {fault}" for fault in faults_of(path, module[1])]
    return wrong


def test_imports_point_down_the_layers():
    wrong = wrong_imports(FOLDERS)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("place", "line", "fault"),
    [
        ("comera_fx/tt.py", "import comera_fx.plan", "tt imports plan in line 1"),
        (
            "comera_fx/tt.py",
            "from comera_fx.shapes import choose_modes",
            "tt imports shapes in line 1",
        ),
        ("comera_fx/plan/deep/cost.py", "from comera_fx import ops", "plan imports ops in line 1"),
        (
            "comera_fx/plan/cost.py",
            "from comera_fx import optimize",
            "plan imports __init__ in line 1",
        ),
        ("comera_fx/ops.py", "import torch, comera_fx", "ops imports __init__ in line 1"),
        (
            "comera_fx/ops.py",
            "def f():\n    import comera_fx.modules",
            "ops imports modules in line 2",
        ),
        (
            "passes/fuse.py",
            "from comera_fx.train.ranks import RankAdapter",
            "passes imports train in line 1",
        ),
        (
            "kernels/rows.py",
            "from comera_fx.lower import choose",
            "kernels imports lower in line 1",
        ),
        ("comera_fx/tt.py", "from . import spec", "relative import in line 1"),
        ("comera_fx/utils.py", "import torch", "LAYERS does not know utils"),
        ("passes/fuse.py", "from comera_fx.passes.match import f\nfrom comera_fx import ops", None),
        ("comera_fx/__init__.py", "from comera_fx.api import optimize", None),
        ("comera_fx/demo/run.py", "from comera_fx import optimize", None),
    ],
)
def test_a_wrong_import_is_found(tmp_path, place, line, fault):
    for name in ("comera_fx", "passes", "kernels"):
        (tmp_path / name).mkdir()
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).write_text(f"{line}\n")
    found = wrong_imports({package: tmp_path / folder.name for package, folder in FOLDERS.items()})
    assert [text.split(": ", 1)[1] for text in found] == ([] if fault is None else [fault])


def test_every_package_is_shipped():
    on_disk = {
        ".".join([package, *init.parent.relative_to(folder).parts])
        for package, folder in FOLDERS.items()
        for init in folder.rglob("__init__.py")
    }
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert on_disk == set(listed)


def test_every_folder_with_code_is_a_package():
    folders = {path.parent for folder in FOLDERS.values() for path in folder.rglob("*.py")}
    assert not [folder for folder in folders if not (folder / "__init__.py").exists()]
