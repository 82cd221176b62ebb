"""What the planner's cost model rests on: shapes of products, whole tiles, copies.

Each line times two ways to make the same numbers. Appends one row per line to
``bench/results/products.csv``. Run: ``python -m bench.products [--repeats N] [--threads 2]``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bench.options import parse
from bench.timing import Row, append_rows, format_table, medians_ms, repeats_within

SECONDS = 2.0
Ways = tuple[str, Callable[[], Tensor], str, Callable[[], Tensor]]


def ways(num_tokens: int) -> list[Ways]:
    """Return pairs of ways, named, at a number of tokens."""
    x, z = torch.randn(num_tokens, 768), torch.randn(num_tokens, 32)
    left = torch.randn(768, 32)
    ragged, small = left[:, :30].contiguous(), left[:, :24].contiguous()
    middle, core = torch.randn(num_tokens, 12, 64), torch.randn(12, 12)

    def batched() -> Tensor:
        return torch.bmm(middle.mT, core.expand(num_tokens, 12, 12))

    def copied() -> Tensor:
        return torch.mm(middle.mT.reshape(-1, 12), core).view(num_tokens, 64, 12)

    return [
        ("x (768 x 30)", lambda: torch.mm(x, ragged), "x (768 x 32)", lambda: torch.mm(x, left)),
        ("x (768 x 24)", lambda: torch.mm(x, small), "x (768 x 32)", lambda: torch.mm(x, left)),
        ("z^T x", lambda: torch.mm(z.t(), x).t(), "x^T z", lambda: torch.mm(x.t(), z)),
        ("copy, product", copied, "batched product", batched),
    ]


def measure(num_tokens: int, repeats: int | None = None) -> list[Row]:
    """Return one row per pair of ways, after checking that they agree."""
    rows = []
    for first_name, first, second_name, second in ways(num_tokens):
        columns = min(first().shape[-1], second().shape[-1])
        torch.testing.assert_close(
            first()[..., :columns], second()[..., :columns], rtol=1e-3, atol=1e-3
        )
        versions = {"first": first, "second": second}
        ms = medians_ms(versions, repeats or repeats_within(SECONDS, versions))
        rows.append(
            {
                "tokens": num_tokens,
                "first": first_name,
                "second": second_name,
                "first_ms": round(ms["first"], 6),
                "second_ms": round(ms["second"], 6),
                "first_over_second": round(ms["first"] / ms["second"], 2),
            }
        )
    return rows


def main() -> None:
    """Measure every pair, print a table and append the rows."""
    options = parse(__doc__, results="products.csv", tokens=(128, 4096))
    rows = [row for tokens in options.tokens for row in measure(tokens, options.repeats)]
    print(format_table(rows))
    append_rows(options.results, rows)


if __name__ == "__main__":
    main()
