"""Steps of a loss that is not finite leave no trace, whatever the optimizer."""

import copy
import gc
import io
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from comera_fx.config import RankConfig
from comera_fx.errors import RankError
from comera_fx.train import RankAdapter, param_groups
from comera_fx.train.finite import FiniteSteps
from tests.train.steps import INF, NAN, batch, everything, quiet, small_model, train

OPTIMIZERS = {
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2, weight_decay=0.1, foreach=False),
    "adamw foreach": lambda ps: torch.optim.AdamW(ps, lr=1e-2, weight_decay=0.1, foreach=True),
    "adamw fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, weight_decay=0.1, fused=True),
    "amsgrad": lambda ps: torch.optim.Adam(ps, lr=1e-2, amsgrad=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, weight_decay=0.1, foreach=False),
    "sgd foreach": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, nesterov=True),
    "sgd fused": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, fused=True),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-3, momentum=0.9),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=1e-2, lr_decay=0.1),
    "nadam": lambda ps: torch.optim.NAdam(ps, lr=1e-3),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=1e-2),
}


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_bad_batch_in_the_middle_leaves_no_trace(name, bad):
    ends = []
    for steps in ([0, 1, 2, bad, 3, 4], [0, 1, 2, 3, 4]):
        model = small_model()
        optimizer = OPTIMIZERS[name](model.parameters())
        finite = FiniteSteps(optimizer)
        with quiet() if bad in steps else warnings.catch_warnings():
            assert train(model, [optimizer], finite, steps) == [step is bad for step in steps]
        ends.append(everything(model, optimizer))
    assert ends[0] == ends[1]


def test_without_it_a_bad_batch_is_the_end_of_a_model():
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters())
    finite = FiniteSteps(optimizer, enabled=False)
    assert train(model, [optimizer], finite, [0, NAN, 1]) == [False] * 3
    assert torch.isnan(model[2].weight).all()
    assert finite.num_skipped == 0


@pytest.mark.parametrize("method", ["comera", "proximal", "rounding"])
def test_without_it_the_next_cut_says_what_cores_have_been_lost(method):
    """A loss that is not finite only leaves out the cut; so would every one that follows."""
    model = small_model()
    optimizer = torch.optim.SGD(param_groups(model, lr=1e-3))
    config = RankConfig(method=method, prune_every=1, skip_nonfinite=False)
    adapter = RankAdapter(model, optimizer, config)
    adapter.loss(torch.tensor(NAN))
    adapter.step()
    x, y = batch(0)
    adapter.loss(nn.functional.mse_loss(model(x), y) * NAN).backward()
    optimizer.step()
    with pytest.raises(RankError, match="layer '0' has numbers that are not finite"):
        adapter.step()


def test_ranks_shrink_to_the_same_numbers_around_bad_batches():
    ends = []
    good = list(range(60))
    for steps in ([0, NAN, *good[1:30], INF, NAN, *good[30:]], good):
        model = small_model()
        optimizer = torch.optim.AdamW(param_groups(model, lr=3e-3, rank_lr=3e-2))
        config = RankConfig(
            method="comera", target_ratio=0.5, early_steps=10, rho=0.5, prune_every=5
        )
        adapter = RankAdapter(model, optimizer, config)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*the step is skipped")
            for step in steps:
                x, y = batch(step)
                task = nn.functional.mse_loss(model(x), y)
                optimizer.zero_grad()
                adapter.loss(task).backward()
                optimizer.step()
                adapter.step()
        assert adapter.num_skipped == len(steps) - len(good)
        assert adapter.size <= adapter.target_size
        ends.append(everything(model, optimizer) + repr(adapter.history))
    assert ends[0] == ends[1]


def test_one_bad_loss_of_several_skips_their_common_step():
    ends = []
    for steps in ([0, 1, 2, NAN, NAN, 3, 4, 5], [0, 1, 4, 5]):
        model = small_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with quiet() if NAN in steps else warnings.catch_warnings():
            skipped = train(model, [optimizer], FiniteSteps(optimizer), steps, accumulate=2)
        assert skipped == ([False, True, True, False] if NAN in steps else [False] * 2)
        ends.append(everything(model, optimizer))
    assert ends[0] == ends[1]


