import subprocess
import sys
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from comera_fx import cli
from comera_fx.demo import run
from comera_fx.demo.config import DemoConfig
from comera_fx.lower import calibrate
from comera_fx.plan import plan_linear
from comera_fx.plan.cost import costs_path, measured_model
from comera_fx.plan.draw import plan_svg
from comera_fx.spec import TTSpec

TINY = {
    "steps": 12,
    "batch_size": 4,
    "context": 16,
    "width": 32,
    "num_layers": 1,
    "num_heads": 2,
    "ffn_width": 64,
    "prune_every": 3,
    "held_out_every": 5,
    "held_out_batches": 1,
    "held_out_batch_size": 4,
    "max_files": 40,
}


def invoke(*args: object):
    return CliRunner().invoke(cli.app, [str(arg) for arg in args])


def test_a_bare_command_shows_help():
    result = invoke()
    assert result.exit_code == 0
    assert "Usage" in result.output
    for command in ("demo", "plan"):
        assert command in result.output


def test_help_names_every_option_and_its_default():
    result = invoke("demo", "--help")
    assert result.exit_code == 0
    for option in ("steps", "rank", "target-ratio", "device", "out", "seed", "resume"):
        assert f"--{option}" in result.output
    for default in (DemoConfig.steps, DemoConfig.rank, DemoConfig.target_ratio, DemoConfig.device):
        assert f"[default: ({default})]" in result.output


