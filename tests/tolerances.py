"""How far results may be from a dense float64 reference, per dtype."""

import torch

EXACT = {"rtol": 1e-10, "atol": 1e-10}
"""Float64, full rank: nothing but rounding."""

BY_DTYPE = {
    torch.float64: EXACT,
    torch.float32: {"rtol": 1e-4, "atol": 1e-5},
    torch.bfloat16: {"rtol": 5e-2, "atol": 5e-2},
}
