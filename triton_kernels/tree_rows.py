"""Trees by request slot and the flat rows of a verification batch. The twin is ``core.store.TreeStore``."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import triton
import triton.language as tl

from .checks import INTS, check_starts, check_tensor, require

BLOCK = 128
"""Rows of one program."""
MAX_TREE = 63
"""Nodes of a tree that fits, with its root, the bits of one word."""


class SlotTrees(Protocol):
    """Trees of all request slots, as ``core.store.TreeStore`` has them."""

    parents: torch.Tensor
    masks: torch.Tensor
    depths: torch.Tensor
    num_nodes: torch.Tensor
    path: torch.Tensor
    path_len: torch.Tensor


class VerifiedRows(NamedTuple):
    """What acceptance needs of every row, ``[num_rows]`` each."""

    positions: torch.Tensor
    """int64: of a chain's row, moved to the node's depth."""
    tokens: torch.Tensor
    """The nodes' tokens; -1 for roots and padding, which nothing matches."""
    parents: torch.Tensor
    """int32 node, -1 for the root's children, roots and padding."""


@triton.jit
def _row(slots, local_positions, num_nodes, depths, at, in_batch, max_nodes):
    """Slot, local index, whether it is a node, where the node's entry is, and its depth."""
    slot = tl.load(slots + at, mask=in_batch, other=0).to(tl.int64)
    local = tl.load(local_positions + at, mask=in_batch, other=0).to(tl.int64)
    is_node = in_batch & (local > 0) & (local <= tl.load(num_nodes + slot, mask=in_batch, other=0))
    entry = slot * max_nodes + local - 1
    depth = tl.where(is_node, tl.load(depths + entry, mask=is_node, other=0), tl.minimum(local, 1))
    return slot, local, is_node, entry, depth.to(tl.int64)


