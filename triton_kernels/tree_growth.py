"""Growth of all requests' trees by one level, on the device. The twin is ``core.growth.TreeGrowth``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .checks import FLOATS, INTS, check_tensor, require
from .limits import MAX_NODES, MAX_VOCAB, NOT_A_TOKEN, split_of

MAX_WIDTH = 16
MAX_FED = 64
"""Nodes of one request that may be fed to the draft in one step: bits of a mask word."""
UNRANKED = tl.constexpr(2**30)

FIELDS = {
    "tokens": torch.int64,
    "parents": torch.int32,
    "scores": torch.float32,
    "num_nodes": torch.int32,
    "num_fed": torch.int32,
    "levels": torch.int32,
    "frontier_size": torch.int32,
    "frontier_nodes": torch.int32,
    "frontier_tokens": torch.int64,
    "frontier_rows": torch.int64,
    "frontier_masks": torch.int64,
}
BY_NODE = ("tokens", "parents", "scores")
BY_SLOT = ("frontier_nodes", "frontier_tokens", "frontier_rows", "frontier_masks")


@dataclass(frozen=True)
class GrowthState:
    """Trees of all requests while they grow, best node first, and the frontier to be fed to the draft next.

    Args:
        tokens: ``[num_requests, max_nodes]`` int64 target-vocabulary ids; -1 past the last node.
        parents: ``[num_requests, max_nodes]`` int32 node indices, -1 for the root's children.
        scores: ``[num_requests, max_nodes]`` float32 cumulative log-probabilities.
        num_nodes: ``[num_requests]`` int32.
        num_fed: ``[num_requests]`` int32 nodes handed out for feeding so far, the frontier included.
        levels: ``[num_requests]`` int32 levels grown so far.
        frontier_size: ``[num_requests]`` int32.
        frontier_nodes: ``[num_requests, max_width]`` int32 their node indices.
        frontier_tokens: ``[num_requests, max_width]`` int64, 0 where unused.
        frontier_rows: ``[num_requests, max_width]`` int64 row of the last pass's output that is the parent's; 0 where
            unused.
        frontier_masks: ``[num_requests, max_width]`` int64 words over the fed nodes: those on its path, and itself.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    scores: torch.Tensor
    num_nodes: torch.Tensor
    num_fed: torch.Tensor
    levels: torch.Tensor
    frontier_size: torch.Tensor
    frontier_nodes: torch.Tensor
    frontier_tokens: torch.Tensor
    frontier_rows: torch.Tensor
    frontier_masks: torch.Tensor

    def __post_init__(self) -> None:
        """Raises ValueError where a field does not fit the others."""
        require(self.tokens.dim() == 2 and self.frontier_nodes.dim() == 2, "tokens and frontier_nodes must be matrices")
        num_requests, max_nodes = self.tokens.shape
        max_width = self.frontier_nodes.shape[1]
        require(1 <= max_nodes <= MAX_NODES, f"max_nodes must be in 1 to {MAX_NODES}, is {max_nodes}")
        require(1 <= max_width <= MAX_WIDTH, f"max_width must be in 1 to {MAX_WIDTH}, is {max_width}")
        for name, dtype in FIELDS.items():
            tensor = getattr(self, name)
            shape = (num_requests, *([max_nodes] if name in BY_NODE else [max_width] if name in BY_SLOT else []))
            check_tensor(name, tensor, shape, (dtype,), self.tokens.device)

    @classmethod
    def empty(cls, num_requests: int, max_nodes: int, max_width: int, device: torch.device) -> GrowthState:
        """Buffers for ``num_requests`` trees; the first ``grow_level`` fills them.

        Raises:
            ValueError: a size is out of range.
        """

        def buffer(name: str) -> torch.Tensor:
            shape = [max_nodes] if name in BY_NODE else [max_width] if name in BY_SLOT else []
            return torch.zeros((num_requests, *shape), dtype=FIELDS[name], device=device)

        return cls(**{name: buffer(name) for name in FIELDS})

    def first(self, num_requests: int) -> GrowthState:
        """The first requests' part of the same buffers."""
        return GrowthState(**{name: getattr(self, name)[:num_requests] for name in FIELDS})


