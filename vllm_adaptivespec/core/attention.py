"""Tree attention by its definition: the slow, readable reference that layouts and kernels are compared with."""

from __future__ import annotations

import math

import torch


def tree_attention(
    query: torch.Tensor,
    prefix_key: torch.Tensor,
    prefix_value: torch.Tensor,
    node_key: torch.Tensor,
    node_value: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """``softmax(scale * q k^T + log m) v``, where ``m`` is 1 on the whole prefix and ``mask`` among the rows.

    Rows are the nodes of a tree, or its root and its nodes where the root is not counted to the prefix. Keys and
    values have rotary positions applied already: a row's depth gives its position, not its place in the batch.

    Args:
        query: ``[n, heads, head_dim]``; computation is in its dtype.
        prefix_key: ``[length, kv_heads, head_dim]`` of the committed tokens. Query head ``h`` reads key/value head
            ``h // (heads // kv_heads)``.
        prefix_value: ``[length, kv_heads, value_dim]``.
        node_key: ``[n, kv_heads, head_dim]`` of the rows themselves.
        node_value: ``[n, kv_heads, value_dim]``.
        mask: ``[n, n]`` bool, whether a row sees a column; see ``DraftTree.ancestor_mask``. Every row sees itself.
        scale: factor of the scores, usually ``head_dim ** -0.5``.

    Returns:
        ``[n, heads, value_dim]``.

    Raises:
        ValueError: ``heads`` is not a multiple of ``kv_heads``.
    """
    heads, kv_heads = query.shape[1], node_key.shape[1]
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads cannot share {kv_heads} key/value heads evenly")
    key = torch.cat((prefix_key, node_key)).repeat_interleave(heads // kv_heads, dim=1)
    value = torch.cat((prefix_value, node_value)).repeat_interleave(heads // kv_heads, dim=1)
    seen = torch.cat((mask.new_ones(len(query), len(prefix_key)), mask), dim=1)
    scores = scale * torch.einsum("qhd,khd->hqk", query, key)
    weights = scores.masked_fill(~seen, -math.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, value)
