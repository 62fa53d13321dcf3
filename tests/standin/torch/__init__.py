"""As much of PyTorch's surface as the test between two hosts uses, for machines without PyTorch; the store is real.

STANDIN_TORCH=wrong-sum | wrong-step | hang | broken stages what a bad host does.
"""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

from torch import distributed

STAGED = os.environ.get("STANDIN_TORCH", "")
if STAGED == "broken":
    raise ImportError("libcudart.so.13: cannot open shared object file\nand more")

__version__ = "0.0+standin"
__all__ = ["Tensor", "cuda", "distributed", "full", "nn", "optim"]


class Tensor:
    """Equal values, all that is needed."""

    def __init__(self, value: float) -> None:
        self.values = [value]

    def unique(self) -> Tensor:
        return self

    def detach(self) -> Tensor:
        return self

    def sum(self) -> Tensor:
        return self

    def tolist(self) -> list[float]:
        return self.values

    def backward(self) -> None:
        """The only thing that is differentiated: a linear model of `full` data."""
        distributed.GRADIENT.append(distributed.total(self.values[0]) / 2)


def full(_shape: Any, value: float, device: str = "cpu") -> Tensor:
    assert device == "cpu"
    return Tensor(value)


def _linear(columns: int, rows: int, bias: bool, device: str) -> Any:
    return SimpleNamespace(weight=Tensor(0.0))


def _constant(weight: Tensor, value: float) -> None:
    weight.values = [value]


def _parallel(model: Any) -> Any:
    class Parallel:
        def __call__(self, data: Tensor) -> Tensor:
            return Tensor(4 * data.values[0])

        def parameters(self) -> list[Tensor]:
            return [model.weight]

    return Parallel()


def _sgd(parameters: list[Tensor], lr: float) -> Any:
    def step() -> None:
        off = 0.25 if STAGED == "wrong-step" else 0.0
        parameters[0].values = [parameters[0].values[0] - lr * distributed.GRADIENT[-1] + off]

    return SimpleNamespace(step=step)


cuda = SimpleNamespace(is_available=lambda: False, device_count=lambda: 0)
optim = SimpleNamespace(SGD=_sgd)
nn = SimpleNamespace(
    Linear=_linear,
    init=SimpleNamespace(constant_=_constant),
    parallel=SimpleNamespace(DistributedDataParallel=_parallel),
)
