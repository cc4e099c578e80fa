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
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """``softmax(scale * q k^T + log m) v``, where ``m`` is 1 on the whole prefix and ``mask`` among the nodes.

    Rows are nodes of a tree, or its root as well. Keys and values have rotary positions applied already: a row's depth
    gives its position, not its place in the batch. A row that sees nothing gets zeros.

    Args:
        query: ``[n, heads, head_dim]``; computation is in its dtype.
        prefix_key: ``[length, kv_heads, head_dim]`` of the committed tokens. Query head ``h`` reads key/value head
            ``h // (heads // kv_heads)``.
        prefix_value: ``[length, kv_heads, value_dim]``.
        node_key: ``[num_nodes, kv_heads, head_dim]`` of the nodes.
        node_value: ``[num_nodes, kv_heads, value_dim]``.
        mask: ``[n, num_nodes]`` bool, whether a row sees a node; see ``DraftTree.ancestor_mask``. Ancestors come before
            their descendants, so the number of nodes a row sees is its depth below the prefix's last token.
        scale: factor of the scores, usually ``head_dim ** -0.5``.
        window: a row sees keys less than this many positions back.
        softcap: scores become ``softcap * tanh(score / softcap)``.

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
    length = len(prefix_key)
    seen = torch.cat((mask.new_ones(len(query), length), mask), dim=1)
    if window is not None:
        row_position = length - 1 + mask.sum(dim=1, keepdim=True)
        prefix_position = torch.arange(length, device=mask.device).expand(len(query), length)
        # Of the nodes a row sees, the i-th lies at depth i.
        node_position = length - 1 + mask.cumsum(dim=1)
        seen &= row_position - torch.cat((prefix_position, node_position), dim=1) < window
    scores = scale * torch.einsum("qhd,khd->hqk", query, key)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~seen, -math.inf).softmax(dim=-1).nan_to_num(nan=0.0)
    return torch.einsum("hqk,khd->qhd", weights, value)
