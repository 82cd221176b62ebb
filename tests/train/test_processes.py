"""RankAdapter in many processes: two gloo processes against one, and what is refused.

The processes run this file as a script, with the name of one of ``SCENARIOS``.
"""

import contextlib
import copy
import itertools
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from comera_fx.config import RankConfig
from comera_fx.errors import RankError
from comera_fx.modules import TTLinear
from comera_fx.spec import TTSpec
from comera_fx.train import RankAdapter, adapted, param_groups

SPEC = TTSpec("tt", (4, 4), (4, 4), (1, 4, 8, 4, 1))
CUTTING = {"target_ratio": 0.5, "early_steps": 15, "prune_every": 5, "gamma": 0.1}
ROWS = 16


class Net(nn.Module):
    """Three layers; the one in the middle is left out where ``skips`` says so."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.layers = nn.ModuleList(TTLinear(SPEC, 16, 16, dtype=dtype) for _ in range(3))
        self.skips = False

    def forward(self, x):
        for number, layer in enumerate(self.layers):
            if not (self.skips and number == 1):
                x = torch.tanh(layer(x))
        return x


class Run:
    """A model in training; under DDP it sees every other row of a batch."""

    def __init__(
        self,
        model,
        rank=None,
        rank_lr=0.05,
        hook=None,
        late_wrap=False,
        ddp=None,
        check_processes=None,
        **config,
    ):
        self.model, self.rank = model, rank
        groups = param_groups(model, lr=3e-3, rank_lr=rank_lr)
        self.optimizer = torch.optim.AdamW(groups)
        self.called = model
        wrap = rank is not None and DistributedDataParallel
        if wrap and not late_wrap:
            self.called = wrap(model, **(ddp or {}))
        self.adapter = RankAdapter(
            self.called,
            self.optimizer,
            RankConfig(**{"method": "comera", **config}),
            check_processes=check_processes,
        )
        if wrap and late_wrap:
            self.called = wrap(model, **(ddp or {}))
        if not wrap and dist.is_initialized():
            self.adapter.wrapped()
        if hook:
            self.called.register_comm_hook(None, hook)

    def backward(self, step, synchronise=True, scale=1.0):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(ROWS, 16, dtype=torch.float64, generator=generator)
        y = torch.tanh(x.roll(1, 1))
        dtype = self.model.layers[0].cores[0].dtype
        rows = slice(None) if self.rank is None else slice(self.rank, None, 2)
        x, y = x[rows].to(dtype), y[rows].to(dtype)
        alone = synchronise or self.rank is None
        with contextlib.nullcontext() if alone else self.called.no_sync():
            task = scale * nn.functional.mse_loss(self.called(x), y)
            self.adapter.loss(task).backward()
        return task

    def step(self, number, micro_batches=1):
        self.optimizer.zero_grad()
        for micro in range(micro_batches):
            self.backward(number * micro_batches + micro, micro == micro_batches - 1)
        gradients = [None if p.grad is None else p.grad.clone() for p in self.model.parameters()]
        self.optimizer.step()
        self.adapter.step()
        return gradients


def model_of(dtype=torch.float64):
    torch.manual_seed(0)
    return Net(dtype)


def pair(rank, skips=False, dtype=torch.float64, **options):
    """The same model under DDP and by itself."""
    model = model_of(dtype)
    model.skips = skips
    alone = copy.deepcopy(model)
    own = ("hook", "late_wrap", "ddp", "check_processes")
    plain = {key: value for key, value in options.items() if key not in own}
    return Run(model, rank, **options), Run(alone, **plain)


def check_alike(many, one, tolerance=1e-6, message=""):
    assert many.adapter.ranks == one.adapter.ranks, message
    for (name, found), wanted in zip(
        many.model.named_parameters(), one.model.parameters(), strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance, msg=name)


def train_alike(rank, steps=50, cuts=2, micro_batches=1, tolerance=1e-6, **options):
    """Train both and compare gradients and parameters of every step."""
    many, one = pair(rank, **{**CUTTING, **options})
    sizes = {one.adapter.size}
    for number in range(steps):
        found, wanted = (run.step(number, micro_batches) for run in (many, one))
        for f, w in zip(found, wanted, strict=True):
            if w is None:
                assert f is None or not f.any(), number
            else:
                torch.testing.assert_close(f, w, rtol=tolerance, atol=tolerance)
        check_alike(many, one, tolerance, f"step {number}")
        sizes.add(one.adapter.size)
    assert len(sizes) - 1 >= cuts, sizes
    for found, wanted in zip(many.adapter.history, one.adapter.history, strict=True):
        assert found == {**wanted, "loss": pytest.approx(wanted["loss"], rel=tolerance)}
    return many, one


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
    train_alike(rank, dtype=torch.float32, tolerance=2e-3)


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


def directions_of_the_first(rank):
    """The other process would find fewer of them, and rounds otherwise; parameters stay equal."""
    find = adapted.balanced_bonds
    if rank == 1:
        adapted.balanced_bonds = lambda cores: [bond.first(2) for bond in find(cores)]
    for dtype, method in itertools.product((torch.float32, torch.float64), ("comera", "proximal")):
        run = Run(model_of(dtype), rank, check_processes=True, method=method, prune_every=2)
        layers = run.adapter._layers
        weights = [layer.dense_weight().detach() for layer in run.model.layers]
        layers.turn(layers.balanced())
        for layer, weight in zip(run.model.layers, weights, strict=True):
            torch.testing.assert_close(layer.dense_weight().detach(), weight)
        for number in range(6):
            run.step(number)
        assert run.adapter.ranks["layers.0"] == [4, 8, 4]
        for parameter in run.model.parameters():
            theirs = parameter.detach().clone()
            dist.broadcast(theirs, 0)
            assert torch.equal(theirs, parameter)


def bytes_sent(rank):
    """Bases go in the precision of the cores."""
    sent, send = [], dist.broadcast
    dist.broadcast = lambda tensor, **where: sent.append(tensor.dtype) or send(tensor, **where)
    for dtype in (torch.float32, torch.float64):
        run = Run(model_of(dtype), rank, method="proximal")
        sent.clear()
        run.adapter._layers.balanced()
        assert sent == [torch.float64, dtype]


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


def not_finite_in_one(rank):
    """Cores that are not finite in one process are refused in all, and none waits for another."""
    for method in ("comera", "proximal"):
        run = Run(model_of(), rank, method=method, prune_every=1)
        run.step(0)
        if rank == 1:
            with torch.no_grad():
                run.model.layers[1].cores[1][0, 1, 2] = float("nan")
        ranks = run.adapter.ranks
        run.adapter.loss(torch.tensor(1.0))
        with pytest.raises(RankError, match=r"layer 'layers.1' has numbers that are not finite"):
            run.adapter.step()
        assert run.adapter.ranks == ranks


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
        directions_of_the_first,
        bytes_sent,
        resumed,
        layer_dies,
        hooks,
        one_objective,
        one_not_finite,
        not_finite_in_one,
        disagreement,
        unclear,
        cannot_follow,
        sharded,
    )
}

SLOW = [name for name in SCENARIOS if name != "equal"]


def run_processes(tmp_path, scenario, number=2):
    command = [sys.executable, __file__, scenario]
    root = str(Path(__file__).parents[2])
    runs = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store"), str(number)],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root},
        )
        for rank in range(number)
    ]
    errors = [run.communicate(timeout=240)[1] for run in runs]
    assert [run.returncode for run in runs] == [0] * number, "\n".join(errors)


def test_two_processes_cut_and_train_as_one(tmp_path):
    run_processes(tmp_path, "equal")


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SLOW)
def test_two_processes_at_length(tmp_path, scenario):
    run_processes(tmp_path, scenario)


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
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    rank = int(sys.argv[2])
    dist.init_process_group(
        "gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=int(sys.argv[4])
    )
    SCENARIOS[sys.argv[1]](rank)
    dist.destroy_process_group()
