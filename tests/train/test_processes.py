"""RankAdapter in many processes: two gloo processes against one, and what is refused.

The processes run this file as a script, with the name of one of ``SCENARIOS``.
"""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from comera_fx.errors import RankError
from comera_fx.modules import TTLinear
from comera_fx.train import RankAdapter, param_groups
from tests.train.process_runs import (
    CUTTING,
    SPEC,
    Run,
    check_alike,
    model_of,
    pair,
    run_processes,
    run_scenario,
    train_alike,
)

# ---- scenarios ----


def equal(rank):
    many, _ = train_alike(rank, steps=12, cuts=1, rank_lr=0.2)
    buffers = many.called.named_module_buffers
    assert not any("rank_weight_threshold" in name for name in buffers)


def equal_to_the_end(rank):
    train_alike(rank)
    _, one = train_alike(rank, steps=120, rank_lr=0.1)
    assert one.adapter.size <= one.adapter.target_size  # so that the rank weights stood still


def single_precision(rank):
    train_alike(rank, dtype=torch.float32, tolerance=2e-3, cuts=1)


def wrapped_later(rank):
    train_alike(rank, late_wrap=True)


def unused_layer(rank):
    train_alike(rank, skips=True, ddp={"find_unused_parameters": True})


def static_graph(rank):
    train_alike(rank, skips=True, ddp={"static_graph": True}, warmup_steps=5)


def bucket_views(rank):
    train_alike(rank, ddp={"gradient_as_bucket_view": True, "bucket_cap_mb": 0.001})


def accumulation(rank):
    for views in (False, True):
        train_alike(rank, micro_batches=3, ddp={"gradient_as_bucket_view": views})


def singular_values(rank):
    """The methods without rank weights: equal weights, whose cores may have other signs."""
    for method in ("proximal", "rounding"):
        many, one = pair(rank, check_processes=True, method=method, target_ratio=0.5, prune_every=5)
        for number in range(50):
            for run in (many, one):
                run.step(number)
            assert many.adapter.ranks == one.adapter.ranks
            for found, wanted in zip(many.model.layers, one.model.layers, strict=True):
                torch.testing.assert_close(
                    found.dense_weight(), wanted.dense_weight(), rtol=1e-6, atol=1e-6
                )
        assert one.adapter.size <= one.adapter.target_size


def resumed(rank):
    """Another run's checkpoint, of smaller ranks, is loaded under DDP."""
    first, _ = train_alike(rank, steps=30)
    saved = copy.deepcopy(
        (first.model.state_dict(), first.optimizer.state_dict(), first.adapter.state_dict())
    )
    many, one = pair(rank, **CUTTING)
    for run in (many, one):
        for part, state in zip((run.model, run.optimizer, run.adapter), saved, strict=True):
            part.load_state_dict(copy.deepcopy(state))
    for number in range(30, 36):
        for run in (many, one):
            run.step(number)
        check_alike(many, one)
    assert many.adapter.size < Run(model_of()).adapter.size


def layer_dies(rank):
    """All ranks of the middle layer die at once; the others train on."""
    warnings.filterwarnings("ignore", "all ranks of a bond")
    for searches in (False, True):
        many, one = pair(rank, ddp={"find_unused_parameters": searches}, prune_every=2)
        for number in range(8):
            for run in (many, one):
                if number == 3:
                    with torch.no_grad():
                        run.model.layers[1].rank_weight_2.fill_(-1.0)
                run.step(number)
            check_alike(many, one)
        assert many.adapter.ranks["layers.1"] == [0, 0, 0]


def hooks(rank):
    """Hooks of one's own, of torch and with a state per bucket go on after cuts."""
    sent = []

    def own(state, bucket):
        sent.append(bucket.buffer().numel())
        return default_hooks.allreduce_hook(None, bucket)

    many, _ = train_alike(rank, hook=own, ddp={"bucket_cap_mb": 100})
    trained = sum(p.numel() for p in many.model.parameters() if p.requires_grad)
    assert sent[0] > sent[-1] == trained
    run = Run(model_of(), rank, **CUTTING)
    run.called._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=4, min_compression_rate=1.1)
    compressed = Run(model_of(), rank, **CUTTING)
    compressed.called.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for number in range(40):
        for each in (run, compressed):
            each.step(number)
    assert "BuiltinCommHook" in run.called._get_ddp_logging_data()["comm_hook"]
    assert run.adapter.size < run.adapter.initial_size > compressed.adapter.size
    assert state.total_numel_after_compression < state.total_numel_before_compression
    assert state.error_dict


