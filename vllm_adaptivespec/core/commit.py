"""Commit of an accepted path by its definition."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def commit_path(cache: torch.Tensor, slots: Sequence[int], path: Sequence[int]) -> None:
    """Move what accepted nodes wrote to where a plain sequence has it: node ``path[i]``'s to node ``i``'s slot.

    Args:
        cache: ``[num_blocks, block_size, ...]`` keys or values, changed in place.
        slots: ``[num_nodes]`` slot each node was written to; negative: nowhere, so nothing is moved from or to it.
        path: accepted nodes from the root's child on; ``path[i] >= i``.
    """
    page = cache.shape[1]
    moves = [(slots[node], slots[i]) for i, node in enumerate(path) if slots[node] >= 0 and slots[i] >= 0]
    read = [cache[source // page, source % page].clone() for source, _ in moves]
    for value, (_, target) in zip(read, moves, strict=True):
        cache[target // page, target % page] = value
