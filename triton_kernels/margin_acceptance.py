"""Acceptance on the device: target choices, margins and the walk through every request's tree.

The twin is ``core.rows.accept_rows``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .checks import FLOATS, INTS, check_starts, check_tensor, require
from .limits import MAX_NODES, MAX_VOCAB, NOT_A_TOKEN, split_of
from .noise import gumbel_noise


class Acceptance(NamedTuple):
    """Result of the walk, by request; entries past a request's count are -1."""

    path: torch.Tensor
    """``[num_requests, max_nodes]`` int32 accepted nodes, root side first."""
    emitted: torch.Tensor
    """``[num_requests, max_nodes + 1]`` int64 accepted tokens, then the target's own last one."""
    num_emitted: torch.Tensor
    """``[num_requests]`` int32; 0 for requests without rows, else accepted nodes + 1."""
    promoted: torch.Tensor
    """``[num_requests]`` int64; bit ``i`` is set where ``emitted[i]`` was promoted by the margin rule."""
    first_margin: torch.Tensor
    """``[num_requests]`` float32 best child's log ratio where the target's choice first had no child; NaN: nowhere."""


@triton.jit
def _best(value, token, axis: tl.constexpr):
    """Greatest value along an axis and the lowest token that has it; NaN is greatest."""
    is_nan = value != value
    any_nan = tl.max(is_nan.to(tl.int32), axis=axis) > 0
    top = tl.max(tl.where(is_nan, float("-inf"), value), axis=axis)
    holds = tl.where(tl.expand_dims(any_nan, axis), is_nan, value == tl.expand_dims(top, axis))
    first = tl.min(tl.where(holds, token, NOT_A_TOKEN), axis=axis)
    return tl.where(any_nan, float("nan"), top), first