def test_several_optimizers_skip_together_and_it_counts_once():
    ends = []
    for steps in ([0, NAN, 1], [0, 1]):
        model = small_model()
        first = torch.optim.AdamW(model[0].parameters(), lr=1e-2)
        second = torch.optim.SGD(model[2].parameters(), lr=1e-2, momentum=0.9)
        finite = FiniteSteps([first, second])
        with quiet() if NAN in steps else warnings.catch_warnings():
            train(model, [first, second], finite, steps)
        assert finite.num_skipped == len(steps) - 2
        ends.append(everything(model, first, second))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("as_keyword", [False, True])
def test_losses_of_a_closure_count(as_keyword):
    ends = []
    for steps in ([0, 1, NAN, 2], [0, 1, 2]):
        model = small_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        finite = FiniteSteps(optimizer)
        with quiet() if NAN in steps else warnings.catch_warnings():
            for step in steps:
                x, y = batch(step)

                def closure(model=model, optimizer=optimizer, finite=finite, x=x, y=y):
                    optimizer.zero_grad()
                    loss = nn.functional.mse_loss(model(x), y)
                    finite.note(loss)
                    loss.backward()
                    return loss

                loss = optimizer.step(closure=closure) if as_keyword else optimizer.step(closure)
                assert bool(torch.isfinite(loss)) != finite.ended_step()
        ends.append(everything(model, optimizer))
    assert ends[0] == ends[1]


def test_a_scheduler_goes_on_and_does_not_warn():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    finite = FiniteSteps(optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    with quiet() as caught:
        train(model, [optimizer], finite, [NAN])
        scheduler.step()
        train(model, [optimizer], finite, [0])
        scheduler.step()
    assert len(caught) == 1
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.025)


def test_warnings_come_with_the_first_the_tenth_and_the_hundredth_of_a_streak():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    finite = FiniteSteps(optimizer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(model, [optimizer], finite, [0, NAN, 1, *[NAN] * 105, 2, NAN])
    told = [str(warning.message) for warning in caught]
    assert [text.partition(", as")[0] for text in told] == [
        "the loss of step 2 is not finite: the step is skipped.",
        "the loss of step 4 is not finite: the step is skipped.",
        "10 steps in a row were skipped, up to step 13",
        "100 steps in a row were skipped, up to step 103",
        "the loss of step 110 is not finite: the step is skipped.",
    ]
    assert "Go back to a checkpoint and lower the learning rate" in told[2]
    assert (finite.num_steps, finite.num_skipped, finite.in_a_row) == (110, 107, 1)


def step_of(optimizer, finite, model, how):
    """A step of a loss that is not finite; the line that calls ``step`` ends with "here"."""
    if how == "scheduled":
        torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)

    def closure():
        loss = model(batch(NAN)[0]).sum()
        finite.note(loss)
        return loss

    if how == "closure":
        optimizer.step(closure)  # here
    elif how == "never":
        closure()
        finite.ended_step()  # here
    else:
        closure()
        optimizer.step()  # here


@pytest.mark.parametrize("how", ["plain", "scheduled", "closure", "never"])
def test_warnings_name_the_line_that_takes_the_step(how):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with quiet() as caught:
        step_of(optimizer, FiniteSteps(optimizer), model, how)
    lines = Path(__file__).read_text().splitlines()
    assert [warning.filename for warning in caught] == [__file__]
    assert lines[caught[0].lineno - 1].endswith("# here")


def test_counts_are_saved_and_resumed():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    finite = FiniteSteps(optimizer)
    with quiet():
        train(model, [optimizer], finite, [0, NAN])
    again = FiniteSteps(optimizer)
    again.load_state_dict(finite.state_dict())
    assert again.state_dict() == {"num_steps": 2, "num_skipped": 1, "in_a_row": 1}