def one_objective(rank):
    """In the late stage the processes' losses lag on either side of the size; the mean decides."""
    config = {"target_ratio": 0.5, "early_steps": 1, "rho": 0.1}
    many, one = pair(rank, **config)
    for adapter in (many.adapter, one.adapter):
        adapter.loss(torch.tensor(1.0))
        adapter.step()
    weights = [run.optimizer.param_groups[-1]["params"] for run in (many, one)]
    for own in ((0.1, 4.5), (0.1, 3.1)):  # the size lags by 1, as a loss of 2 does
        losses = [torch.tensor(value, requires_grad=True) for value in (own[rank], sum(own) / 2)]
        results = [
            torch.autograd.grad(run.adapter.loss(loss), [loss, *held])
            for run, loss, held in zip((many, one), losses, weights, strict=True)
        ]
        for found, wanted in zip(*results, strict=True):
            torch.testing.assert_close(found, wanted)
    means = [run.adapter.state_dict()["mean_loss"] for run in (many, one)]
    assert means[0] == pytest.approx(means[1])


def one_not_finite(rank):
    """A loss that is not finite in one process keeps every process from cutting."""
    warnings.filterwarnings("ignore", "the loss of step")
    for skips in (True, False):
        run = Run(model_of(), rank, prune_every=1, patience=1, skip_nonfinite=skips)
        with torch.no_grad():
            run.model.layers[0].rank_weight_2[3] = 0.0
        for bad in (float("nan"), float("inf")):
            run.adapter.loss(torch.tensor(bad if rank == 1 else 1.0))
            run.adapter.step()
            assert run.adapter.ranks["layers.0"] == [4, 8, 4]
        run.adapter.loss(torch.tensor(1.0 + rank))
        run.adapter.step()
        assert run.adapter.ranks["layers.0"] == [4, 7, 4]


def disagreement(rank):
    """One process has lost a rank that the other has not."""
    for check, level in ((True, dist.DebugLevel.OFF), (None, dist.DebugLevel.DETAIL)):
        dist.set_debug_level(level)
        run = Run(model_of(), rank, check_processes=check, prune_every=1, patience=1)
        adapter = run.adapter
        run.step(0)
        before = copy.deepcopy(adapter.ranks)
        if rank == 1:
            with torch.no_grad():
                run.model.layers[1].rank_weight_2[3] = 0.0
        with pytest.raises(RankError, match=r"would cut layer 'layers.1' differently") as caught:
            run.step(1)
        assert "processes [1] differ" in str(caught.value)
        assert adapter.ranks == before


def unclear(rank):
    """Wrappers that are missing, doubled, wrong or of no use."""
    run = Run(model_of(), rank, late_wrap=True)
    other = DistributedDataParallel(run.model)
    with pytest.raises(RankError, match="not clear which wrapper") as caught:
        run.backward(0)
    assert "2 DistributedDataParallel around it" in str(caught.value)
    with pytest.raises(RankError, match="got something else than a wrapper"):
        run.adapter.wrapped(run.model)
    run.adapter.wrapped(run.called)
    del other
    run.step(0)
    with run.called.join(), pytest.raises(RankError, match="as many steps in every process"):
        run.adapter.loss(torch.tensor(1.0))
    model = model_of()
    optimizer = torch.optim.AdamW(param_groups(model, lr=1e-3))
    adapter = RankAdapter(model, optimizer)
    with pytest.raises(RankError, match="not clear which wrapper") as caught:
        adapter.loss(torch.tensor(1.0))
    assert "2 processes, 0 DistributedDataParallel" in str(caught.value)
    with pytest.raises(RankError, match="not clear which wrapper"):
        adapter.wrapped(run.called)
    adapter.wrapped()
    adapter.loss(torch.tensor(1.0))
    part = nn.ModuleList([DistributedDataParallel(TTLinear(SPEC, 16, 16)) for _ in range(2)])
    optimizer = torch.optim.AdamW(param_groups(part, lr=1e-3))
    RankAdapter(part, optimizer).loss(torch.tensor(1.0))


