"""Workloads that take no time."""

from bench.workloads import Workload
from comera_fx import TTSpec

TINY_SQUARE = TTSpec("tt", (4, 4), (4, 4), (1, 3, 4, 3, 1))
TINY_WIDE = TTSpec("tt", (4, 2, 2), (3, 2, 4), (1, 3, 4, 5, 4, 3, 1))


def tiny(spec: TTSpec = TINY_SQUARE, *, trains: bool = True) -> Workload:
    return Workload("tiny", spec, 8, trains)
