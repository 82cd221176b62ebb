"""Models as people write them train under the backend as they do in eager mode."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import comera_fx
from bench.models.zoo import CONFIG, NUM_TOKENS, ZOO, Entry, gpt2, ids, llama
from bench.zoo import NUM_SAMPLES, OTHER_NUM_SAMPLES, TOLERANCE, Counts, Twins, main

pytest.importorskip("transformers")
# At a graph break dynamo looks at the gradient of what the graph before gave.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")

BY_NAME = {entry.name: entry for entry in ZOO}
OPTIONS = {"inner": "aot_eager"}
LAYERS = {
    "BERT": 15,
    "GPT-2": 3,
    "Llama": 16,
    "ViT": 12,
    "DLRM": 5,
    "DLRM, nn.EmbeddingBag": 2,
    "nn.TransformerEncoder": 2,
    "nn.TransformerEncoder, weights from cores": 8,
    "nanoGPT-like": 15,
    "six-encoder": 39,
}
WRITERS = {"GPT-2": gpt2, "Llama": llama}


def slow(values: Iterable[object]) -> list[Any]:
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def breaks() -> str:
    return "\n".join(counters["graph_break"])


def trained(entry: Entry, num_batches: int = 2) -> Twins:
    twins = Twins(entry)
    mine, theirs = twins.train([twins.inputs(NUM_SAMPLES, k) for k in range(num_batches)])
    assert mine == pytest.approx(theirs, abs=TOLERANCE)
    assert len(set(theirs)) == num_batches, "the steps changed nothing"
    return twins


@pytest.mark.parametrize("name", BY_NAME)
def test_two_steps_are_those_of_eager(name):
    twins = trained(BY_NAME[name])
    counts = Counts.now()
    if name == "GPT-2":  # transformers knows no loss of this class, and warns where it is traced
        assert "loss_type=None" in breaks()
        assert counts.graphs == 2
    else:
        assert breaks() == ""
        assert counts.graphs == 1
    assert counts.expanded == counts.tt_layers == LAYERS[name]
    if not twins.entry.optimised:
        held = (comera_fx.TTLinear, comera_fx.TTEmbedding)
        assert sum(isinstance(module, held) for module in twins.model.modules()) == LAYERS[name]
    assert counters["comera_fx"]["backward_graphs"] == counts.graphs
    last = zip(twins.model.parameters(), twins.eager.parameters(), strict=True)
    for mine, theirs in last:
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["DLRM", *slow(name for name in BY_NAME if name != "DLRM")])
def test_eval_mode_and_a_second_batch_size(name):
    twins = trained(BY_NAME[name])
    mine, theirs = twins.evaluate(twins.inputs(NUM_SAMPLES))
    assert mine == pytest.approx(theirs, abs=TOLERANCE)
    mine, theirs = twins.train([twins.inputs(OTHER_NUM_SAMPLES, k) for k in range(2)])
    assert mine == pytest.approx(theirs, abs=TOLERANCE)
    counts = Counts.now()
    assert counts.expanded == counts.tt_layers == 3 * LAYERS[name]
    num_graphs = counts.graphs
    twins.train([twins.inputs(OTHER_NUM_SAMPLES + 1)])
    assert Counts.now().graphs == num_graphs, "a third batch size compiles again"


def test_gpt2_with_a_loss_type_is_one_graph():
    entry = BY_NAME["GPT-2"]

    def make():
        model = gpt2()
        model.loss_type = "ForCausalLM"
        return model

    trained(Entry(entry.name, make, entry.inputs))
    assert breaks() == ""
    assert Counts.now() == Counts(graphs=1, graph_breaks=0, tt_layers=3, expanded=3)


@pytest.mark.parametrize("reentrant", [False, *slow([True])])
@pytest.mark.parametrize("name", ["ViT", *slow(["BERT", "Llama"])])
def test_checkpointing_of_transformers(name, reentrant):
    entry = BY_NAME[name]

    def make():
        settings = {} if name == "ViT" else {"use_cache": False}
        model = comera_fx.optimize(entry.make(**settings), entry.inputs(NUM_SAMPLES), config=CONFIG)
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        return model

    trained(Entry(name, make, entry.inputs, optimised=True))
    counts = Counts.now()
    assert breaks() == ""
    assert counts.expanded == counts.tt_layers == LAYERS[name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "cache"),
    [
        ("forward", {"use_cache": True}),
        ("in place", {"use_cache": True}),
        ("in place", {"use_cache": False}),
        ("forward", {"cache_implementation": "static"}),
    ],
    ids=["forward-cache", "in-place-cache", "in-place-no-cache", "forward-static-cache"],
)
@pytest.mark.parametrize("name", WRITERS)
def test_generate_writes_the_tokens_of_eager(name, cache, how):
    torch.manual_seed(0)
    model = WRITERS[name](eos_token_id=None)
    model = comera_fx.optimize(model, {"input_ids": ids(2)}, config=CONFIG).eval()

    def written() -> list[torch.Tensor]:
        results = []
        for num_samples, num_tokens in ((2, NUM_TOKENS), (3, NUM_TOKENS + 3)):
            torch.manual_seed(num_samples)
            prompt = ids(num_samples, num_tokens)
            mask = torch.ones_like(prompt)
            mask[0, :2] = 0
            results.append(
                model.generate(
                    prompt, attention_mask=mask, max_new_tokens=6, do_sample=False, **cache
                )
            )
        return results

    expected = written()
    if how == "forward":
        model.forward = torch.compile(model.forward, backend="comera", options=OPTIONS)
    else:
        model.compile(backend="comera", options=OPTIONS)
    got = written()
    for mine, theirs in zip(got, expected, strict=True):
        assert torch.equal(mine, theirs)
    counts = Counts.now()
    assert 0 < counts.graphs <= 6
    assert counts.expanded == counts.tt_layers == counts.graphs * LAYERS[name]


@pytest.mark.slow
def test_the_table_names_every_model(capsys):
    main()
    printed = capsys.readouterr().out
    assert [line.split(" | ")[0][2:] for line in printed.splitlines()[2:]] == list(BY_NAME)
