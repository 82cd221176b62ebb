import pytest

from comera_fx.demo.config import DemoConfig
from comera_fx.demo.data import Corpus, load_corpus


@pytest.fixture(scope="session")
def tiny() -> DemoConfig:
    """Settings with which a whole run takes a second."""
    return DemoConfig(
        steps=24,
        rank=4,
        batch_size=4,
        context=16,
        width=32,
        num_layers=1,
        num_heads=2,
        ffn_width=64,
        warmup_steps=4,
        adapt_after=4,
        prune_every=3,
        held_out_every=5,
        held_out_batches=2,
        held_out_batch_size=4,
        max_files=40,
    )


@pytest.fixture(scope="session")
def corpus(tiny: DemoConfig) -> Corpus:
    return load_corpus(tiny)
