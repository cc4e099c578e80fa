"""Kernels run on a GPU where there is one, else in Triton's interpreter; either way against the twins in ``core``."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    # Read by Triton when a kernel is defined, so it must be set before the first import of one.
    os.environ["TRITON_INTERPRET"] = "1"

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
POISON = 1_234_567


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory a wrapper asks for comes with wrong values in it, so that what a kernel forgets to write shows."""

    def poison(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.fill_(float("nan") if tensor.is_floating_point() else POISON)

    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poison(empty_like(*a, **k)))


@pytest.fixture
def device() -> torch.device:
    return DEVICE


def on(device: torch.device, value: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(value, dtype=dtype, device=device)