@triton.jit
def _row_kernel(
    logits,
    logits_stride,
    row_starts,
    num_requests,
    temperatures,
    seeds,
    positions,
    row_max,
    choice_value,
    choice,
    num_rows,
    vocab,
    SPLIT: tl.constexpr,
    REQUESTS: tl.constexpr,
    SAMPLED: tl.constexpr,
):
    """One split of one row: its maximum, and the best (noised) logit with its token."""
    row = tl.program_id(0)
    split = tl.program_id(1)
    if row >= tl.load(row_starts + num_requests):
        return  # padding
    token = split * SPLIT + tl.arange(0, SPLIT)
    value = tl.load(logits + row.to(tl.int64) * logits_stride + token, mask=token < vocab, other=float("-inf"))
    value = value.to(tl.float32)
    out = split * num_rows + row
    top, top_token = _best(value, token, 0)
    tl.store(row_max + out, top)
    if SAMPLED:
        request = tl.arange(0, REQUESTS)
        ends = tl.load(row_starts + 1 + request, mask=request < num_requests, other=NOT_A_TOKEN)
        request_of_row = tl.sum((ends <= row).to(tl.int32), axis=0)
        if tl.load(temperatures + request_of_row) > 0.0:
            seed = tl.load(seeds + request_of_row)
            position = tl.load(positions + row).to(tl.int32)
            top, top_token = _best(value + gumbel_noise(seed, position, split * (SPLIT // 4), SPLIT // 4), token, 0)
        tl.store(choice_value + out, top)
    tl.store(choice + out, top_token)


@triton.jit
def _walk_kernel(
    logits,
    logits_stride,
    row_max,
    choice_value,
    choice,
    given_choices,
    row_starts,
    tokens,
    parents,
    log_kappas,
    max_promotions,
    protected,
    path_out,
    emitted_out,
    num_emitted_out,
    promoted_out,
    first_margin_out,
    num_rows,
    num_splits,
    vocab,
    max_nodes,
    num_protected,
    NODES: tl.constexpr,
    SPLITS: tl.constexpr,
    PROTECTED: tl.constexpr,
    GIVEN: tl.constexpr,
    SAMPLED: tl.constexpr,
):
    """One request: reduce its rows' splits, then walk its tree."""
    request = tl.program_id(0)
    root_row = tl.load(row_starts + request)
    num_nodes = tl.load(row_starts + request + 1) - root_row - 1
    lane = tl.arange(0, NODES)
    is_node = lane < tl.minimum(num_nodes, max_nodes)
    token = tl.load(tokens + root_row + 1 + lane, mask=is_node, other=-1).to(tl.int32)
    parent = tl.load(parents + root_row + 1 + lane, mask=is_node, other=-2).to(tl.int32)

    split = tl.arange(0, SPLITS)
    in_row = split < tl.where(num_nodes >= 0, num_splits, 0)
    at_root = split * num_rows + root_row
    root_token = tl.load(choice + at_root, mask=in_row, other=NOT_A_TOKEN)
    root_max, root_choice = _best(tl.load(row_max + at_root, mask=in_row, other=float("-inf")), root_token, 0)
    at_node = split[None, :] * num_rows + root_row + 1 + lane[:, None]
    seen = is_node[:, None] & in_row[None, :]
    node_token = tl.load(choice + at_node, mask=seen, other=NOT_A_TOKEN)
    node_max, node_choice = _best(tl.load(row_max + at_node, mask=seen, other=float("-inf")), node_token, 1)
    if SAMPLED:
        _, root_choice = _best(tl.load(choice_value + at_root, mask=in_row, other=float("-inf")), root_token, 0)
        _, node_choice = _best(tl.load(choice_value + at_node, mask=seen, other=float("-inf")), node_token, 1)
    if GIVEN:
        root_choice = tl.load(given_choices + root_row, mask=num_nodes >= 0, other=-1).to(tl.int32)
        node_choice = tl.load(given_choices + root_row + 1 + lane, mask=is_node, other=-1).to(tl.int32)

    # Log ratio of every node's token at its parent's row.
    is_parent = parent[:, None] == lane[None, :]
    parent_max = tl.sum(tl.where(is_parent, node_max[None, :], 0.0), axis=1)
    parent_max = tl.where(parent == -1, root_max, parent_max)
    parent_row = (root_row + 1 + parent).to(tl.int64)
    in_vocab = is_node & (token >= 0) & (token < vocab)
    drafted = tl.load(logits + parent_row * logits_stride + token, mask=in_vocab, other=float("-inf")).to(tl.float32)
    ratio = drafted - parent_max
    ratio = tl.where(ratio == ratio, ratio, float("-inf"))

    log_kappa = tl.load(log_kappas + request)
    limit = tl.load(max_promotions + request)
    listed = tl.arange(0, PROTECTED)
    stops = tl.load(protected + request * num_protected + listed, mask=listed < num_protected, other=-1).to(tl.int32)
    may_pass = (ratio >= log_kappa) & (ratio > float("-inf"))  # a masked token never passes, whatever kappa
    may_pass = may_pass & (tl.sum((token[:, None] == stops[None, :]).to(tl.int32), axis=1) == 0)

    node = tl.full((), -1, tl.int32)
    count = tl.full((), 0, tl.int32)
    promotions = tl.full((), 0, tl.int32)
    promoted = tl.full((), 0, tl.int64)
    margin = tl.full((), float("nan"), tl.float32)
    last = tl.full((), -1, tl.int32)
    path = tl.full((NODES,), -1, tl.int32)
    emitted = tl.full((NODES,), -1, tl.int32)
    active = num_nodes >= 0
    while active:
        target = tl.where(node < 0, root_choice, tl.sum(tl.where(lane == node, node_choice, 0), axis=0))
        is_child = is_node & (parent == node)
        child = tl.min(tl.where(is_child & (token == target), lane, NODES), axis=0)
        if (child == NODES) & (tl.max(is_child.to(tl.int32), axis=0) > 0):
            best = tl.max(tl.where(is_child, ratio, float("-inf")), axis=0)
            margin = tl.where(margin == margin, margin, best)
            allowed = (log_kappa < 0.0) & ((limit < 0) | (promotions < limit))
            allowed = allowed & (tl.sum((stops == target).to(tl.int32), axis=0) == 0)
            passes = is_child & may_pass & (lane < tl.where(allowed, NODES, 0))
            best = tl.max(tl.where(passes, ratio, float("-inf")), axis=0)
            child = tl.min(tl.where(passes & (ratio == best), lane, NODES), axis=0)
            if child < NODES:
                promotions += 1
                promoted = promoted | (tl.full((), 1, tl.int64) << count.to(tl.int64))
        if child < NODES:
            path = tl.where(lane == count, child, path)
            emitted = tl.where(lane == count, tl.sum(tl.where(lane == child, token, 0), axis=0), emitted)
            count += 1
            node = child
        else:
            last = target
            active = node != node

    emitted = tl.where(lane == count, last, emitted)
    tl.store(path_out + request * max_nodes + lane, path, mask=lane < max_nodes)
    line = emitted_out + request * (max_nodes + 1)
    tl.store(line + lane, emitted.to(tl.int64), mask=lane < max_nodes)
    tl.store(line + max_nodes, tl.where(count == max_nodes, last, -1).to(tl.int64))
    tl.store(num_emitted_out + request, tl.where(num_nodes >= 0, count + 1, 0))
    tl.store(promoted_out + request, promoted)
    tl.store(first_margin_out + request, margin)


def margin_acceptance(
    logits: torch.Tensor,
    row_starts: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    log_kappas: torch.Tensor,
    *,
    max_nodes: int,
    max_promotions: torch.Tensor,
    protected: torch.Tensor,
    temperatures: torch.Tensor | None = None,
    seeds: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    choices: torch.Tensor | None = None,
) -> Acceptance:
    """Walk every request's tree from its root, by exact match first and the margin rule where nothing matches.

    At a node whose row of processed logits is ``z``, the target's token is ``x = argmax(z)`` at temperature 0 and
    ``argmax(z + g)`` above, ``g`` being Gumbel noise keyed by seed, position and token, so that one noise vector is
    used per emitted token whatever the tree. The child carrying ``x`` is taken; else, with ``log kappa < 0``, the
    child with the greatest ``z[token] - max(z) >= log kappa``; else ``x`` ends the step (arXiv 2609.02897).

    Each logit is read once (plus one per drafted node): ``num_rows * vocab`` elements. The walk is one program per
    request, its steps are reductions in registers.

    Args:
        logits: ``[num_rows, vocab]`` float32, bfloat16 or float16, processed (temperature, penalties, masks); a
            request's rows are consecutive, its root's first, then one per node.
        row_starts: ``[num_requests + 1]`` int32. Rows past the last are padding and not read.
        tokens: ``[num_rows]`` int32/int64 token of each row's node (roots' entries are not read); negative: no match.
        parents: ``[num_rows]`` int32 parent node of each row's node, -1 for children of the root.
        log_kappas: ``[num_requests]`` float32 ``log kappa``; 0 switches the margin rule off.
        max_nodes: most nodes of any request, 1 to 64; a request's nodes past that are left out.
        max_promotions: ``[num_requests]`` int32 per step; negative for no limit.
        protected: ``[num_requests, any]`` int32/int64 tokens never promoted to or away from, padded with -1.
        temperatures: ``[num_requests]`` float32; None where all are 0. Only its sign is used.
        seeds: ``[num_requests]`` int64, with ``temperatures``.
        positions: ``[num_rows]`` int32/int64 position of each row's token (root position + depth), likewise.
        choices: ``[num_rows]`` int32/int64 the target's tokens, where the caller has sampled them already.

    Returns:
        See ``Acceptance``. Ties go to the lowest id. A row with NaN never promotes and chooses its first NaN.

    Raises:
        ValueError: names the argument that does not fit.
    """
    device = logits.device
    require(logits.dim() == 2, f"logits must have shape [num_rows, vocab], is {list(logits.shape)}")
    num_rows, vocab = logits.shape
    check_tensor("logits", logits, (num_rows, vocab), FLOATS, device, contiguous=False)
    require(0 < vocab <= MAX_VOCAB, f"logits: vocabularies of 1 to {MAX_VOCAB} tokens, is {vocab}")
    require(1 <= max_nodes <= MAX_NODES, f"max_nodes must be in 1 to {MAX_NODES}, is {max_nodes}")
    num_requests = check_starts("row_starts", row_starts, device)
    check_tensor("tokens", tokens, (num_rows,), INTS, device)
    check_tensor("parents", parents, (num_rows,), (torch.int32,), device)
    check_tensor("log_kappas", log_kappas, (num_requests,), (torch.float32,), device)
    check_tensor("max_promotions", max_promotions, (num_requests,), (torch.int32,), device)
    check_tensor("protected", protected, (num_requests, None), INTS, device)
    sampled = temperatures is not None and choices is None
    if temperatures is not None:
        require(seeds is not None and positions is not None, "temperatures need seeds and positions")
        assert seeds is not None
        assert positions is not None
        check_tensor("temperatures", temperatures, (num_requests,), (torch.float32,), device)
        check_tensor("seeds", seeds, (num_requests,), (torch.int64,), device)
        check_tensor("positions", positions, (num_rows,), INTS, device)
    if choices is not None:
        check_tensor("choices", choices, (num_rows,), INTS, device)

    split = split_of(vocab)
    num_splits = triton.cdiv(vocab, split)
    row_max = torch.empty((num_splits, num_rows), dtype=torch.float32, device=device)
    choice_value = torch.empty_like(row_max) if sampled else row_max
    choice = torch.empty((num_splits, num_rows), dtype=torch.int32, device=device)
    result = Acceptance(
        path=torch.empty((num_requests, max_nodes), dtype=torch.int32, device=device),
        emitted=torch.empty((num_requests, max_nodes + 1), dtype=torch.int64, device=device),
        num_emitted=torch.empty(num_requests, dtype=torch.int32, device=device),
        promoted=torch.empty(num_requests, dtype=torch.int64, device=device),
        first_margin=torch.empty(num_requests, dtype=torch.float32, device=device),
    )
    if num_requests == 0:
        return result
    unused = row_starts
    if num_rows:
        _row_kernel[(num_rows, num_splits)](
            logits,
            logits.stride(0),
            row_starts,
            num_requests,
            temperatures if sampled else unused,
            seeds if sampled else unused,
            positions if sampled else unused,
            row_max,
            choice_value,
            choice,
            num_rows,
            vocab,
            SPLIT=split,
            REQUESTS=triton.next_power_of_2(num_requests),
            SAMPLED=sampled,
            num_warps=8,
        )
    _walk_kernel[(num_requests,)](
        logits,
        logits.stride(0),
        row_max,
        choice_value,
        choice,
        choices if choices is not None else unused,
        row_starts,
        tokens,
        parents,
        log_kappas,
        max_promotions,
        protected,
        *result,
        num_rows,
        num_splits,
        vocab,
        max_nodes,
        protected.shape[1],
        NODES=max(triton.next_power_of_2(max_nodes), 16),
        SPLITS=triton.next_power_of_2(num_splits),
        PROTECTED=triton.next_power_of_2(max(protected.shape[1], 1)),
        GIVEN=choices is not None,
        SAMPLED=sampled,
        num_warps=4,
    )
    return result