def cannot_follow(rank):
    """What a wrapper may have that cuts would break."""
    core = model_of().layers[0].core_0
    for name, value in (
        ("mixed_precision", object()),
        ("_delay_all_reduce_params", None),
        ("_use_python_reducer", True),
        ("process_group", dist.new_group([rank], use_local_synchronization=True)),
    ):
        model = nn.Sequential(*(DistributedDataParallel(TTLinear(SPEC, 16, 16)) for _ in range(2)))
        core = model[1].module.core_0
        setattr(model[1], name, [core] if value is None else value)
        with pytest.raises(RankError, match="cannot follow this DistributedDataParallel"):
            RankAdapter(model, torch.optim.AdamW(param_groups(model, lr=1e-3)))
        model[1]._use_python_reducer = False
    model = model_of()
    optimizer = torch.optim.AdamW(param_groups(model, lr=1e-3))
    model.layers[0].core_0._in_backward_optimizers = [optimizer]
    wrapped = DistributedDataParallel(model)
    with pytest.raises(RankError, match="cannot follow this DistributedDataParallel"):
        RankAdapter(wrapped, optimizer)
    with warnings.catch_warnings():  # torch deprecates what it is made with
        warnings.simplefilter("ignore")
        from torch.distributed.optim import ZeroRedundancyOptimizer
    model = model_of()
    divided = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    with pytest.raises(RankError, match="optimizer's state is divided"):
        RankAdapter(DistributedDataParallel(model), divided)


def sharded(rank):
    """FSDP 2, HSDP and DTensors are refused, at once or at the first cut."""
    names = ("copies", "parts")
    meshes = [
        init_device_mesh("cpu", (2,)),
        init_device_mesh("cpu", (2, 1), mesh_dim_names=names),
    ]
    for mesh in meshes:
        for parts in (0, 3):
            model = model_of()
            for layer in model.layers[:parts]:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            optimizer = torch.optim.AdamW(param_groups(model, lr=1e-3))
            with pytest.raises(RankError, match="divided among processes") as caught:
                RankAdapter(model, optimizer)
            assert "model of fully_shard" in str(caught.value)
    model = model_of()
    model.layers[1].core_1 = nn.Parameter(distribute_tensor(model.layers[1].core_1, meshes[0]))
    optimizer = torch.optim.AdamW(param_groups(model, lr=1e-3))
    with pytest.raises(RankError, match="divided among processes") as caught:
        RankAdapter(model, optimizer)
    assert "layer 'layers.1' with DTensor parameters" in str(caught.value)
    run = Run(model_of(), prune_every=1)
    fully_shard(run.model, mesh=meshes[0])
    with torch.no_grad():
        run.model.layers[0].rank_weight_2.mul_(0.0)
    ranks = run.adapter.ranks
    run.adapter.loss(torch.tensor(1.0))
    with pytest.raises(RankError, match="divided among processes"):
        run.adapter.step()
    assert run.adapter.ranks == ranks


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        equal,
        equal_to_the_end,
        single_precision,
        wrapped_later,
        unused_layer,
        static_graph,
        bucket_views,
        accumulation,
        singular_values,
        resumed,
        layer_dies,
        hooks,
        one_objective,
        one_not_finite,
        disagreement,
        unclear,
        cannot_follow,
        sharded,
    )
}

SLOW = [name for name in SCENARIOS if name != "equal"]


def test_two_processes_cut_and_train_as_one(tmp_path):
    run_processes(__file__, tmp_path, "equal")


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SLOW)
def test_two_processes_at_length(tmp_path, scenario):
    run_processes(__file__, tmp_path, scenario)


def test_data_parallel_replicas_are_refused():
    model = nn.DataParallel(model_of())
    optimizer = torch.optim.AdamW(param_groups(model, lr=1e-3))
    model.device_ids = [0, 1]
    with pytest.raises(RankError, match="replicas of a DataParallel"):
        RankAdapter(model, optimizer)
    model.device_ids = [0]
    adapter = RankAdapter(model, optimizer)
    assert list(adapter.ranks) == ["layers.0", "layers.1", "layers.2"]


def test_one_process_does_not_communicate(monkeypatch):
    for name in ("all_reduce", "all_gather"):
        monkeypatch.setattr(dist, name, None)
    run = Run(model_of(), **CUTTING)
    for number in range(30):
        run.step(number)
    assert run.adapter.size < run.adapter.initial_size


if __name__ == "__main__":
    run_scenario(SCENARIOS)
