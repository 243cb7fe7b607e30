"""Tutorial Triton kernel: weighted sum of each row, y = x w. Start reading in `kernel.py`."""

from systems.kernels.weighted_sum.autograd import WeightedSum, weighted_sum
from systems.kernels.weighted_sum.reference import (
    weighted_sum_gradients,
    weighted_sum_reference,
)

__all__ = ["WeightedSum", "weighted_sum", "weighted_sum_gradients", "weighted_sum_reference"]
