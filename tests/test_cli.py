import subprocess
import sys

from typer.testing import CliRunner

from comera_fx import cli
from comera_fx.demo import run
from comera_fx.demo.config import DemoConfig

TINY = {
    "steps": 12,
    "batch_size": 4,
    "context": 16,
    "width": 32,
    "num_layers": 1,
    "num_heads": 2,
    "ffn_width": 64,
    "rank_lr": 0.2,
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
    assert "demo" in result.output


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
        "print([m for m in sys.modules if m.startswith(('comera_fx.demo.train', 'matplotlib'))])"
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


def test_a_wrong_setting_is_an_error_without_a_traceback(tmp_path):
    result = invoke("demo", "--target-ratio", 2, "--out", tmp_path)
    assert result.exit_code == 2
    assert "Error: the demo's target_ratio is out of range" in result.stderr
    assert "Traceback" not in result.output


def test_the_status_of_a_stopped_run_is_passed_on(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "run_demo", lambda *args, **kwargs: 130)
    assert invoke("demo", "--out", tmp_path).exit_code == 130