def test_a_step_without_ended_step_does_not_skip_all_that_follow():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    finite = FiniteSteps(optimizer)
    finite.note(torch.tensor([1.0, NAN]))
    with quiet():
        optimizer.step()
    before = everything(model)
    finite.note(torch.tensor(1.0))
    model(batch(0)[0]).sum().backward()
    optimizer.step()
    assert everything(model) != before


def test_hooks_go_with_their_owner_and_keep_nothing_alive():
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    finite = FiniteSteps(optimizer)
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    del finite  # at once: there is no cycle for the collector to find
    assert not optimizer._optimizer_step_pre_hooks
    finite = FiniteSteps(optimizer)
    del optimizer, model
    gc.collect()
    finite.note(torch.tensor(NAN))
    with quiet():
        assert finite.ended_step()


def test_watched_optimizers_can_be_copied_and_pickled():
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    finite = FiniteSteps(optimizer)
    torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    train(model, [optimizer], finite, [0, 1])
    stored = io.BytesIO()
    torch.save((model, optimizer), stored)
    stored.seek(0)
    for model2, optimizer2 in (
        copy.deepcopy((model, optimizer)),
        torch.load(stored, weights_only=False),
    ):
        finite.note(torch.tensor(NAN))  # of no concern to the copy
        model2(batch(2)[0]).sum().backward()
        before = everything(model2)
        optimizer2.step()
        assert everything(model2) != before


def test_a_copy_watches_the_copied_optimizer():
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    finite = FiniteSteps(optimizer)
    model2, optimizer2, finite2 = copy.deepcopy((model, optimizer, finite))
    del model, optimizer, finite
    before = everything(model2)
    with quiet():
        assert train(model2, [optimizer2], finite2, [NAN]) == [True]
    assert everything(model2) == before


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")
def test_compiled_steps_skip_too():
    ends = []
    for steps in ([0, 1, NAN, 2], [0, 1, 2]):
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        finite = FiniteSteps(optimizer)
        compiled = torch.compile(optimizer.step, backend="eager")
        with quiet() if NAN in steps else warnings.catch_warnings():
            for step in steps:
                optimizer.zero_grad()
                x, y = batch(step)
                loss = nn.functional.mse_loss(model(x), y)
                finite.note(loss)
                loss.backward()
                compiled()
                finite.ended_step()
        ends.append(everything(model, optimizer))
    assert ends[0] == ends[1]


@pytest.mark.parametrize("wrong", [None, [None], nn.Linear(1, 1)])
def test_what_is_no_optimizer_is_refused(wrong):
    with pytest.raises(RankError, match="FiniteSteps watches optimizers") as caught:
        FiniteSteps(wrong)
    assert len(str(caught.value).splitlines()) == 4


@pytest.mark.parametrize("enabled", [True, False])
def test_a_loss_that_is_a_number_is_refused(enabled):
    finite = FiniteSteps(torch.optim.SGD([torch.zeros(1)], lr=0.1), enabled=enabled)
    with pytest.raises(RankError) as caught:
        finite.note(5.0)
    assert str(caught.value) == (
        "FiniteSteps.note needs losses\n"
        "  got:      float\n"
        "  expected: a tensor\n"
        "  mend:     note the loss itself, before loss.item()"
    )


CODE = """
import sys, warnings
import torch
import torch.distributed as dist
from comera_fx.train.finite import FiniteSteps

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
weight = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([weight], lr=0.5)
class Alone:
    group = None


finite = FiniteSteps(optimizer, processes=Alone() if sys.argv[3] == "alone" else None)
warnings.simplefilter("ignore")
skipped = []
for step in range(3):
    weight.grad = torch.ones(1)
    finite.note(torch.tensor(float("nan") if (rank, step) == (1, 1) else 1.0))
    optimizer.step()
    skipped.append(finite.ended_step())
dist.destroy_process_group()
print(skipped, weight.item())
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["together", "alone"])
def test_processes_that_train_one_model_skip_together(tmp_path, how):
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", CODE, str(rank), str(tmp_path / "store"), how],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    first, second = (run.communicate(timeout=120)[0].strip() for run in runs)
    assert second == "[False, True, False] 0.0"
    assert first == (second if how == "together" else "[False, False, False] -0.5")