def test_help_loads_nothing_of_a_run():
    code = (
        "import sys, comera_fx.cli; "
        "print([m for m in sys.modules if m.startswith("
        "('comera_fx.demo.train', 'comera_fx.plan.compare', 'cotengra', 'matplotlib'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_demo_runs_from_the_command_line(tmp_path, monkeypatch):
    real = run.DemoConfig
    monkeypatch.setattr(run, "DemoConfig", lambda **given: real(**{**TINY, **given}))
    result = invoke("demo", "--rank", 4, "--target-ratio", 0.6, "--seed", 3, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert "Held-out loss, 12 steps each" in result.output
    for name in ("report.html", "dense.pt", "optimised.pt", "checkpoint.pt", "results.json"):
        assert (tmp_path / name).exists()


def test_calibrate_says_what_was_measured_and_where_it_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("COMERA_FX_CACHE", str(tmp_path))
    real = calibrate.calibrate
    monkeypatch.setattr(calibrate, "calibrate", lambda device: real(device, seconds=0.02))
    result = invoke("calibrate")
    path = costs_path("cpu")
    model = measured_model("cpu")
    calibrate.forget_plans()
    assert result.exit_code == 0, result.output
    assert result.output.startswith(f"{model.summary()}\nWritten to {path} in ")
    assert path.parent == tmp_path / "comera_fx"


def test_calibrate_refuses_unknown_devices(tmp_path, monkeypatch):
    monkeypatch.setenv("COMERA_FX_CACHE", str(tmp_path))
    result = invoke("calibrate", "--device", "tpu")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[0] == "Error: calibrate does not know the device"
    assert result.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_setting_is_an_error_without_a_traceback(tmp_path):
    result = invoke("demo", "--target-ratio", 2, "--out", tmp_path)
    assert result.exit_code == 2
    assert "Error: the demo's target_ratio is out of range" in result.stderr
    assert "Traceback" not in result.output


def test_the_status_of_a_stopped_run_is_passed_on(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "run_demo", lambda *args, **kwargs: 130)
    assert invoke("demo", "--out", tmp_path).exit_code == 130


LAYER = ("plan", "--in", 768, "--out", 3072)
SPEC = TTSpec("tt", (12, 8, 8), (12, 16, 16), (1, 12, 30, 30, 30, 16, 1))
MODES = ("--modes", "12x8x8:12x16x16")


def test_the_plan_of_a_layer_is_printed():
    result = invoke(*LAYER, "--rank", 30, "--tokens", 512, *MODES)
    assert result.exit_code == 0, result.output
    assert result.output == f"{plan_linear(SPEC, 512, 'time')}\n"


def test_modes_and_settings_have_defaults():
    result = invoke("plan", "--in", 256, "--out", 256)
    assert result.exit_code == 0, result.output
    spec = TTSpec("tt", (8, 8, 4), (4, 8, 8), (1, 8, 32, 32, 32, 8, 1))
    assert result.output == f"{plan_linear(spec, 4096, 'time')}\n"


@pytest.mark.parametrize("objective", ["time", "flops", "memory"])
def test_objective_and_layout_are_taken(objective):
    given = ("--layout", "ttm", "--rank", 5, "--tokens", 64, "--objective", objective)
    result = invoke(*LAYER, *given, *MODES)
    assert result.exit_code == 0, result.output
    spec = TTSpec("ttm", (12, 8, 8), (12, 16, 16), (1, 5, 5, 1))
    assert result.output == f"{plan_linear(spec, 64, objective)}\n"


def test_compare_adds_the_other_ways_to_run_the_layer():
    result = invoke(*LAYER, "--rank", 30, *MODES, "--compare")
    assert result.exit_code == 0, result.output
    lines = [" ".join(line.split()) for line in result.output.splitlines()]
    for start in ("best plan 95", "fixed path 95", "low rank 30 944M", "dense 19.3G 38.7G 100.0%"):
        assert any(line.startswith(start) for line in lines), start
    assert "VJP per core y and each gradient by its own best contraction, nothing shared" in lines


def test_svg_draws_the_plan(tmp_path):
    file = tmp_path / "plan.svg"
    result = invoke(*LAYER, "--rank", 30, "--tokens", 512, *MODES, "--svg", file)
    assert result.exit_code == 0, result.output
    assert result.output.endswith(f"\nPicture: {file}\n")
    drawn = file.read_text(encoding="utf-8")
    assert drawn == plan_svg(plan_linear(SPEC, 512, "time"))
    assert ElementTree.fromstring(drawn).tag == "{http://www.w3.org/2000/svg}svg"


@pytest.mark.parametrize(
    ("given", "problem", "got", "mend"),
    [
        (("--rank", 0), "--rank is out of range", "0", "write --rank 32"),
        (("--tokens", -1), "--tokens is out of range", "-1", "write --tokens 32"),
        (("--in", 0), "--in is out of range", "0", "write --in 32"),
        (("--layout", "cp"), "--layout is unknown", "cp", "write --layout tt"),
        (
            ("--objective", "speed"),
            "PlanConfig.objective is out of range",
            "'speed'",
            "use the default, 'time'",
        ),
        (
            ("--modes", "12x8x:3072"),
            "--modes cannot be read",
            "12x8x:3072",
            "write --modes 12x8x8:12x16x16",
        ),
        (
            ("--modes", "0x768:3072"),
            "--modes cannot be read",
            "0x768:3072",
            "write --modes 12x8x8:12x16x16",
        ),
        (
            ("--modes", "12x8:12x16x16"),
            "--modes are too small for the layer",
            "12x8:12x16x16, which holds 96 -> 3072",
            "give larger modes, or none to have them chosen",
        ),
        (
            ("--modes", f"768{'x1' * 12}:3072"),
            "--modes are too many",
            "13 in modes and 1 out modes",
            "join modes: 2x2x2 to 8",
        ),
        (
            ("--layout", "ttm", "--modes", "96x8:12x16x16"),
            "TTSpec.out_modes is malformed",
            "'2 in_modes, 3 out_modes'",
            "fill the shorter side up with modes of 1",
        ),
    ],
)
def test_bad_input_is_an_error_of_four_lines_and_writes_nothing(
    tmp_path, given, problem, got, mend
):
    file = tmp_path / "plan.svg"
    result = invoke(*LAYER, "--svg", file, *given)
    assert result.exit_code == 2
    lines = result.stderr.splitlines()
    assert lines[:2] == [f"Error: {problem}", f"  got:      {got}"]
    assert lines[2].startswith("  expected: ")
    assert lines[3:] == [f"  mend:     {mend}"]
    assert result.stdout == ""
    assert not file.exists()


@pytest.mark.parametrize("layout", ["tt", "ttm"])
def test_as_many_modes_as_are_allowed_make_a_plan(layout):
    side = "x".join(["2"] * cli.MAX_MODES)
    modes = f"{side}:{side}"
    size = 2**cli.MAX_MODES
    given = ("--rank", 2, "--tokens", 8, "--layout", layout, "--modes", modes, "--objective")
    result = invoke("plan", "--in", size, "--out", size, *given, "flops")
    assert result.exit_code == 0, result.output
    assert result.output.startswith(f"Plan of a {layout} layer {side} -> {side}, ranks 1x2x2x")


def test_a_picture_that_cannot_be_written_is_an_error(tmp_path):
    file = tmp_path / "missing" / "plan.svg"
    result = invoke(*LAYER, "--svg", file)
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        "Error: the picture cannot be written",
        f"  got:      {file}: No such file or directory",
        "  expected: a file in a folder that is there",
        "  mend:     name another with --svg",
    ]
    assert result.stdout == ""


def test_padding_in_a_plan_is_told():
    padded = invoke("plan", "--in", 768, "--out", 768, "--modes", "12x8x8:12x8x9", "--tokens", 16)
    assert "The modes make up 768 to 864: what is more than 768 to 768 is padding" in padded.output
    whole = invoke("plan", "--in", 768, "--out", 768, "--modes", "12x8x8:12x8x8", "--tokens", 16)
    assert "padding, and counted" not in whole.output