@triton.jit
def _topk_kernel(
    logits,
    logits_stride,
    frontier_size,
    levels,
    depths,
    part_max,
    part_sum,
    part_value,
    part_token,
    num_rows,
    rows_per_request,
    vocab,
    FIRST: tl.constexpr,
    SPLIT: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One split of one frontier row: its maximum, sum of exponentials and ``WIDTH`` greatest logits."""
    row = tl.program_id(0)
    split = tl.program_id(1)
    request = row // rows_per_request
    level = 0
    size = 1
    if not FIRST:
        level = tl.load(levels + request)
        size = tl.load(frontier_size + request)
    if (row % rows_per_request >= size) | (level >= tl.load(depths + request)):
        return
    lane = tl.arange(0, SPLIT)
    token = split * SPLIT + lane
    value = tl.load(logits + row.to(tl.int64) * logits_stride + token, mask=token < vocab, other=float("-inf"))
    value = value.to(tl.float32)
    out = split * num_rows + row
    has_nan = tl.max((value != value).to(tl.int32), axis=0) > 0
    value = tl.where(value == value, value, float("-inf"))
    top = tl.max(value, axis=0)
    total = tl.sum(tl.exp(value - tl.where(top == float("-inf"), 0.0, top)), axis=0)
    tl.store(part_max + out, top)
    tl.store(part_sum + out, tl.where(has_nan, float("nan"), total))
    taken = token >= vocab
    for rank in tl.static_range(WIDTH):
        best = tl.max(tl.where(taken, float("-inf"), value), axis=0)
        best_token = tl.min(tl.where((value == best) & (taken == 0), token, NOT_A_TOKEN), axis=0)
        tl.store(part_value + out * WIDTH + rank, best)
        tl.store(part_token + out * WIDTH + rank, best_token)
        taken = taken | (token == best_token)


@triton.jit
def _grow_kernel(
    part_max,
    part_sum,
    part_value,
    part_token,
    target_ids,
    depths,
    widths,
    nodes,
    tokens,
    parents,
    scores,
    num_nodes,
    num_fed,
    levels,
    frontier_size,
    frontier_nodes,
    frontier_tokens,
    frontier_rows,
    frontier_masks,
    num_rows,
    rows_per_request,
    num_splits,
    max_nodes,
    max_width,
    FIRST: tl.constexpr,
    NODES: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    MAPPED: tl.constexpr,
    MAX_FED: tl.constexpr,
):
    """One request: children of its frontier, best nodes of old and new, next frontier."""
    request = tl.program_id(0)
    depth_limit = tl.load(depths + request)
    width = tl.minimum(tl.load(widths + request), max_width)
    node_limit = tl.minimum(tl.load(nodes + request), max_nodes)
    if FIRST:
        level = 0
        size = tl.where((depth_limit > 0) & (width > 0) & (node_limit > 0), 1, 0)
        old_nodes = 0
        fed = 0
    else:
        level = tl.load(levels + request)
        size = tl.load(frontier_size + request)
        old_nodes = tl.load(num_nodes + request)
        fed = tl.load(num_fed + request)
    if level >= depth_limit:
        size = 0

    # Lanes [0, NODES): nodes so far; then WIDTH lanes for each frontier node's children.
    lane = tl.arange(0, CANDIDATES)
    is_old = lane < old_nodes
    at = request * max_nodes + lane
    token = tl.load(tokens + at, mask=is_old, other=-1).to(tl.int32)
    parent = tl.load(parents + at, mask=is_old, other=-1)  # of old and new alike: the lane of the parent
    score = tl.load(scores + at, mask=is_old, other=float("-inf"))
    mask_word = tl.zeros((CANDIDATES,), tl.int64)
    source_row = tl.zeros((CANDIDATES,), tl.int32)
    is_candidate = is_old
    split = tl.arange(0, SPLITS)
    choice = tl.arange(0, SPLITS * WIDTH)
    for slot in range(size):
        row = request * rows_per_request + slot
        part = split * num_rows + row
        top = tl.load(part_max + part, mask=split < num_splits, other=float("-inf"))
        total = tl.load(part_sum + part, mask=split < num_splits, other=0.0)
        row_top = tl.max(top, axis=0)
        shift = tl.where(row_top == float("-inf"), 0.0, row_top)
        log_sum = shift + tl.log(tl.sum(total * tl.exp(top - shift), axis=0))
        node = tl.full((), -1, tl.int32)
        base = tl.full((), 0.0, tl.float32)
        path = tl.full((), 0, tl.int64)
        if not FIRST:
            node = tl.load(frontier_nodes + request * max_width + slot)
            base = tl.load(scores + request * max_nodes + node)
            path = tl.load(frontier_masks + request * max_width + slot)
        from_split = choice // WIDTH
        value_at = (from_split * num_rows + row) * WIDTH + choice % WIDTH
        value = tl.load(part_value + value_at, mask=from_split < num_splits, other=float("-inf"))
        value_token = tl.load(part_token + value_at, mask=from_split < num_splits, other=NOT_A_TOKEN)
        taken = value_token == NOT_A_TOKEN
        for rank in range(width):
            best = tl.max(tl.where(taken, float("-inf"), value), axis=0)
            best_token = tl.min(tl.where((value == best) & (taken == 0), value_token, NOT_A_TOKEN), axis=0)
            taken = taken | (value_token == best_token)
            if best_token != NOT_A_TOKEN:
                # Rounding must not make a child likelier than its parent, nor NaN undo the order of nodes.
                log_prob = best - log_sum
                log_prob = tl.where(log_prob == log_prob, tl.minimum(log_prob, 0.0), float("-inf"))
                here = lane == NODES + slot * WIDTH + rank
                if MAPPED:
                    best_token = tl.load(target_ids + best_token).to(tl.int32)
                token = tl.where(here, best_token, token)
                parent = tl.where(here, node, parent)
                score = tl.where(here, base + log_prob, score)
                mask_word = tl.where(here, path, mask_word)
                source_row = tl.where(here, row, source_row)
                is_candidate = is_candidate | here

    # The best nodes, in order. A child is never better than its parent, and equals keep their order, so a parent's
    # rank is known when its child is ranked.
    tl.debug_barrier()  # all have read the old nodes
    rank_of = tl.full((CANDIDATES,), UNRANKED, tl.int32)
    count = tl.minimum(tl.sum(is_candidate.to(tl.int32), axis=0), node_limit)
    if level >= depth_limit:
        count = old_nodes
    for rank in range(count):
        left = is_candidate & (rank_of == UNRANKED)
        best = tl.max(tl.where(left, score, float("-inf")), axis=0)
        winner = tl.min(tl.where(left & (score == best), lane, CANDIDATES), axis=0)
        rank_of = tl.where(lane == winner, rank, rank_of)
    kept = rank_of < count
    parent_rank = tl.full((CANDIDATES,), -1, tl.int32)
    for node in range(old_nodes):  # parents are old nodes
        new_index = tl.sum(tl.where(lane == node, rank_of, 0), axis=0)
        parent_rank = tl.where(parent == node, new_index, parent_rank)
    place = request * max_nodes + rank_of
    tl.store(tokens + place, token.to(tl.int64), mask=kept)
    tl.store(parents + place, parent_rank, mask=kept)
    tl.store(scores + place, score, mask=kept)
    unused = (lane >= count) & (lane < max_nodes)
    tl.store(tokens + at, tl.full((CANDIDATES,), -1, tl.int64), mask=unused)
    tl.store(parents + at, tl.full((CANDIDATES,), -1, tl.int32), mask=unused)
    tl.store(scores + at, tl.full((CANDIDATES,), float("-inf"), tl.float32), mask=unused)
    tl.store(num_nodes + request, count)

    # Of the kept new nodes the best ``width`` are fed next. Expanding the worst node of a full tree gains nothing.
    may_feed = tl.where(level + 1 < depth_limit, tl.where(count < node_limit, count, count - 1), 0)
    is_new = kept & (lane >= NODES) & (rank_of < may_feed)
    most = tl.minimum(width, MAX_FED - fed)
    fed_next = tl.full((), 0, tl.int32)
    slot_of = tl.full((CANDIDATES,), UNRANKED, tl.int32)
    for _ in range(most):
        left = is_new & (slot_of == UNRANKED)
        first = tl.min(tl.where(left, rank_of, UNRANKED), axis=0)
        if first != UNRANKED:
            slot_of = tl.where(is_new & (rank_of == first), fed_next, slot_of)
            fed_next += 1
    fed_here = slot_of < fed_next
    out = request * max_width + slot_of
    bit = tl.full((CANDIDATES,), 1, tl.int64) << (fed + tl.where(fed_here, slot_of, 0)).to(tl.int64)
    tl.store(frontier_nodes + out, rank_of, mask=fed_here)
    tl.store(frontier_tokens + out, token.to(tl.int64), mask=fed_here)
    tl.store(frontier_rows + out, source_row.to(tl.int64), mask=fed_here)
    tl.store(frontier_masks + out, mask_word | bit, mask=fed_here)
    slot = tl.arange(0, WIDTH)
    rest = (slot >= fed_next) & (slot < max_width)
    at_rest = request * max_width + slot
    tl.store(frontier_nodes + at_rest, tl.full((WIDTH,), 0, tl.int32), mask=rest)
    tl.store(frontier_tokens + at_rest, tl.full((WIDTH,), 0, tl.int64), mask=rest)
    tl.store(frontier_rows + at_rest, tl.full((WIDTH,), 0, tl.int64), mask=rest)
    tl.store(frontier_masks + at_rest, tl.full((WIDTH,), 0, tl.int64), mask=rest)
    tl.store(frontier_size + request, fed_next)
    tl.store(num_fed + request, fed + fed_next)
    tl.store(levels + request, level + 1)


def grow_level(
    state: GrowthState,
    logits: torch.Tensor,
    *,
    first: bool,
    depths: torch.Tensor,
    widths: torch.Tensor,
    nodes: torch.Tensor,
    target_ids: torch.Tensor | None = None,
) -> None:
    """Add the children of every frontier node, keep each request's best nodes, and choose what is fed next.

    ``score(child) = score(parent) + log_softmax(logits)[child]``. Every frontier node offers its ``width`` likeliest
    children; the best ``nodes`` of all candidates stay, best first, a parent always before its child; the best
    ``width`` new ones among them are the next frontier, until a request has had ``MAX_FED`` nodes fed, the bits of its
    mask words. Each logit is read once; no host synchronisation.

    Args:
        state: updated in place, the count of its levels too, so that one captured graph serves all but the first.
        logits: ``[num_requests, draft_vocab]`` at the first level (the roots), ``[num_requests * max_width,
            draft_vocab]`` later: row ``request * max_width + slot`` for each frontier slot; rows of unused slots are
            not read.
        first: whether this is the first level, which overwrites whatever the state holds.
        depths, widths, nodes: ``[num_requests]`` int32 limits of each request; a depth of no more than the levels
            grown leaves the request's tree as it is and empties its frontier.
        target_ids: ``[draft_vocab]`` int32/int64 target-vocabulary id of each draft id; None where they are the same.

    Raises:
        ValueError: names the argument that does not fit.
    """
    device = logits.device
    num_requests, max_nodes = state.tokens.shape
    max_width = state.frontier_nodes.shape[1]
    rows_per_request = 1 if first else max_width
    num_rows = num_requests * rows_per_request
    check_tensor("logits", logits, (num_rows, None), FLOATS, device, contiguous=False)
    vocab = logits.shape[1]
    require(0 < vocab <= MAX_VOCAB, f"logits: draft vocabularies of 1 to {MAX_VOCAB} tokens, is {vocab}")
    require(state.tokens.device == device, f"state must be on {device}, is on {state.tokens.device}")
    for name, limit in (("depths", depths), ("widths", widths), ("nodes", nodes)):
        check_tensor(name, limit, (num_requests,), (torch.int32,), device)
    if target_ids is not None:
        check_tensor("target_ids", target_ids, (vocab,), INTS, device)
    if num_requests == 0:
        return
    split = split_of(vocab)
    num_splits = triton.cdiv(vocab, split)
    width = triton.next_power_of_2(max_width)
    part_max = torch.empty((num_splits, num_rows), dtype=torch.float32, device=device)
    part_sum = torch.empty_like(part_max)
    part_value = torch.empty((num_splits, num_rows, width), dtype=torch.float32, device=device)
    part_token = torch.empty((num_splits, num_rows, width), dtype=torch.int32, device=device)
    _topk_kernel[(num_rows, num_splits)](
        logits,
        logits.stride(0),
        state.frontier_size,
        state.levels,
        depths,
        part_max,
        part_sum,
        part_value,
        part_token,
        num_rows,
        rows_per_request,
        vocab,
        FIRST=first,
        SPLIT=split,
        WIDTH=width,
        num_warps=8,
    )
    store = triton.next_power_of_2(max_nodes)
    _grow_kernel[(num_requests,)](
        part_max,
        part_sum,
        part_value,
        part_token,
        target_ids if target_ids is not None else depths,
        depths,
        widths,
        nodes,
        state.tokens,
        state.parents,
        state.scores,
        state.num_nodes,
        state.num_fed,
        state.levels,
        state.frontier_size,
        state.frontier_nodes,
        state.frontier_tokens,
        state.frontier_rows,
        state.frontier_masks,
        num_rows,
        rows_per_request,
        num_splits,
        max_nodes,
        max_width,
        FIRST=first,
        NODES=store,
        WIDTH=width,
        SPLITS=triton.next_power_of_2(num_splits),
        CANDIDATES=triton.next_power_of_2(store + rows_per_request * width),
        MAPPED=target_ids is not None,
        MAX_FED=MAX_FED,
        num_warps=4,
    )


@triton.jit
def _mask_kernel(parents, num_nodes, masks, depths, max_nodes, NODES: tl.constexpr):
    """One request: follow all nodes to the root at once, one generation a turn."""
    request = tl.program_id(0)
    count = tl.load(num_nodes + request)
    lane = tl.arange(0, NODES)
    at = request * max_nodes + lane
    is_node = lane < count
    mask = tl.where(is_node, tl.full((NODES,), 1, tl.int64) << lane.to(tl.int64), 0)
    depth = is_node.to(tl.int32)
    ancestor = tl.load(parents + at, mask=is_node, other=-1)
    while tl.max(ancestor, axis=0) >= 0:
        has = ancestor >= 0
        mask = mask | tl.where(has, tl.full((NODES,), 1, tl.int64) << tl.where(has, ancestor, 0).to(tl.int64), 0)
        depth += has.to(tl.int32)
        ancestor = tl.load(parents + request * max_nodes + ancestor, mask=has, other=-1)
    tl.store(masks + at, mask, mask=lane < max_nodes)
    tl.store(depths + at, depth, mask=lane < max_nodes)


def tree_masks(parents: torch.Tensor, num_nodes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Ancestor masks and depths of all nodes.

    Args:
        parents: ``[num_requests, max_nodes]`` int32, -1 for the root's children; every parent before its child.
        num_nodes: ``[num_requests]`` int32.

    Returns:
        ``[num_requests, max_nodes]`` int64 words (bit ``j``: node ``j`` is an ancestor or the node itself) and int32
        depths (1 for the root's children); both 0 past a request's last node.

    Raises:
        ValueError: names the argument that does not fit.
    """
    device = parents.device
    require(parents.dim() == 2, f"parents must have shape [num_requests, max_nodes], is {list(parents.shape)}")
    num_requests, max_nodes = parents.shape
    check_tensor("parents", parents, (num_requests, max_nodes), (torch.int32,), device)
    require(1 <= max_nodes <= MAX_NODES, f"parents: 1 to {MAX_NODES} nodes, is {max_nodes}")
    check_tensor("num_nodes", num_nodes, (num_requests,), (torch.int32,), device)
    masks = torch.empty((num_requests, max_nodes), dtype=torch.int64, device=device)
    depths = torch.empty((num_requests, max_nodes), dtype=torch.int32, device=device)
    if num_requests:
        store = triton.next_power_of_2(max_nodes)
        _mask_kernel[(num_requests,)](parents, num_nodes, masks, depths, max_nodes, NODES=store, num_warps=1)
    return masks, depths
