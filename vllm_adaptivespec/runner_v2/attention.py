"""Attention for trees on the GPU: the stock backend's implementation, except for the rows of trees.

A layer keeps the backend vLLM chose for it; its implementation is given a subclass of its own class. Target layers
send a batch's tree rows through ``tree_attention`` and leave the rest to the stock kernel; layers of the draft head do
so while a tree grows level by level.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..triton_kernels import tree_attention
from ..triton_kernels.tree_attention import HEAD_SIZES

BACKENDS = {"FLASH_ATTN", "TRITON_ATTN"}
"""Those whose cache is ``[blocks, kv heads, block size, 2 * head size]``, keys first, written in a step of its own."""

TREES = "adaptivespec_trees"
"""Attribute of vLLM's attention metadata that holds a ``TreeBatch``."""


@dataclass(frozen=True)
class TreeBatch:
    """The rows of a target pass that belong to trees: always its first rows.

    Host counts are fixed for a captured graph; tensors are persistent buffers that are filled before each pass.

    Args:
        num_rows: rows of trees, roots included.
        num_requests: requests they belong to.
        only: whether the pass has no other rows.
        masks: ``[max_tokens]`` int64 words over a request's own rows.
        context_lens: ``[max_requests]`` int32 tokens before each root.
        query_starts: ``[num_requests + 1]`` int32.
        max_queries: most rows of one request.
        max_context: bound of the context.
    """

    num_rows: int
    num_requests: int
    only: bool
    masks: torch.Tensor
    context_lens: torch.Tensor
    query_starts: torch.Tensor
    max_queries: int
    max_context: int


@dataclass(frozen=True)
class LevelBatch:
    """Attention metadata of one draft level: a frontier over the committed tokens and the nodes fed before.

    Args:
        block_table: ``[num_requests, max_blocks]`` int32.
        context_lens: ``[num_requests]`` int32 tokens in the draft's cache.
        query_starts, node_starts: ``[num_requests + 1]`` int32.
        masks: ``[num_rows]`` int64 words over the nodes fed.
        fed_rows: ``[num_rows]`` int64 where each row's keys and values go in ``scratch``.
        scratch: keys and values of the nodes fed, by layer, ``[num_node_rows, kv_heads, head_size]`` each.
        max_queries, max_nodes, max_context: host-side bounds.
    """

    block_table: torch.Tensor
    context_lens: torch.Tensor
    query_starts: torch.Tensor
    node_starts: torch.Tensor
    masks: torch.Tensor
    fed_rows: torch.Tensor
    scratch: dict[str, tuple[torch.Tensor, torch.Tensor]]
    max_queries: int
    max_nodes: int
    max_context: int


def key_value_views(kv_cache: torch.Tensor, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a layer's cache as ``[blocks, block_size, kv_heads, head_size]``."""
    key, value = kv_cache.transpose(1, 2).split(head_size, dim=-1)
    return key, value


def with_trees(stock: type) -> type:
    """A target layer's attention, made from the stock implementation's class."""

    class TreeAttention(stock):
        """The stock implementation, with the rows of trees in a kernel of their own."""

        def forward(
            self,
            layer: Any,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            kv_cache: torch.Tensor,
            attn_metadata: Any,
            output: torch.Tensor,
            *args: Any,
            **kwargs: Any,
        ) -> torch.Tensor:
            trees: TreeBatch | None = getattr(attn_metadata, TREES, None)
            if trees is None or not trees.only:
                super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
            if trees is None:
                return output
            rows, requests = trees.num_rows, trees.num_requests
            key_cache, value_cache = key_value_views(kv_cache, layer.head_size)
            starts = trees.query_starts
            tree_attention(
                query[:rows],
                key_cache,
                value_cache,
                key[:rows],
                value[:rows],
                block_tables=attn_metadata.block_table[:requests],
                context_lens=trees.context_lens[:requests],
                query_starts=starts,
                node_starts=starts,
                masks=trees.masks[:rows],
                scale=layer.impl.scale,
                max_queries=trees.max_queries,
                max_nodes=trees.max_queries,
                max_context=trees.max_context,
                window=layer.sliding_window,
                softcap=layer.impl.logits_soft_cap or None,
                out=output[:rows],
            )
            return output

    return TreeAttention


def with_levels(stock: type) -> type:
    """A draft layer's attention, made from the stock implementation's class."""

    class LevelAttention(stock):
        """The stock implementation, with the levels of growing trees in a kernel of their own."""

        def forward(
            self,
            layer: Any,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            kv_cache: torch.Tensor,
            attn_metadata: Any,
            output: torch.Tensor,
            *args: Any,
            **kwargs: Any,
        ) -> torch.Tensor:
            if not isinstance(attn_metadata, LevelBatch):
                return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
            level = attn_metadata
            node_key, node_value = level.scratch[layer.layer_name]
            node_key[level.fed_rows] = key
            node_value[level.fed_rows] = value
            key_cache, value_cache = key_value_views(kv_cache, layer.head_size)
            return tree_attention(
                query,
                key_cache,
                value_cache,
                node_key,
                node_value,
                block_tables=level.block_table,
                context_lens=level.context_lens,
                query_starts=level.query_starts,
                node_starts=level.node_starts,
                masks=level.masks,
                scale=layer.impl.scale,
                max_queries=level.max_queries,
                max_nodes=level.max_nodes,
                max_context=level.max_context,
                window=layer.sliding_window,
                softcap=layer.impl.logits_soft_cap or None,
                out=output,
            )

    return LevelAttention


def install(layers: dict[str, Any], subclass_of: Callable[[type], type]) -> None:
    """Give each layer's implementation a subclass of its class.

    Raises:
        ValueError: a layer's attention is of a kind that trees do not go with.
    """
    subclasses: dict[type, type] = {}
    for name, layer in layers.items():
        backend = layer.attn_backend.get_name()
        impl = layer.impl
        if backend not in BACKENDS:
            raise ValueError(
                f"adaptivespec works with the attention backends {', '.join(sorted(BACKENDS))}, but layer {name} has "
                f"{backend}; choose one with --attention-backend."
            )
        unsupported = [
            what
            for what, there in (
                ("ALiBi", getattr(impl, "alibi_slopes", None) is not None),
                ("attention sinks", getattr(impl, "sinks", None) is not None),
                ("a KV cache shared with another layer", layer.kv_sharing_target_layer_name is not None),
                (f"heads of size {layer.head_size}", layer.head_size not in HEAD_SIZES),
                ("values of another size than keys", layer.head_size_v != layer.head_size),
            )
            if there
        ]
        if unsupported:
            raise ValueError(f"adaptivespec does not support {unsupported[0]}, which layer {name} has.")
        stock = type(impl)
        if stock not in subclasses:
            subclasses[stock] = subclass_of(stock)
        impl.__class__ = subclasses[stock]
