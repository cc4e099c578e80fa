"""Commit of the accepted path's keys and values, all layers in one launch. The twin is ``core.commit.commit_path``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .checks import INTS, check_starts, check_tensor, require
from .limits import MAX_NODES

COLUMNS = 128
"""Elements of a token's keys or values that one program moves."""
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


class LayerCaches:
    """Addresses of all layers' caches, for kernels that serve every layer.

    Args:
        caches: keys' and values' caches of each layer, ``[num_blocks, block_size, kv_heads, head_size]`` views, all
            with the same shape, strides and dtype. They must stay alive and in place.

    Raises:
        ValueError: they differ.
    """

    def __init__(self, caches: Sequence[torch.Tensor]) -> None:
        require(len(caches) > 0, "caches must not be empty")
        first = caches[0]
        for i, cache in enumerate(caches):
            check_tensor(f"caches[{i}]", cache, first.shape, (first.dtype,), first.device, contiguous=False)
            same = cache.stride() == first.stride()
            require(same, f"caches[{i}] must have strides {first.stride()}, has {cache.stride()}")
        require(first.dim() == 4, f"caches must have four dimensions, have {first.dim()}")
        require(first.element_size() in WORDS, f"caches of {first.element_size()} bytes an element")
        self.caches = list(caches)
        self.layout = first
        self.aligned = all(c.data_ptr() % 16 == 0 for c in caches)
        self.addresses = torch.tensor([c.data_ptr() for c in caches], dtype=torch.int64, device=first.device)


@triton.jit
def _commit_kernel(
    like,
    addresses,
    block_stride,
    slot_stride,
    head_stride,
    slots,
    row_starts,
    path,
    path_stride,
    num_accepted,
    max_nodes,
    kv_heads,
    HEAD_SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    NODES: tl.constexpr,
    COLUMNS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One request, one cache, some columns: read the whole path's, then write it."""
    request = tl.program_id(0)
    count = tl.minimum(tl.load(num_accepted + request), max_nodes)
    if count <= 0:
        return
    step = tl.arange(0, NODES)
    accepted = step < count
    node = tl.load(path + request * path_stride + step, mask=accepted, other=0)
    if tl.sum((accepted & (node != step)).to(tl.int32), axis=0) == 0:
        return  # every accepted node lies at its place already
    first = tl.load(row_starts + request) + 1
    source = tl.load(slots + first + node, mask=accepted, other=-1).to(tl.int64)
    target = tl.load(slots + first + step, mask=accepted, other=-1).to(tl.int64)
    moves = accepted & (node != step) & (source >= 0) & (target >= 0)

    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    in_token = column < kv_heads * HEAD_SIZE
    offset = (column // HEAD_SIZE) * head_stride + column % HEAD_SIZE
    cache = tl.load(addresses + tl.program_id(1)).to(like.dtype)
    if ALIGNED:
        cache = tl.multiple_of(cache, 16)
    source_at = (source // PAGE) * block_stride + (source % PAGE) * slot_stride
    target_at = (target // PAGE) * block_stride + (target % PAGE) * slot_stride
    mask = moves[:, None] & in_token[None, :]
    values = tl.load(cache + source_at[:, None] + offset[None, :], mask=mask)
    tl.debug_barrier()  # a target may be another node's source
    tl.store(cache + target_at[:, None] + offset[None, :], values, mask=mask)


def kv_commit(
    caches: LayerCaches,
    slots: torch.Tensor,
    row_starts: torch.Tensor,
    path: torch.Tensor,
    num_accepted: torch.Tensor,
) -> None:
    """Move the accepted path's keys and values to the slots of a plain sequence, in every cache at once.

    For accepted node ``path[i]``: ``cache[slots[root + 1 + i]] = cache[slots[root + 1 + path[i]]]``, bit for bit, as if
    all were read before any is written; nothing else is touched. Rotary positions need no change: a node's depth is its
    final place. Moves ``2 * elements`` per accepted node that is not in place, cache and token.

    Args:
        caches: of all layers, keys and values.
        slots: ``[num_rows]`` int32/int64 slot each row was written to; -1: none.
        row_starts: ``[num_requests + 1]`` int32; a request's root row, then its nodes' rows.
        path: ``[num_requests, max_nodes]`` int32 accepted nodes, from ``margin_acceptance``.
        num_accepted: ``[num_requests]`` int32 entries of ``path`` in use; 0 or less: none.

    Raises:
        ValueError: names the argument that does not fit.
    """
    layout = caches.layout
    device = layout.device
    num_requests = check_starts("row_starts", row_starts, device)
    check_tensor("slots", slots, (None,), INTS, device)
    check_tensor("path", path, (num_requests, None), (torch.int32,), device, contiguous=False)
    check_tensor("num_accepted", num_accepted, (num_requests,), (torch.int32,), device)
    max_nodes = path.shape[1]
    require(1 <= max_nodes <= MAX_NODES, f"path: 1 to {MAX_NODES} nodes, is {max_nodes}")
    if num_requests == 0:
        return
    _, page, kv_heads, head_size = layout.shape
    _commit_kernel[(num_requests, len(caches.caches), triton.cdiv(kv_heads * head_size, COLUMNS))](
        layout.view(WORDS[layout.element_size()]),
        caches.addresses,
        *layout.stride()[:3],
        slots,
        row_starts,
        path,
        path.stride(0),
        num_accepted,
        max_nodes,
        kv_heads,
        HEAD_SIZE=head_size,
        PAGE=page,
        NODES=triton.next_power_of_2(max_nodes),
        COLUMNS=COLUMNS,
        ALIGNED=caches.aligned,
        num_warps=4,
    )
