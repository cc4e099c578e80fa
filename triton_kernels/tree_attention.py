"""Attention of tree rows over a paged prefix and the tree's nodes. The twin is ``core.attention.tree_attention``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .checks import FLOATS, check_starts, check_tensor, require
from .limits import MAX_NODES

HEAD_SIZES = (64, 80, 96, 128, 160, 192, 256)
PAGE_SIZES = (16, 32, 64, 128)
MIN_SPLIT = 256
"""Shortest part of a context that is worth a program of its own."""
MAX_SPLITS = 64
PROGRAMS_WANTED = 264
"""Two for each multiprocessor of an H200."""
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _popcount(word):
    """Set bits of non-negative or negative int64 words."""
    x = word.to(tl.uint64)
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    x = x + (x >> 8)
    x = x + (x >> 16)
    x = x + (x >> 32)
    return (x & 127).to(tl.int32)


@triton.jit
def _product(a, b, UPCAST: tl.constexpr):
    """Matrix product with float32 sums."""
    if UPCAST:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def _scores(query, key, scale, softcap, SOFTCAP: tl.constexpr, UPCAST: tl.constexpr):
    """Scores in units of log2, so that exp2 serves."""
    score = _product(query, key, UPCAST) * scale
    if SOFTCAP:
        # tanh(x) = 1 - 2 / (exp(2x) + 1)
        score = softcap * (1.0 - 2.0 / (tl.exp(2.0 * score / softcap) + 1.0))
    return score * LOG2_E


@triton.jit
def _update(score, value, top, total, sums, UPCAST: tl.constexpr):
    """One step of the online softmax; rows that have seen nothing yet keep -inf and zeros."""
    new_top = tl.maximum(top, tl.max(score, axis=1))
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    weight = tl.exp2(score - shift[:, None])
    rescale = tl.exp2(top - shift)
    total = total * rescale + tl.sum(weight, axis=1)
    sums = sums * rescale[:, None] + _product(weight.to(value.dtype), value, UPCAST)
    return new_top, total, sums


@triton.jit
def _attention_kernel(
    query,
    query_row_stride,
    query_head_stride,
    key_cache,
    key_block_stride,
    key_slot_stride,
    key_head_stride,
    value_cache,
    value_block_stride,
    value_slot_stride,
    value_head_stride,
    node_key,
    node_key_row_stride,
    node_key_head_stride,
    node_value,
    node_value_row_stride,
    node_value_head_stride,
    block_tables,
    table_stride,
    context_lens,
    query_starts,
    node_starts,
    masks,
    out,
    out_row_stride,
    out_head_stride,
    out_split_stride,
    log_sums,
    scale,
    softcap,
    window,
    num_rows,
    num_heads,
    num_splits,
    GROUP: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NODES: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SPLITS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One request, one key/value head, one part of the context; the last part takes the nodes too."""
    split = tl.program_id(0) % num_splits
    tile = tl.program_id(0) // num_splits
    kv_head = tl.program_id(1)
    request = tl.program_id(2)
    first_row = tl.load(query_starts + request)
    rows_here = tl.load(query_starts + request + 1) - first_row
    if tile * BLOCK_M >= rows_here * GROUP:
        return
    m = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    is_row = m < rows_here * GROUP
    row = (first_row + m // GROUP).to(tl.int64)
    head = kv_head * GROUP + m % GROUP
    d = tl.arange(0, BLOCK_D)
    in_head = d < HEAD_SIZE
    q = tl.load(
        query + row[:, None] * query_row_stride + head[:, None] * query_head_stride + d[None, :],
        mask=is_row[:, None] & in_head[None, :],
        other=0.0,
    )
    word = tl.load(masks + row, mask=is_row, other=0)
    depth = _popcount(word)

    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    sums = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)

    context = tl.load(context_lens + request)
    position = context - 1 + depth
    begin = 0
    if WINDOW:
        begin = tl.maximum(context - window, 0)
    part = tl.cdiv(tl.cdiv(context - begin, num_splits), BLOCK_N) * BLOCK_N
    start = begin + split * part
    end = tl.minimum(start + part, context)
    for first_key in range(start, end, BLOCK_N):
        n = first_key + tl.arange(0, BLOCK_N)
        in_part = n < end
        block = tl.load(block_tables + request * table_stride + n // PAGE, mask=in_part, other=0).to(tl.int64)
        key_at = block * key_block_stride + (n % PAGE) * key_slot_stride + kv_head * key_head_stride
        k = tl.load(key_cache + key_at[None, :] + d[:, None], mask=in_part[None, :] & in_head[:, None], other=0.0)
        score = _scores(q, k, scale, softcap, SOFTCAP, UPCAST)
        seen = is_row[:, None] & in_part[None, :]
        if WINDOW:
            seen = seen & (position[:, None] - n[None, :] < window)
        value_at = block * value_block_stride + (n % PAGE) * value_slot_stride + kv_head * value_head_stride
        v = tl.load(value_cache + value_at[:, None] + d[None, :], mask=in_part[:, None] & in_head[None, :], other=0.0)
        top, total, sums = _update(tl.where(seen, score, float("-inf")), v, top, total, sums, UPCAST)

    if split == num_splits - 1:
        first_node = tl.load(node_starts + request)
        num_nodes = tl.load(node_starts + request + 1) - first_node
        j = tl.arange(0, NODES)
        is_node = j < num_nodes
        at = (first_node + j).to(tl.int64)
        k = tl.load(
            node_key + at[None, :] * node_key_row_stride + kv_head * node_key_head_stride + d[:, None],
            mask=is_node[None, :] & in_head[:, None],
            other=0.0,
        )
        score = _scores(q, k, scale, softcap, SOFTCAP, UPCAST)
        bit = j.to(tl.int64)
        seen = (is_row[:, None] & is_node[None, :]) & (((word[:, None] >> bit[None, :]) & 1) == 1)
        if WINDOW:
            # Ancestors come before their descendants, so a visible node's depth is its rank among the visible.
            up_to = (tl.full((NODES,), 2, tl.int64) << bit) - 1
            node_depth = _popcount(word[:, None] & up_to[None, :])
            seen = seen & (depth[:, None] - node_depth < window)
        v = tl.load(
            node_value + at[:, None] * node_value_row_stride + kv_head * node_value_head_stride + d[None, :],
            mask=is_node[:, None] & in_head[None, :],
            other=0.0,
        )
        top, total, sums = _update(tl.where(seen, score, float("-inf")), v, top, total, sums, UPCAST)

    result = sums / tl.where(total > 0.0, total, 1.0)[:, None]
    out_at = (
        split.to(tl.int64) * out_split_stride
        + row[:, None] * out_row_stride
        + head[:, None] * out_head_stride
        + d[None, :]
    )
    tl.store(out + out_at, result.to(out.dtype.element_ty), mask=is_row[:, None] & in_head[None, :])
    if SPLITS:
        log_sum = tl.where(total > 0.0, top + tl.log2(tl.where(total > 0.0, total, 1.0)), float("-inf"))
        tl.store(log_sums + (split * num_rows + row) * num_heads + head, log_sum, mask=is_row)


@triton.jit
def _merge_kernel(
    parts,
    log_sums,
    query_starts,
    num_requests,
    out,
    out_row_stride,
    out_head_stride,
    num_rows,
    num_heads,
    num_splits,
    HEAD_SIZE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """One row and head: its parts weighted by their log-sum-exp."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    if row >= tl.load(query_starts + num_requests):
        return  # padding
    split = tl.arange(0, SPLITS)
    d = tl.arange(0, BLOCK_D)
    in_head = d < HEAD_SIZE
    at = (split * num_rows + row) * num_heads + head
    log_sum = tl.load(log_sums + at, mask=split < num_splits, other=float("-inf"))
    top = tl.max(log_sum, axis=0)
    weight = tl.exp2(log_sum - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weight, axis=0)
    part = tl.load(
        parts + at[:, None] * HEAD_SIZE + d[None, :],
        mask=(split < num_splits)[:, None] & in_head[None, :],
        other=0.0,
    )
    result = tl.sum(part * weight[:, None], axis=0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out + row * out_row_stride + head * out_head_stride + d, result.to(out.dtype.element_ty), mask=in_head)


INTERPRETED = not isinstance(_attention_kernel, triton.JITFunction)
"""Triton's interpreter keeps bfloat16 as integers and multiplies them as such, so there operands are converted."""


def launch_shape(max_queries: int, group: int, head_size: int, element_size: int) -> dict[str, int]:
    """Tile sizes and warps of the attention kernel: no spills in usual sizes, and within the chip's shared memory."""
    block_d = triton.next_power_of_2(head_size)
    if element_size == 4:  # no tensor cores at full precision: small tiles keep the sums in registers
        return {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_D": block_d, "num_warps": 4, "num_stages": 1}
    large = block_d > 128
    block_m = min(max(triton.next_power_of_2(max_queries * group), 16), 64 if large else 128)
    small_memory = torch.version.hip is not None  # 64 KiB on gfx942, more than twice that on NVIDIA's from sm_80 on
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": (16 if small_memory else 32) if large else 64,
        "BLOCK_D": block_d,
        "num_warps": 8 if large or block_m * block_d >= 128 * 128 else 4,
        "num_stages": 2,
    }


def splits_for(num_programs: int, max_context: int) -> int:
    """Parts of the context, so that small batches fill the device: a power of two, fixed by host-side bounds."""
    wanted = triton.next_power_of_2(triton.cdiv(PROGRAMS_WANTED, max(num_programs, 1)))
    possible = triton.next_power_of_2(max(max_context // MIN_SPLIT, 1))
    return max(min(wanted, possible, MAX_SPLITS), 1)


def tree_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    node_key: torch.Tensor,
    node_value: torch.Tensor,
    *,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    query_starts: torch.Tensor,
    node_starts: torch.Tensor,
    masks: torch.Tensor,
    scale: float,
    max_queries: int,
    max_nodes: int,
    max_context: int,
    window: int | None = None,
    softcap: float | None = None,
    num_splits: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``softmax(scale * q k^T + log m) v`` over a request's committed tokens and the nodes its mask names.

    A row sees all committed tokens (within the window) and node ``j`` of its request where bit ``j`` of its mask is
    set. In verification the rows are the root (mask 0: its key is committed) and all nodes (ancestors and
    themselves); in drafting they are a frontier over the nodes fed before and themselves. Rotary positions are applied
    already; a row's depth is the number of bits in its mask, its position ``context_len - 1 + depth``.

    One program per request, key/value head and part of the context loads each key once for all rows of the request (up
    to 128 rows times query heads per key/value head; beyond that, once for each 128). Reads
    ``2 * context * kv_heads * head_size`` elements per request; parts are merged by log-sum-exp.

    Args:
        query: ``[num_rows, heads, head_size]`` bfloat16 or float16, or float32 (exact, without tensor cores: for
            tests); rows of a request are consecutive.
        key_cache, value_cache: ``[num_blocks, block_size, kv_heads, head_size]`` views with any strides but the last:
            both of vLLM's FlashAttention layouts are such views. Block sizes are powers of two, 16 to 128.
        node_key, node_value: ``[num_node_rows, kv_heads, head_size]`` of the nodes themselves.
        block_tables: ``[num_requests, max_blocks]`` int32.
        context_lens: ``[num_requests]`` int32 committed tokens, the root included.
        query_starts: ``[num_requests + 1]`` int32. Rows past the last are padding: neither read nor written.
        node_starts: ``[num_requests + 1]`` int32 into the node rows.
        masks: ``[num_rows]`` int64 words; a node's ancestors have lower bits than the node.
        scale: factor of the scores, usually ``head_size ** -0.5``.
        max_queries, max_nodes, max_context: host-side bounds over the requests; ``max_nodes`` is 0 to 64.
        window: a row sees keys less than this many positions back (its own is 0 back).
        softcap: scores become ``softcap * tanh(score / softcap)``.
        num_splits: parts of the context; chosen from the bounds if None.
        out: ``[num_rows, heads, head_size]`` to write to.

    Returns:
        ``[num_rows, heads, head_size]`` in the query's dtype. A row that sees nothing gets zeros.

    Raises:
        ValueError: names the argument that does not fit.
    """
    device = query.device
    require(query.dim() == 3, f"query must have shape [num_rows, heads, head_size], is {list(query.shape)}")
    num_rows, num_heads, head_size = query.shape
    require(head_size in HEAD_SIZES, f"query: head sizes are {HEAD_SIZES}, is {head_size}")
    check_tensor("query", query, (num_rows, num_heads, head_size), FLOATS, device, contiguous=False)
    require(key_cache.dim() == 4, f"key_cache must have four dimensions, has {key_cache.dim()}")
    num_blocks, page, kv_heads, _ = key_cache.shape
    shape = (num_blocks, page, kv_heads, head_size)
    check_tensor("key_cache", key_cache, shape, (query.dtype,), device, contiguous=False)
    check_tensor("value_cache", value_cache, shape, (query.dtype,), device, contiguous=False)
    require(page in PAGE_SIZES, f"key_cache: block sizes are 16, 32, 64 or 128, is {page}")
    require(kv_heads > 0 and num_heads % kv_heads == 0, f"{num_heads} query heads cannot share {kv_heads} evenly")
    nodes_shape = (node_key.shape[0], kv_heads, head_size)
    check_tensor("node_key", node_key, nodes_shape, (query.dtype,), device, contiguous=False)
    check_tensor("node_value", node_value, nodes_shape, (query.dtype,), device, contiguous=False)
    num_requests = check_starts("query_starts", query_starts, device)
    check_tensor("node_starts", node_starts, (num_requests + 1,), (torch.int32,), device)
    check_tensor("context_lens", context_lens, (num_requests,), (torch.int32,), device)
    check_tensor("block_tables", block_tables, (num_requests, None), (torch.int32,), device, contiguous=False)
    check_tensor("masks", masks, (num_rows,), (torch.int64,), device)
    require(0 <= max_nodes <= MAX_NODES, f"max_nodes must be in 0 to {MAX_NODES}, is {max_nodes}")
    require(max_queries >= 1, f"max_queries must be positive, is {max_queries}")
    require(
        max_context <= block_tables.shape[1] * page,
        f"max_context is {max_context}, but block_tables name {block_tables.shape[1] * page} slots only",
    )
    require(window is None or window >= 1, f"window must be positive, is {window}")
    require(softcap is None or softcap > 0, f"softcap must be positive, is {softcap}")
    require(num_splits is None or 1 <= num_splits <= MAX_SPLITS, f"num_splits must be in 1 to {MAX_SPLITS}")
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=device)
    check_tensor("out", out, query.shape, (query.dtype,), device, contiguous=False)
    if num_rows == 0 or num_requests == 0:
        return out

    group = num_heads // kv_heads
    tiles = launch_shape(max_queries, group, head_size, query.element_size())
    num_tiles = triton.cdiv(max_queries * group, tiles["BLOCK_M"])
    if num_splits is None:
        num_splits = splits_for(num_requests * kv_heads * num_tiles, max_context)
    split = num_splits > 1
    parts, log_sums = out, out
    if split:
        parts = torch.empty((num_splits, num_rows, num_heads, head_size), dtype=torch.float32, device=device)
        log_sums = torch.empty((num_splits, num_rows, num_heads), dtype=torch.float32, device=device)
    _attention_kernel[(num_splits * num_tiles, kv_heads, num_requests)](
        query,
        *query.stride()[:2],
        key_cache,
        *key_cache.stride()[:3],
        value_cache,
        *value_cache.stride()[:3],
        node_key,
        *node_key.stride()[:2],
        node_value,
        *node_value.stride()[:2],
        block_tables,
        block_tables.stride(0),
        context_lens,
        query_starts,
        node_starts,
        masks,
        parts,
        *parts.stride()[-3:-1],
        parts.stride(0) if split else 0,
        log_sums,
        scale,
        softcap or 1.0,
        window or 0,
        num_rows,
        num_heads,
        num_splits,
        GROUP=group,
        HEAD_SIZE=head_size,
        NODES=max(triton.next_power_of_2(max_nodes), 32),  # the context's tiles are no narrower, so memory is shared
        PAGE=page,
        WINDOW=window is not None,
        SOFTCAP=softcap is not None,
        SPLITS=split,
        UPCAST=INTERPRETED,
        **tiles,
    )
    if split:
        _merge_kernel[(num_rows, num_heads)](
            parts,
            log_sums,
            query_starts,
            num_requests,
            out,
            *out.stride()[:2],
            num_rows,
            num_heads,
            num_splits,
            HEAD_SIZE=head_size,
            BLOCK_D=tiles["BLOCK_D"],
            SPLITS=triton.next_power_of_2(num_splits),
            num_warps=2,
        )
    return out
