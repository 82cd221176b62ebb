import io
import json
import re
import signal

import pytest
import torch
from rich.console import Console

from comera_fx.demo import run
from comera_fx.demo.results import rank_range
from comera_fx.demo.train import Race
from comera_fx.errors import ConfigError


@pytest.fixture
def console() -> Console:
    return Console(width=80, record=True, file=io.StringIO())


@pytest.fixture
def settings(tiny, corpus, monkeypatch):
    monkeypatch.setattr(run, "load_corpus", lambda config: corpus)
    return tiny.to_dict()


def interrupt_at(step: int, number: int, monkeypatch) -> None:
    """Send this process a signal in the middle of a step."""
    advance = Race.advance

    def interrupted(race: Race) -> None:
        if len(race.dense.losses) == step:
            signal.raise_signal(number)
        advance(race)

    monkeypatch.setattr(Race, "advance", interrupted)


def test_a_run_leaves_table_page_weights_and_results(settings, console, tmp_path):
    assert run.run_demo(settings, tmp_path, console=console) == 0
    shown = console.export_text()
    for row in ("Parameters", "Training step, median", "Held-out loss, 24 steps each"):
        assert row in shown
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    assert results["dense_bytes"] == (tmp_path / "dense.pt").stat().st_size
    assert results["optimised_bytes"] == (tmp_path / "optimised.pt").stat().st_size
    assert results["end_layer_params"] < results["start_layer_params"]
    assert rank_range(results["end_ranks"]) in shown
    weights = torch.load(tmp_path / "optimised.pt", weights_only=True)
    held = sum(w.numel() for name, w in weights.items() if "threshold" not in name)
    assert held == results["optimised_params"]


def test_the_page_needs_nothing_but_itself(settings, console, tmp_path):
    run.run_demo(settings, tmp_path, console=console)
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == page.count("</svg>") == 5
    assert not re.search(r"<script|<link|<img|src=|href=\"(?!#)|url\((?!#)|@import", page)
    for text in ("Held-out loss, 24 steps each", "blocks.0.qkv", "target_ratio"):
        assert text in page


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_a_checkpoint_that_goes_on_to_the_same_numbers(
    number, settings, console, tmp_path, monkeypatch
):
    run.run_demo(settings, tmp_path / "whole", console=console)
    with monkeypatch.context() as patch:
        interrupt_at(7, number, patch)
        assert run.run_demo(settings, tmp_path, console=console) == 128 + number
    assert "Stopped. It goes on with: comera-fx demo --resume" in console.export_text()
    assert len(run.read_checkpoint(tmp_path / "checkpoint.pt")["dense"]["losses"]) == 8
    assert not (tmp_path / "report.html").exists()

    assert run.run_demo({}, tmp_path, resume=True, console=console) == 0
    whole, resumed = (
        json.loads((folder / "results.json").read_text())["results"]
        for folder in (tmp_path / "whole", tmp_path)
    )
    for key in ("dense_loss", "equal_steps_loss", "dense_params", "start_ranks"):
        assert resumed[key] == whole[key]


def test_handlers_of_the_caller_are_put_back(settings, console, tmp_path):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    run.run_demo(settings, tmp_path, console=console)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_a_second_signal_stops_at_once():
    with run.StopRequest() as stop:
        signal.raise_signal(signal.SIGTERM)
        assert stop.signal == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_checkpoints_are_written_on_the_way(settings, console, tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(run, "write_checkpoint", lambda race, path: written.append(path))
    run.run_demo({**settings, "checkpoint_seconds": 0.0}, tmp_path, console=console)
    assert len(written) > settings["steps"]


def test_a_failed_write_keeps_the_old_checkpoint(tiny, corpus, tmp_path, monkeypatch):
    path = tmp_path / "checkpoint.pt"
    race = Race(tiny, corpus)
    run.write_checkpoint(race, path)
    old = path.read_bytes()

    def broken(state, target):
        target.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", broken)
    with pytest.raises(OSError, match="disk full"):
        run.write_checkpoint(race, path)
    assert path.read_bytes() == old


def test_settings_of_the_resumed_run_win_and_say_so(settings, console, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_at(2, signal.SIGINT, patch)
        run.run_demo(settings, tmp_path, console=console)
    run.run_demo({"rank": 2}, tmp_path, resume=True, console=console)
    shown = console.export_text()
    assert "Note: some settings differ from those of the run that is resumed" in shown
    assert "got:      rank=2" in shown
    saved = json.loads((tmp_path / "results.json").read_text())["config"]
    assert saved == settings


def test_nothing_to_resume_is_an_error(settings, console, tmp_path):
    with pytest.raises(ConfigError, match="there is no run to resume"):
        run.run_demo(settings, tmp_path, resume=True, console=console)


def test_a_file_that_is_no_checkpoint_is_an_error(tmp_path):
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(b"not a checkpoint")
    with pytest.raises(ConfigError, match="not a checkpoint that this version of the demo"):
        run.read_checkpoint(path)
    torch.save({"format": 0}, path)
    with pytest.raises(ConfigError, match="got:      format 0"):
        run.read_checkpoint(path)


def test_the_terminal_shows_progress(settings, tmp_path):
    console = Console(width=80, record=True, force_terminal=True, file=io.StringIO())
    run.run_demo(settings, tmp_path, console=console)
    assert "Held-out loss, 24 steps each" in console.export_text()


def test_a_stopped_run_is_not_overwritten(settings, console, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_at(3, signal.SIGINT, patch)
        run.run_demo(settings, tmp_path, console=console)
    stopped = (tmp_path / "checkpoint.pt").read_bytes()
    with pytest.raises(ConfigError, match="there is a stopped run in the output folder"):
        run.run_demo(settings, tmp_path, console=console)
    assert (tmp_path / "checkpoint.pt").read_bytes() == stopped


def test_an_output_folder_that_cannot_be_made_is_said_before_any_work(settings, console, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="output folder cannot be made"):
        run.run_demo(settings, tmp_path / "file", console=console)


def test_a_missed_size_target_is_said(settings, console, tmp_path):
    run.run_demo({**settings, "adapt_after": 100}, tmp_path, console=console)
    assert "The size target, 0.58 of the start, was not met" in console.export_text()
