import pytest
import torch
import torch.nn.functional as F

from bench.models.dlrm import DLRM

TABLES = (11, 7, 5)


def inputs(hots):
    generator = torch.Generator().manual_seed(0)
    columns = [torch.randint(size, (6, hots), generator=generator) for size in TABLES]
    return torch.randn(6, 4, generator=generator), torch.stack(columns, dim=1)


def build(*, bags):
    torch.manual_seed(0)
    return DLRM(4, TABLES, 8, bottom=(16,), top=(12, 10), bags=bags)


def by_hand(model, dense, ids):
    """One sample after the other, one pair after the other."""
    logits = []
    for features, rows in zip(dense, ids, strict=True):
        vector = model.bottom(features)
        vectors = [vector]
        for table, chosen in zip(model.tables, rows, strict=True):
            vectors.append(sum(table.weight[k] for k in chosen))
        pairs = [vectors[i] @ vectors[j] for i in range(len(vectors)) for j in range(i)]
        logits.append(model.top(torch.cat([vector, torch.stack(pairs)])))
    return torch.cat(logits)


@pytest.mark.parametrize("bags", [False, True])
@pytest.mark.parametrize("hots", [1, 3])
def test_logits_are_those_of_the_definition(bags, hots):
    model = build(bags=bags)
    dense, ids = inputs(hots)
    logits = model(dense, ids)
    assert logits.shape == (6,)
    torch.testing.assert_close(logits, by_hand(model, dense, ids))


def test_both_kinds_of_tables_hold_the_same_numbers():
    tables, bags = build(bags=False), build(bags=True)
    bags.load_state_dict(tables.state_dict())
    torch.testing.assert_close(tables(*inputs(2)), bags(*inputs(2)))


def test_every_parameter_gets_a_gradient():
    model = build(bags=False)
    logits = model(*inputs(2))
    F.binary_cross_entropy_with_logits(logits, torch.ones_like(logits)).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    assert [layer.out_features for layer in model.top if hasattr(layer, "out_features")] == [
        12,
        10,
        1,
    ]


def test_indices_of_pairs_are_not_saved():
    assert not {"first", "second"} & set(build(bags=False).state_dict())
