"""Argument checks of the kernels' wrappers: a ValueError names the argument before anything is launched."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
INTS = (torch.int32, torch.int64)


def require(condition: bool, message: str | Callable[[], str]) -> None:
    """Raise ValueError(message) unless the condition holds; a message that costs something is made when needed."""
    if not condition:
        raise ValueError(message if isinstance(message, str) else message())


def check_starts(name: str, starts: torch.Tensor, device: torch.device) -> int:
    """Check one ``[num_requests + 1]`` int32 tensor of where requests start, and return how many there are.

    Raises:
        ValueError: as ``check_tensor``, or it is empty.
    """
    check_tensor(name, starts, (None,), (torch.int32,), device)
    require(starts.numel() > 0, f"{name} must have at least one entry")
    return starts.numel() - 1


def check_tensor(
    name: str,
    value: torch.Tensor,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    *,
    contiguous: bool = True,
) -> None:
    """Check one tensor argument.

    Args:
        shape: expected sizes, None where any will do.
        contiguous: whether the whole tensor must be contiguous; otherwise its last dimension must be.

    Raises:
        ValueError: names the argument, what it is and what it must be.
    """
    require(
        value.dim() == len(shape) and all(s is None or s == v for s, v in zip(shape, value.shape, strict=True)),
        lambda: (
            f"{name} must have shape [{', '.join('any' if s is None else str(s) for s in shape)}], "
            f"is {list(value.shape)}"
        ),
    )
    require(value.dtype in dtypes, lambda: f"{name} must be one of {', '.join(map(str, dtypes))}, is {value.dtype}")
    require(value.device == device, lambda: f"{name} must be on {device}, is on {value.device}")
    if contiguous:
        require(value.is_contiguous(), lambda: f"{name} must be contiguous")
    else:
        last = value.dim() == 0 or value.shape[-1] <= 1 or value.stride(-1) == 1
        require(last, lambda: f"the last dimension of {name} must be contiguous")
