"""Greedy decoding, batch 1, with a cache: dense against TT, milliseconds a token.

The dense decoder holds the optimised one's weights, built once, so that both write the same.
Appends one row to ``bench/results/decode.csv``.
Run: ``python -m bench.decode [--repeats N] [--threads 2]``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import comera_fx
from bench.models.decoder import Cache, Decoder
from bench.options import parse
from bench.timing import Row, append_rows, format_table, medians_ms, repeats_within
from bench.workloads import DECODING, Decoding
from comera_fx.modules import tt_modules

SECONDS = 30.0
TOLERANCE = 1e-4


def models(sizes: Decoding) -> tuple[Decoder, Decoder]:
    """Return a dense decoder and an optimised one that computes the same."""
    torch.manual_seed(0)
    dense = Decoder(
        sizes.vocabulary, sizes.context, sizes.width, sizes.num_layers, sizes.num_heads
    ).eval()
    config = comera_fx.OptimizeConfig(
        init="random", max_rank=sizes.max_rank, num_tokens_hint=1, only_if_faster=False
    )
    optimised = comera_fx.optimize(dense, config=config)
    with torch.no_grad():
        for name, module in tt_modules(optimised):
            dense.get_parameter(f"{name}.weight").copy_(module.weight)
    return dense, optimised


def check(dense: Decoder, optimised: Decoder, ids_BT: Tensor) -> None:
    """Check that both decoders give the same logits, with the cache and without.

    Raises:
        AssertionError: If one differs from the dense decoder without a cache.
    """
    with torch.no_grad():
        wanted = dense(ids_BT)
        for name, model in (("dense", dense), ("optimised", optimised)):
            cache = Cache(len(model.blocks))
            steps = [model(ids_BT[:, k : k + 1], cache) for k in range(ids_BT.shape[1])]
            for how, got in (("at once", model(ids_BT)), ("with a cache", torch.cat(steps, 1))):
                torch.testing.assert_close(
                    got,
                    wanted,
                    rtol=TOLERANCE,
                    atol=TOLERANCE * float(wanted.abs().max()),
                    msg=lambda text, what=f"{name} {how}": f"{what} differs\n{text}",
                )


def measure(sizes: Decoding, repeats: int | None = None) -> Row:
    """Return one row: median milliseconds a token of both, after checking that they agree.

    Args:
        sizes: The decoder, and how much it writes.
        repeats: Measured turns; by their time if ``None``.
    """
    dense, optimised = models(sizes)
    prompt = torch.zeros(1, 1, dtype=torch.long)
    check(dense, optimised, dense.generate(prompt, sizes.num_new))
    runs = {
        "dense": lambda: dense.generate(prompt, sizes.num_new),
        "ours": lambda: optimised.generate(prompt, sizes.num_new),
    }
    turns = repeats_within(SECONDS, runs) if repeats is None else repeats
    ms = {name: value / sizes.num_new for name, value in medians_ms(runs, turns).items()}
    return {
        "width": sizes.width,
        "layers": sizes.num_layers,
        "max_rank": sizes.max_rank,
        "new_tokens": sizes.num_new,
        "dense_params": _num_params(dense),
        "ours_params": _num_params(optimised),
        "dense_ms_per_token": round(ms["dense"], 4),
        "ours_ms_per_token": round(ms["ours"], 4),
        "dense_over_ours": round(ms["dense"] / ms["ours"], 3),
        "repeats": turns,
    }


def _num_params(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    """Measure, print the row and append it."""
    options = parse(__doc__, results="decode.csv")
    row = measure(DECODING, options.repeats)
    print(format_table([row]))
    append_rows(options.results, [row])


if __name__ == "__main__":
    main()
