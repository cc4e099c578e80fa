"""The attention reference against sums written out, key by key."""

from __future__ import annotations

import math

import pytest
import torch

from vllm_adaptivespec.core.attention import tree_attention
from vllm_adaptivespec.core.tree import DraftTree

TREE = DraftTree((1, 2, 3, 4), (-1, -1, 0, 2))


def by_hand(
    query: torch.Tensor, keys: list[tuple[int, torch.Tensor, torch.Tensor]], position: int, window: int | None
) -> torch.Tensor:
    """Attention of one row and head over (position, key, value) triples."""
    total, result = 0.0, torch.zeros_like(keys[0][2]) if keys else torch.zeros(2)
    for key_position, key, value in keys:
        if window is not None and position - key_position >= window:
            continue
        weight = math.exp(2.0 * math.tanh(0.7 * float(query @ key) / 2.0))
        total += weight
        result = result + weight * value
    return result / total


@pytest.mark.parametrize("window", [None, 1, 2, 4, 100])
def test_nodes_see_their_path_and_the_prefix(window: int | None) -> None:
    torch.manual_seed(0)
    length = 3
    prefix_key, prefix_value = torch.randn((2, length, 1, 2)).double()
    node_key, node_value = torch.randn((2, len(TREE), 1, 2)).double()
    query = torch.randn((len(TREE), 2, 2)).double()
    result = tree_attention(
        query,
        prefix_key,
        prefix_value,
        node_key,
        node_value,
        TREE.ancestor_mask(),
        0.7,
        window=window,
        softcap=2.0,
    )
    for node in range(len(TREE)):
        keys = [(p, prefix_key[p, 0], prefix_value[p, 0]) for p in range(length)]
        keys += [(length - 1 + TREE.depths[n], node_key[n, 0], node_value[n, 0]) for n in TREE.path(node)]
        for head in range(2):
            expected = by_hand(query[node, head], keys, length - 1 + TREE.depths[node], window)
            torch.testing.assert_close(result[node, head], expected)


def test_uneven_heads() -> None:
    query = torch.zeros((1, 3, 2))
    key = torch.zeros((1, 2, 2))
    with pytest.raises(ValueError, match="3 query heads"):
        tree_attention(query, key, key, key, key, torch.ones((1, 1), dtype=torch.bool), 1.0)