@triton.jit
def _stage_kernel(
    slots,
    local_positions,
    rows,
    num_nodes,
    depths,
    masks,
    row_masks,
    positions,
    shifts,
    num_rows,
    max_nodes,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_batch = at < num_rows
    _, local, is_node, entry, depth = _row(slots, local_positions, num_nodes, depths, at, in_batch, max_nodes)
    word = tl.load(masks + entry, mask=is_node, other=0) << 1
    own = tl.full((BLOCK,), 1, tl.int64) << local
    row = tl.load(rows + at, mask=in_batch, other=0)
    tl.store(row_masks + row, tl.where(is_node, word, own) | 1, mask=in_batch)
    shift = depth - local
    tl.store(positions + row, tl.load(positions + row, mask=in_batch, other=0) + shift, mask=in_batch)
    tl.store(shifts + at, shift, mask=in_batch)


@triton.jit
def _verify_kernel(
    slots,
    local_positions,
    chain_positions,
    draft_tokens,
    num_nodes,
    depths,
    parents,
    positions_out,
    tokens_out,
    parents_out,
    num_rows,
    max_nodes,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_batch = at < num_rows
    _, local, is_node, entry, depth = _row(slots, local_positions, num_nodes, depths, at, in_batch, max_nodes)
    position = tl.load(chain_positions + at, mask=in_batch, other=0)
    tl.store(positions_out + at, position + depth - local, mask=in_batch)
    token = tl.load(draft_tokens + at, mask=is_node, other=-1)
    tl.store(tokens_out + at, token, mask=in_batch)
    tl.store(parents_out + at, tl.load(parents + entry, mask=is_node, other=-1), mask=in_batch)


@triton.jit
def _path_kernel(slots, local_positions, path, path_len, rows, out, num_rows, max_nodes, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_batch = at < num_rows
    slot = tl.load(slots + at, mask=in_batch, other=0).to(tl.int64)
    local = tl.load(local_positions + at, mask=in_batch, other=0).to(tl.int64)
    on_path = in_batch & (local > 0) & (local <= tl.load(path_len + slot, mask=in_batch, other=0))
    node = tl.load(path + slot * max_nodes + local - 1, mask=on_path, other=0).to(tl.int64)
    row = tl.load(rows + at, mask=in_batch, other=0)
    tl.store(out + at, row + tl.where(on_path, node + 1 - local, 0), mask=in_batch)


def _check_rows(trees: SlotTrees, slots: torch.Tensor, local: torch.Tensor) -> tuple[int, int]:
    num_rows = len(slots)
    check_tensor("slots", slots, (num_rows,), (torch.int64,), slots.device)
    check_tensor("local", local, (num_rows,), INTS, slots.device)
    num_slots, max_nodes = trees.parents.shape
    require(1 <= max_nodes <= MAX_TREE, f"trees must have 1 to {MAX_TREE} nodes, have {max_nodes}")
    check_tensor("trees.parents", trees.parents, (num_slots, max_nodes), (torch.int32,), slots.device)
    check_tensor("trees.masks", trees.masks, (num_slots, max_nodes), (torch.int64,), slots.device)
    check_tensor("trees.depths", trees.depths, (num_slots, max_nodes), (torch.int32,), slots.device)
    check_tensor("trees.path", trees.path, (num_slots, max_nodes), (torch.int32,), slots.device)
    check_tensor("trees.num_nodes", trees.num_nodes, (num_slots,), (torch.int32,), slots.device)
    check_tensor("trees.path_len", trees.path_len, (num_slots,), (torch.int32,), slots.device)
    return num_rows, max_nodes


def stage_rows(
    trees: SlotTrees,
    slots: torch.Tensor,
    local: torch.Tensor,
    rows: torch.Tensor,
    row_masks: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Prepare a target pass: attention masks and depth positions of the batch's rows, in place.

    Args:
        slots: ``[num_rows]`` int64 request slot of each row; rows of a request are consecutive.
        local: ``[num_rows]`` int32/int64 its place among its request's: 0 is the root, ``n + 1`` node ``n``.
        rows: ``[num_rows]`` int64 distinct indices into the next two.
        row_masks: ``[num_tokens]`` int64: becomes bits over the request's rows that the row may attend to.
        positions: ``[num_tokens]`` int64 of a chain: moved to depths.

    Returns:
        ``[num_rows]`` int64 what was added to the positions.

    Raises:
        ValueError: names the argument that does not fit.
    """
    num_rows, max_nodes = _check_rows(trees, slots, local)
    device = slots.device
    check_tensor("rows", rows, (num_rows,), (torch.int64,), device)
    check_tensor("row_masks", row_masks, (None,), (torch.int64,), device)
    check_tensor("positions", positions, (None,), (torch.int64,), device)
    shifts = torch.empty_like(rows)
    if num_rows:
        _stage_kernel[(triton.cdiv(num_rows, BLOCK),)](
            slots,
            local,
            rows,
            trees.num_nodes,
            trees.depths,
            trees.masks,
            row_masks,
            positions,
            shifts,
            num_rows,
            max_nodes,
            BLOCK=BLOCK,
            num_warps=4,
        )
    return shifts


def verify_rows(
    trees: SlotTrees,
    slots: torch.Tensor,
    local: torch.Tensor,
    positions: torch.Tensor,
    draft_tokens: torch.Tensor,
) -> VerifiedRows:
    """What acceptance needs of each row.

    Args:
        slots, local: as in ``stage_rows``.
        positions: ``[num_rows]`` int64 of a chain.
        draft_tokens: ``[num_rows]`` int32/int64 token of each row; negative where it must not be accepted.

    Raises:
        ValueError: names the argument that does not fit.
    """
    num_rows, max_nodes = _check_rows(trees, slots, local)
    device = slots.device
    check_tensor("positions", positions, (num_rows,), (torch.int64,), device)
    check_tensor("draft_tokens", draft_tokens, (num_rows,), INTS, device)
    result = VerifiedRows(
        torch.empty_like(positions),
        torch.empty_like(draft_tokens),
        torch.empty(num_rows, dtype=torch.int32, device=device),
    )
    if num_rows:
        _verify_kernel[(triton.cdiv(num_rows, BLOCK),)](
            slots,
            local,
            positions,
            draft_tokens,
            trees.num_nodes,
            trees.depths,
            trees.parents,
            *result,
            num_rows,
            max_nodes,
            BLOCK=BLOCK,
            num_warps=4,
        )
    return result


def path_rows(trees: SlotTrees, slots: torch.Tensor, local: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Where each row of a plain sequence is found in the verified tree.

    Args:
        slots, local: as in ``stage_rows``.
        rows: ``[num_rows]`` int64 index of each row.

    Returns:
        ``[num_rows]`` int64: the ``k``-th accepted node's row for the row with local index ``k``, and its own for the
        root and for what lies beyond the accepted path.

    Raises:
        ValueError: names the argument that does not fit.
    """
    num_rows, max_nodes = _check_rows(trees, slots, local)
    check_tensor("rows", rows, (num_rows,), (torch.int64,), slots.device)
    out = torch.empty_like(rows)
    if num_rows:
        _path_kernel[(triton.cdiv(num_rows, BLOCK),)](
            slots,
            local,
            trees.path,
            trees.path_len,
            rows,
            out,
            num_rows,
            max_nodes,
            BLOCK=BLOCK,
            num_warps=4,
        )
    return out


class Histories(Protocol):
    """Acceptance histories by slot, as ``core.policy.HistoryBatch`` has them."""

    rates: torch.Tensor
    misses: torch.Tensor


class Totals(Protocol):
    """Running totals, as ``core.totals.DeviceTotals`` has them."""

    sums: torch.Tensor
    shapes: torch.Tensor
    margins: torch.Tensor
    edges: torch.Tensor


@triton.jit
def _record_kernel(
    slots,
    row_starts,
    path,
    num_emitted,
    promoted,
    first_margin,
    depths,
    num_nodes,
    path_out,
    path_len_out,
    rates,
    misses,
    constants,
    reset_after,
    sums,
    shapes,
    margins,
    edges,
    max_nodes,
    max_depth,
    num_edges,
    NODES: tl.constexpr,
    EDGES: tl.constexpr,
):
    """One request: keep its path, its history, and count it."""
    request = tl.program_id(0)
    slot = tl.load(slots + request).to(tl.int64)
    scheduled = tl.load(row_starts + request + 1) - tl.load(row_starts + request) - 1
    lane = tl.arange(0, NODES)
    node = tl.load(path + request * max_nodes + lane, mask=lane < max_nodes, other=-1)
    tl.store(path_out + slot * max_nodes + lane, node, mask=lane < max_nodes)
    emitted = tl.load(num_emitted + request)
    accepted = emitted - 1
    tl.store(path_len_out + slot, accepted)
    depth_of = tl.load(depths + slot * max_nodes + lane, mask=lane < tl.minimum(scheduled, max_nodes), other=0)
    depth = tl.max(depth_of, axis=0)
    nodes = tl.minimum(scheduled, tl.load(num_nodes + slot))
    if depth > 0:
        decay = tl.load(constants)
        start = tl.load(constants + 1)
        old = tl.load(rates + slot)
        rate = old + decay * (accepted.to(tl.float64) / depth.to(tl.float64) - old)
        missed = tl.where(accepted > 0, 0, tl.load(misses + slot) + 1)
        anew = missed >= reset_after
        tl.store(rates + slot, tl.where(anew, start, rate))
        tl.store(misses + slot, tl.where(anew, 0, missed))
    if nodes > 0:
        bit = tl.arange(0, 64).to(tl.int64)
        promotions = tl.sum((tl.load(promoted + request) >> bit) & 1, axis=0)
        tl.atomic_add(sums, 1)
        tl.atomic_add(sums + 1, nodes.to(tl.int64))
        tl.atomic_add(sums + 2, accepted.to(tl.int64))
        tl.atomic_add(sums + 3, promotions)
        tl.atomic_add(sums + 4, emitted.to(tl.int64))
        tl.atomic_add(sums + 5, depth.to(tl.int64))
        tl.atomic_add(sums + 6, (depth == nodes).to(tl.int64))
        tl.atomic_add(shapes + tl.minimum(depth, max_depth) * (max_nodes + 1) + nodes, 1)
        margin = tl.load(first_margin + request)
        if margin == margin:
            edge = tl.arange(0, EDGES)
            above = tl.load(edges + edge, mask=edge < num_edges, other=float("inf")) <= tl.exp(margin)
            tl.atomic_add(margins + tl.sum(above.to(tl.int32), axis=0), 1)


def record_step(
    trees: SlotTrees,
    history: Histories,
    constants: torch.Tensor,
    reset_after: int,
    totals: Totals,
    slots: torch.Tensor,
    row_starts: torch.Tensor,
    *,
    path: torch.Tensor,
    num_emitted: torch.Tensor,
    promoted: torch.Tensor,
    first_margin: torch.Tensor,
) -> None:
    """Keep what a verification said: each slot's path, its acceptance history, and the running totals, in place.

    The twins are ``core.policy.HistoryBatch.observe`` and ``core.totals.DeviceTotals.observe``.

    Args:
        constants: ``[2]`` float64 weight of the newest step, and the rate a history starts with.
        reset_after: steps in a row with nothing accepted that start a history anew.
        slots: ``[num_requests]`` int64, distinct.
        row_starts: ``[num_requests + 1]`` int32: a request's rows are its root and its scheduled nodes.
        path, num_emitted, promoted, first_margin: from ``margin_acceptance``.

    Raises:
        ValueError: names the argument that does not fit.
    """
    device = slots.device
    num_requests = check_starts("row_starts", row_starts, device)
    check_tensor("slots", slots, (num_requests,), (torch.int64,), device)
    num_slots, max_nodes = trees.path.shape
    check_tensor("path", path, (num_requests, max_nodes), (torch.int32,), device)
    check_tensor("num_emitted", num_emitted, (num_requests,), (torch.int32,), device)
    check_tensor("promoted", promoted, (num_requests,), (torch.int64,), device)
    check_tensor("first_margin", first_margin, (num_requests,), (torch.float32,), device)
    check_tensor("history.rates", history.rates, (num_slots,), (torch.float64,), device)
    check_tensor("history.misses", history.misses, (num_slots,), (torch.int32,), device)
    check_tensor("constants", constants, (2,), (torch.float64,), device)
    check_tensor("totals.shapes", totals.shapes, (None, max_nodes + 1), (torch.int64,), device)
    check_tensor("totals.sums", totals.sums, (7,), (torch.int64,), device)
    num_edges = len(totals.edges)
    check_tensor("totals.margins", totals.margins, (num_edges + 1,), (torch.int64,), device)
    if num_requests == 0:
        return
    _record_kernel[(num_requests,)](
        slots,
        row_starts,
        path,
        num_emitted,
        promoted,
        first_margin,
        trees.depths,
        trees.num_nodes,
        trees.path,
        trees.path_len,
        history.rates,
        history.misses,
        constants,
        reset_after,
        totals.sums,
        totals.shapes,
        totals.margins,
        totals.edges,
        max_nodes,
        totals.shapes.shape[0] - 1,
        num_edges,
        NODES=triton.next_power_of_2(max_nodes),
        EDGES=triton.next_power_of_2(num_edges),
        num_warps=1,
    )
