"""Tree policies: how deep, how wide and how large a request's next draft tree is.

A policy is a pure function of one request's signals, so every tensor-parallel rank decides alike. Each rule is there
twice, for one request on the host and for a batch in tensors, which need not leave their device.
Source of the adaptive policy: "Margins, Not Windows: Training-Free Per-Step Lossy Speculative Decoding",
arXiv 2609.02897.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

HISTORY_START = 0.5
"""Acceptance rate assumed of a request that has none yet (ours; the source does not say)."""


@dataclass(frozen=True)
class TreeShape:
    """Limits of one draft tree.

    Args:
        depth: levels below the root.
        width: nodes expanded per level, and children considered per node.
        nodes: drafted nodes in all; the root is not counted.
    """

    depth: int
    width: int
    nodes: int

    def clipped(self, *, depth: int, width: int, nodes: int) -> TreeShape:
        """This shape within further limits."""
        return TreeShape(min(self.depth, depth), min(self.width, width), min(self.nodes, nodes))


@dataclass
class AcceptanceHistory:
    """Rolling acceptance rate (RAR) of one request: ``rate += decay * (accepted / depth - rate)`` per step.

    Args:
        decay: weight of the newest step, in (0, 1].
        reset_after: steps in a row with nothing accepted that put the rate back to its start.
    """

    decay: float
    reset_after: int
    rate: float = HISTORY_START
    misses: int = 0

    def observe(self, accepted: int, depth: int) -> None:
        """Record a verified tree of ``depth`` >= 1 levels of which ``accepted`` nodes were accepted."""
        self.rate += self.decay * (accepted / depth - self.rate)
        self.misses = 0 if accepted else self.misses + 1
        if self.misses >= self.reset_after:
            self.rate = HISTORY_START
            self.misses = 0


@dataclass(frozen=True)
class HistoryBatch:
    """``AcceptanceHistory`` of many requests.

    Args:
        decay, reset_after: as there.
        rates: ``[num_requests]`` float64.
        misses: ``[num_requests]`` int32.
    """

    decay: float
    reset_after: int
    rates: torch.Tensor
    misses: torch.Tensor

    def observe(self, requests: torch.Tensor, accepted: torch.Tensor, depth: torch.Tensor) -> None:
        """Record verified trees, in place.

        Args:
            requests: ``[n]`` int64 distinct indices.
            accepted: ``[n]`` accepted nodes.
            depth: ``[n]`` levels; 0 where there was no tree, which changes nothing.
        """
        old, missed = self.rates[requests], self.misses[requests]
        rate = old + self.decay * (accepted / depth.clamp(min=1) - old)
        misses = torch.where(accepted > 0, 0, missed + 1)
        anew = misses >= self.reset_after
        seen = depth > 0
        self.rates[requests] = torch.where(seen, torch.where(anew, HISTORY_START, rate), old)
        self.misses[requests] = torch.where(seen, torch.where(anew, 0, misses), missed).to(torch.int32)


class TreePolicy(Protocol):
    """Chooses the shape of the next tree of one request."""

    def shape(self, confidence: float, history: AcceptanceHistory) -> TreeShape:
        """Shape for a draft whose top-1 probability at the root is ``confidence``."""
        ...

    def shapes(self, confidence: torch.Tensor, rates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same for a batch: ``[num_requests]`` float64 each in, int32 depths, widths and nodes out."""
        ...

    @property
    def largest(self) -> TreeShape:
        """Bounds of all shapes the policy ever chooses."""
        ...


@dataclass(frozen=True)
class StaticPolicy:
    """The same shape at every step."""

    static: TreeShape

    def shape(self, confidence: float, history: AcceptanceHistory) -> TreeShape:
        return self.static

    def shapes(self, confidence: torch.Tensor, rates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        def same(value: int) -> torch.Tensor:
            return torch.full_like(rates, value, dtype=torch.int32)

        return same(self.static.depth), same(self.static.width), same(self.static.nodes)

    @property
    def largest(self) -> TreeShape:
        return self.static


@dataclass(frozen=True)
class AdaptivePolicy:
    """The paper's policy: interpolates between two shapes by ``s = clamp(p_draft(top1) * RAR / scale, 0, 1)``."""

    low: TreeShape
    high: TreeShape
    scale: float

    def shape(self, confidence: float, history: AcceptanceHistory) -> TreeShape:
        s = min(max(confidence * history.rate / self.scale, 0.0), 1.0)

        def between(low: int, high: int) -> int:
            return int(low + s * (high - low) + 0.5)

        return TreeShape(
            between(self.low.depth, self.high.depth),
            between(self.low.width, self.high.width),
            between(self.low.nodes, self.high.nodes),
        )

    def shapes(self, confidence: torch.Tensor, rates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        s = (confidence * rates / self.scale).clamp(0.0, 1.0)

        def between(low: int, high: int) -> torch.Tensor:
            return (low + s * (high - low) + 0.5).to(torch.int32)

        return (
            between(self.low.depth, self.high.depth),
            between(self.low.width, self.high.width),
            between(self.low.nodes, self.high.nodes),
        )

    @property
    def largest(self) -> TreeShape:
        return TreeShape(
            max(self.low.depth, self.high.depth),
            max(self.low.width, self.high.width),
            max(self.low.nodes, self.high.nodes),
        )
