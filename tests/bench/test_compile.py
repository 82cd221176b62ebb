import csv
import json

import pytest
import torch
from torch import nn

from bench import compiled
from bench.compile import SHOWN, main
from bench.compile_time import measure
from bench.compiled import COMERA, VERSIONS, available, check, default_versions, make_trainer
from bench.inner import table, write_table
from bench.tasks import Task, make_task
from bench.workloads import SMALL_TRAINING, TRAINING
from comera_fx.modules import tt_modules

STACK = next(workload for workload in SMALL_TRAINING if workload.name == "stack")
EAGER = ["dense", "tt_per_layer", "tt_shared", "tt_aot_eager"]


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def row(workload, inner, ms, cold):
    version = COMERA + inner if inner else "tt_shared"
    return {
        "workload": workload,
        "version": version,
        "median_ms": ms,
        "cold_s": cold,
        "device": "cpu",
    }


def test_the_whole_script_runs_and_appends_a_row_per_version(tmp_path, capsys):
    path = tmp_path / "rows.csv"
    arguments = ["--small", "--repeats", "2", "--skip-compile-times", "--results", str(path)]
    main([*arguments, "--versions", *EAGER])
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    wanted = [(workload.name, name) for workload in SMALL_TRAINING for name in EAGER]
    assert [(row["workload"], row["version"]) for row in rows] == wanted
    for found in rows:
        low, middle, high = (float(found[f"{name}_ms"]) for name in ("q20", "median", "q80"))
        assert 0 < low <= middle <= high
        assert found["repeats"] == "2"
        assert found["over_inductor"] == found["cold_s"] == ""
    of = {(row["workload"], row["version"]): row for row in rows}
    ours, per_layer = (of["stack", name] for name in ("tt_shared", "tt_per_layer"))
    ratio = float(ours["median_ms"]) / float(per_layer["median_ms"])
    assert float(ours["over_per_layer"]) == pytest.approx(ratio, abs=2e-3)
    assert capsys.readouterr().out.split()[: len(SHOWN)] == list(SHOWN)


def test_compiling_counts_graphs():
    figures = measure(STACK, "tt_aot_eager", "cpu", 0.0)
    assert figures["seconds"] >= 0
    assert figures["graphs"] >= 1
    assert figures["graph_breaks"] == 0


@pytest.mark.parametrize("workload", SMALL_TRAINING, ids=lambda workload: workload.name)
def test_versions_start_at_equal_weights_and_train(workload):
    task = make_task(workload)
    models = [task.in_tt_form(share=share) for share in (False, True)]
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(one, other)
    trainer = make_trainer("tt_per_layer", task)
    losses = [trainer.step() for _ in range(2)]
    assert losses[1] < losses[0]
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def test_dropout_is_what_was_asked_for():
    task = make_task(SMALL_TRAINING[0])
    shares = [
        {module.p for module in model.modules() if isinstance(module, nn.Dropout)}
        for model in (task.dense(), task.dense(0.1), task.in_tt_form(0.1))
    ]
    assert shares == [{0.0}, {0.1}, {0.1}]


def test_other_losses_are_refused(monkeypatch):
    class Wrong(Task):
        def in_tt_form(self, dropout=0.0, *, share=True):
            model = super().in_tt_form(dropout, share=share)
            if share:
                with torch.no_grad():
                    next(tt_modules(model))[1].core_0.mul_(1.5)
            return model

    task = make_task(STACK)
    wrong = Wrong(**vars(task))
    check(["dense", "tt_shared"], task)
    with pytest.raises(AssertionError, match="tt_shared: losses are not the eager version's"):
        check(["dense", "tt_shared"], wrong)


def test_what_has_no_backend_is_left_out(monkeypatch, capsys):
    monkeypatch.setitem(compiled.VERSIONS, "dense", compiled.Kind(is_tt=False, backend="nobody"))
    assert available(["dense", "tt_shared"]) == ["tt_shared"]
    assert "dense is left out: there is no backend 'nobody'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"), [([], "no inner compiler"), (["--small"], "decides nothing")]
)
def test_nothing_runs_for_a_table_that_is_not_to_be_written(more, message, tmp_path):
    path = tmp_path / "rows.csv"
    arguments = ["--versions", "dense", "--write-auto", "--results", str(path), *more]
    with pytest.raises(SystemExit, match=message):
        main(arguments)
    assert not path.exists()


def test_cuda_graphs_are_for_cuda():
    assert set(default_versions("cuda")) - set(default_versions("cpu")) == {COMERA + "cudagraphs"}
    assert "tt_comera_auto" not in default_versions("cuda")
    assert set(default_versions("cpu")) < set(VERSIONS)


def test_small_workloads_are_the_large_ones_made_small():
    networks = {workload.name: workload.network for workload in TRAINING}
    for workload in SMALL_TRAINING:
        assert networks[workload.name] == workload.network
    assert {w.network for w in SMALL_TRAINING} == set(networks.values())


def test_the_fastest_inner_is_taken_and_of_equal_ones_the_one_that_compiles_faster(tmp_path):
    rows = [
        row("a", "", 0.1, None),
        row("a", "eager", 2.00, 1.0),
        row("a", "aot_eager", 1.02, 5.0),
        row("a", "inductor", 1.00, 50.0),
    ]
    assert table(rows)["inner"] == "aot_eager"
    found = json.loads(write_table(rows, "cpu", tmp_path).read_text())
    assert found["device"] == "cpu"
    assert found["steps"] == {"a": {"eager": 2.0, "aot_eager": 1.02, "inductor": 1.0}}
    rows += [
        row("b", "eager", 4.0, 1.0),
        row("b", "aot_eager", 2.0, 5.0),
        row("b", "inductor", 1.0, 50.0),
    ]
    assert table(rows)["inner"] == "inductor"
    assert table([row("a", "aot_eager", 1.0, None), row("a", "eager", 2.0, None)])["inner"] == (
        "aot_eager"
    )


@pytest.mark.parametrize(
    "rows",
    [
        [row("a", "", 1.0, None)],
        [row("a", "eager", 1.0, 1.0), row("b", "inductor", 1.0, 1.0)],
    ],
)
def test_an_inner_that_ran_on_a_part_is_no_basis(rows):
    with pytest.raises(ValueError, match="every inner compiler"):
        table(rows)
