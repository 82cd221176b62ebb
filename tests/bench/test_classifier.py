"""The classifier of the studies: what it reads, its sizes, and how it is judged."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import comera_fx
from bench import sentence_pairs, tweets
from bench.data.tokens import NUM_TYPES, PADDING, Dataset, Part
from bench.models.classifier import (
    CPU_SIZES,
    GPU_SIZES,
    QUICK_SIZES,
    TABLE_STD,
    ClassifierSizes,
    accuracy,
    build_classifier,
    check_fits,
    sizes_for,
)
from bench.models.six_encoder import SixEncoder
from comera_fx import OptimizeConfig
from comera_fx.errors import ConfigError

SIZES = ClassifierSizes(16, 32, num_heads=2, num_layers=2, vocabulary_size=300, length=8)


def build(num_classes=3, **settings):
    torch.manual_seed(0)
    return build_classifier(SIZES, num_classes, **settings)


def part(num=6, length=8):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 300, (num, length), generator=generator)
    ids[:, length // 2 :] = PADDING
    types = torch.randint(NUM_TYPES, (num, length), generator=generator)
    return Part(ids, types, torch.randint(3, (num,), generator=generator))


def dataset(vocabulary_size=300, length=8):
    data = part(length=length)
    return Dataset("made up", data, data, data, ("a", "b", "c"), vocabulary_size, "")


@pytest.mark.parametrize("num_classes", [2, 3, 5])
def test_there_is_a_logit_for_each_class(num_classes):
    assert build(num_classes)(*part().inputs).shape == (6, num_classes)


def test_more_padding_changes_no_logit():
    model, long = build(), part()
    short = Part(long.ids[:, :5], long.types[:, :5], long.labels)
    torch.testing.assert_close(model(*long.inputs), model(*short.inputs))


def test_types_of_padding_are_not_read():
    model, data = build(), part()
    other = torch.where(data.ids == PADDING, 3 - data.types, data.types)
    torch.testing.assert_close(model(data.ids, other), model(*data.inputs))


def test_every_other_token_and_its_type_are_read():
    model, data = build(), part(1)
    logits = model(*data.inputs)
    for place in range(4):
        ids, types = data.ids.clone(), data.types.clone()
        ids[0, place] = 3 + (ids[0, place] + 1) % 297
        types[0, place] = 3 - types[0, place]
        assert not torch.allclose(model(ids, data.types), logits, atol=1e-7)
        assert not torch.allclose(model(data.ids, types), logits, atol=1e-7)


def test_without_a_padding_token_all_tokens_are_read():
    torch.manual_seed(0)
    sizes = {"width": 16, "ffn_width": 32, "num_heads": 2, "num_layers": 1, "vocabulary": 300}
    model, ids = SixEncoder(**sizes, max_tokens=8), part().ids
    zeros = torch.zeros_like(ids)
    types = torch.where(ids == PADDING, 1, zeros)
    assert not torch.allclose(model(ids, types), model(ids, zeros), atol=1e-5)


def test_tables_start_small_and_every_parameter_gets_a_gradient():
    model, data = build(), part()
    assert model.word_embedding.weight.std().item() == pytest.approx(TABLE_STD, rel=0.1)
    F.cross_entropy(model(*data.inputs), data.labels).backward()
    # Attention is the same whatever is added to all keys.
    named = [(n, p.grad) for n, p in model.named_parameters() if not n.endswith("key.bias")]
    assert all(grad is not None and grad.abs().sum() > 0 for _, grad in named)


def test_the_sizes_of_the_studies():
    model = build_classifier(CPU_SIZES, 3)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert shapes["word_embedding.weight"] == (4096, 256)
    assert shapes["position_embedding.weight"] == (40, 256)
    assert shapes["type_embedding.weight"] == (NUM_TYPES, 256)
    assert shapes["encoders.2.up.weight"] == (768, 256)
    assert "encoders.3.up.weight" not in shapes
    assert shapes["head.weight"] == (3, 256)
    assert (GPU_SIZES.width, GPU_SIZES.num_layers, GPU_SIZES.vocabulary_size) == (768, 6, 30522)


@pytest.mark.parametrize(
    ("quick", "device", "sizes"),
    [
        (False, "cpu", CPU_SIZES),
        (False, "cuda", GPU_SIZES),
        (False, "cuda:1", GPU_SIZES),
        (True, "cpu", QUICK_SIZES),
        (True, "cuda", QUICK_SIZES),
    ],
)
def test_a_gpu_trains_the_papers_sizes(quick, device, sizes):
    assert sizes_for(quick, device) is sizes
    own = replace(SIZES, length=7)
    assert sizes_for(quick, device, cpu_sizes=own) is (own if sizes is CPU_SIZES else sizes)


def test_a_width_asked_for_takes_the_feed_forward_parts_along():
    sizes = sizes_for(False, "cpu", 128)
    assert (sizes.width, sizes.ffn_width) == (128, 384)
    assert replace(sizes, width=256, ffn_width=768) == CPU_SIZES


@pytest.mark.parametrize(
    ("task", "own"), [(sentence_pairs, sentence_pairs.SIZES), (tweets, CPU_SIZES)]
)
def test_every_size_has_its_steps(task, own):
    assert set(task.STEPS) == {QUICK_SIZES, own, GPU_SIZES}


def test_it_trains_in_tt_form_with_its_padding():
    config = OptimizeConfig(init="random", max_rank=4, min_params=256, only_if_faster=False)
    model, data = comera_fx.optimize(build(), config=config), part(8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        loss = F.cross_entropy(model(*data.inputs), data.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("batch_size", [1, 4, 6, 100])
@pytest.mark.parametrize("training", [True, False])
def test_accuracy_is_the_share_of_right_answers_without_dropout(batch_size, training):
    model, data = build(dropout=0.5), part()
    model.eval()
    answers = model(*data.inputs).argmax(-1)
    right = Part(data.ids, data.types, torch.where(torch.arange(6) < 4, answers, (answers + 1) % 3))
    model.train(training)
    assert accuracy(model, right, batch_size) == pytest.approx(4 / 6)
    assert model.training is training


def test_heads_that_do_not_split_the_width_are_an_error():
    with pytest.raises(ConfigError, match=r"does not split.*\n  got:      width 16, num_heads 3"):
        build_classifier(ClassifierSizes(width=16, num_heads=3), 3)


@pytest.mark.parametrize(("vocabulary_size", "length"), [(301, 8), (300, 9)])
def test_data_that_does_not_fit_is_an_error(vocabulary_size, length):
    check_fits(SIZES, dataset())
    got = rf"got:      ids below {vocabulary_size}, {length} tokens an example"
    with pytest.raises(ConfigError, match=rf"made up does not fit.*\n  {got}"):
        check_fits(SIZES, dataset(vocabulary_size, length))
