"""Growth on the device builds the trees that ``core.growth`` builds, level by level."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from vllm_adaptivespec.triton_kernels import GrowthState, grow_level, tree_masks

from tests.kernels.batches import random_tree
from tests.kernels.conftest import DEVICE, POISON, on
from vllm_adaptivespec.core.growth import TreeGrowth
from vllm_adaptivespec.core.policy import TreeShape
from vllm_adaptivespec.core.tree import ROOT

pytestmark = pytest.mark.kernels

CLOSE = 1e-4
"""Scores nearer to each other than this may be ordered either way."""


def poisoned_state(num_requests: int, max_nodes: int, max_width: int) -> GrowthState:
    state = GrowthState.empty(num_requests, max_nodes, max_width, DEVICE)
    for tensor in vars(state).values():
        tensor.fill_(float("nan") if tensor.is_floating_point() else POISON)
    return state


def draft_logits(path: tuple[int, ...], vocab: int, seed: int, ties: bool) -> torch.Tensor:
    """What a draft says after a path of tokens: the same whoever asks."""
    generator = torch.Generator().manual_seed(hash((seed, *path)) % 2**40)
    if ties:
        return torch.randint(0, 3, (vocab,), generator=generator).float()
    return torch.randn((vocab,), generator=generator) * 3


def top(logits: torch.Tensor, width: int, target_ids: torch.Tensor | None) -> tuple[list[float], list[int]]:
    """Log-probabilities and ids, best first, the lowest id of equals."""
    log_probs = logits.double().log_softmax(0).nan_to_num(nan=-torch.inf).tolist()
    order = sorted(range(len(log_probs)), key=lambda t: (-log_probs[t], t))[:width]
    return [log_probs[t] for t in order], [t if target_ids is None else int(target_ids[t]) for t in order]


class Twin:
    """One request's ``TreeGrowth`` with what the kernel keeps besides: fed nodes and masks over them."""

    def __init__(self, shape: TreeShape) -> None:
        self.growth = TreeGrowth(shape)
        self.num_fed = 0
        self.bits: dict[int, int] = {}

    def path_tokens(self, candidate: int) -> tuple[int, ...]:
        return tuple(self.growth.tokens[c] for c in self.growth.path(candidate))

    def expand(self, rows: list[tuple[list[float], list[int]]]) -> None:
        self.growth.expand([r[0] for r in rows], [r[1] for r in rows])
        for candidate in self.growth.frontier:
            self.bits[candidate] = 1 << self.num_fed
            self.num_fed += 1

    def mask(self, candidate: int) -> int:
        return sum(self.bits[c] for c in self.growth.path(candidate))

    def scores(self) -> list[float]:
        growth = self.growth
        return sorted(growth.scores, reverse=True)[: growth.shape.nodes + 1]


def check(state: GrowthState, twins: list[Twin], last_frontiers: list[list[int]], rows_per_request: int) -> None:
    for r, twin in enumerate(twins):
        growth = twin.growth
        tree = growth.tree()
        n = len(tree)
        assert int(state.num_nodes[r]) == n
        assert state.tokens[r, :n].tolist() == list(tree.tokens)
        assert state.parents[r, :n].tolist() == list(tree.parents)
        assert state.scores[r, :n].tolist() == pytest.approx(
            sorted(growth.scores, reverse=True)[:n], rel=1e-5, abs=1e-5
        )
        assert (state.tokens[r, n:] == -1).all()
        assert (state.parents[r, n:] == -1).all()
        size = len(growth.frontier)
        assert int(state.frontier_size[r]) == size
        assert int(state.num_fed[r]) == twin.num_fed
        assert state.frontier_tokens[r].tolist()[:size] == [growth.tokens[c] for c in growth.frontier]
        assert [m % 2**64 for m in state.frontier_masks[r].tolist()[:size]] == [twin.mask(c) for c in growth.frontier]
        slots = [last_frontiers[r].index(growth.parents[c]) for c in growth.frontier]
        assert state.frontier_rows[r].tolist()[:size] == [r * rows_per_request + s for s in slots]
        for unused in (state.frontier_tokens, state.frontier_rows, state.frontier_masks, state.frontier_nodes):
            assert (unused[r, size:] == 0).all()


def grow(
    shapes: list[TreeShape],
    *,
    vocab: int,
    max_nodes: int,
    max_width: int,
    seed: int,
    ties: bool,
    mapped: bool,
    dtype: torch.dtype = torch.float32,
) -> list[Twin]:
    """Grow with the kernel and the twins together, comparing after every level."""
    target_ids = torch.randperm(5 * vocab)[:vocab] if mapped else None
    state = poisoned_state(len(shapes), max_nodes, max_width)
    twins = [Twin(shape) for shape in shapes]
    limits: dict[str, Any] = dict(
        depths=on(DEVICE, [s.depth for s in shapes], torch.int32),
        widths=on(DEVICE, [s.width for s in shapes], torch.int32),
        nodes=on(DEVICE, [s.nodes for s in shapes], torch.int32),
        target_ids=None if target_ids is None else target_ids.to(DEVICE),
    )
    for level in range(max(s.depth for s in shapes) + 1):
        rows_per_request = 1 if level == 0 else max_width
        logits = torch.full((len(shapes) * rows_per_request, vocab), float("nan"))
        frontiers = [list(t.growth.frontier) for t in twins]
        for r, twin in enumerate(twins):
            expanded = []
            for slot, candidate in enumerate(frontiers[r]):
                row = draft_logits(twin.path_tokens(candidate), vocab, seed + r, ties).to(dtype)
                logits[r * rows_per_request + slot] = row.float()
                expanded.append(top(row, twin.growth.shape.width, target_ids))
            if expanded:
                twin.expand(expanded)
            if not ties:
                scores = twin.scores()
                if not all(a - b > CLOSE for a, b in itertools.pairwise(scores)):
                    reject()
        grow_level(state, logits.to(dtype).to(DEVICE), first=level == 0, **limits)
        check(state, twins, frontiers, rows_per_request)
    return twins


@given(
    seed=st.integers(0, 2**32),
    shapes=st.lists(
        st.tuples(st.integers(0, 5), st.integers(1, 6), st.integers(1, 12)).map(lambda s: TreeShape(*s)),
        min_size=1,
        max_size=4,
    ),
    vocab=st.sampled_from([3, 50, 4096, 4100, 9000]),
    mapped=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=25, deadline=None)
def test_random_shapes(seed: int, shapes: list[TreeShape], vocab: int, mapped: bool, dtype: torch.dtype) -> None:
    grow(shapes, vocab=vocab, max_nodes=12, max_width=6, seed=seed, ties=False, mapped=mapped, dtype=dtype)


@given(seed=st.integers(0, 2**32), width=st.integers(1, 4), nodes=st.integers(1, 12))
@settings(max_examples=20, deadline=None)
def test_ties_keep_their_order(seed: int, width: int, nodes: int) -> None:
    """All logits of a row equal: every score of a depth is the same float, and order alone decides."""
    state = poisoned_state(1, 12, 4)
    twin = Twin(TreeShape(3, width, nodes))
    limits = {
        name: on(DEVICE, [value], torch.int32) for name, value in (("depths", 3), ("widths", width), ("nodes", nodes))
    }
    for level in range(3):
        frontier = list(twin.growth.frontier)
        if frontier:
            twin.expand([top(torch.zeros(8), width, None)] * len(frontier))
        grow_level(state, torch.zeros((1 if level == 0 else 4, 8), device=DEVICE), first=level == 0, **limits)
        check(state, [twin], [frontier], 1 if level == 0 else 4)


def test_negative_control_other_logits() -> None:
    """A kernel that read another row's logits must show."""
    shape = TreeShape(1, 3, 3)
    state, twin = poisoned_state(1, 4, 4), Twin(shape)
    limits = {n: on(DEVICE, [v], torch.int32) for n, v in (("depths", 1), ("widths", 3), ("nodes", 3))}
    twin.expand([top(draft_logits((), 50, 1, False), 3, None)])
    grow_level(state, draft_logits((), 50, 1, False)[None].to(DEVICE), first=True, **limits)
    check(state, [twin], [[ROOT]], 1)
    grow_level(state, draft_logits((), 50, 2, False)[None].to(DEVICE), first=True, **limits)
    with pytest.raises(AssertionError):
        check(state, [twin], [[ROOT]], 1)


def test_largest_tree() -> None:
    twins = grow([TreeShape(6, 12, 64)], vocab=300, max_nodes=64, max_width=12, seed=5, ties=False, mapped=False)
    assert len(twins[0].growth.tree()) == 64


def test_no_more_nodes_are_fed_than_a_mask_has_bits() -> None:
    """Width 16 from level 1 on: the fourth frontier is the last, and the tree grows no deeper than its children."""
    state = poisoned_state(1, 64, 16)
    limits = {n: on(DEVICE, [v], torch.int32) for n, v in (("depths", 8), ("widths", 16), ("nodes", 64))}
    generator = torch.Generator().manual_seed(0)
    for level in range(8):
        logits = torch.randn((1 if level == 0 else 16, 200), generator=generator) * 3
        grow_level(state, logits.to(DEVICE), first=level == 0, **limits)
        assert int(state.num_fed[0]) <= 64
        size = int(state.frontier_size[0])
        assert len({int(m) for m in state.frontier_masks[0, :size]}) == size
    assert int(state.num_fed[0]) == 64
    assert int(state.frontier_size[0]) == 0
    assert int(state.num_nodes[0]) == 64


def test_impossible_logits_are_never_preferred() -> None:
    """-inf and NaN in a draft's logits: masked tokens come last, a NaN row's children are impossible."""
    logits = torch.tensor([[0.0, float("-inf"), 2.0, 1.0], [0.0, float("nan"), 2.0, 1.0]], device=DEVICE)
    state = poisoned_state(2, 4, 4)
    limits = {n: on(DEVICE, [v, v], torch.int32) for n, v in (("depths", 1), ("widths", 4), ("nodes", 4))}
    grow_level(state, logits, first=True, **limits)
    assert state.tokens[0].tolist() == [2, 3, 0, 1]
    assert state.scores[0, 3] == float("-inf")
    assert state.num_nodes.tolist() == [4, 4]
    assert (state.scores[1] == float("-inf")).all()
    assert sorted(state.tokens[1].tolist()) == [0, 1, 2, 3]


@given(seed=st.integers(0, 2**32), max_nodes=st.sampled_from([1, 8, 13, 64]))
@settings(max_examples=25, deadline=None)
def test_masks(seed: int, max_nodes: int) -> None:
    rng = random.Random(seed)
    trees = [random_tree(rng, rng.randrange(max_nodes + 1), 500) for _ in range(3)]
    parents = [[*t.parents, *[-1] * (max_nodes - len(t))] for t in trees]
    masks, depths = tree_masks(on(DEVICE, parents, torch.int32), on(DEVICE, [len(t) for t in trees], torch.int32))
    for r, tree in enumerate(trees):
        words = [sum(1 << j for j, seen in enumerate(row) if seen) for row in tree.ancestor_mask().tolist()]
        padding = [0] * (max_nodes - len(tree))
        assert [w % 2**64 for w in masks[r].tolist()] == words + padding
        assert depths[r].tolist() == [*tree.depths, *padding]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logits", torch.zeros((3, 5))),
        ("logits", torch.zeros((2, 5), dtype=torch.int32)),
        ("depths", torch.zeros(3, dtype=torch.int32)),
        ("widths", torch.zeros(2)),
        ("nodes", torch.zeros((2, 1), dtype=torch.int32)),
        ("target_ids", torch.zeros(4, dtype=torch.int64)),
    ],
)
def test_bad_arguments(name: str, value: Any) -> None:
    arguments: dict[str, Any] = dict(
        logits=torch.zeros((2, 5)),
        first=True,
        depths=torch.ones(2, dtype=torch.int32),
        widths=torch.ones(2, dtype=torch.int32),
        nodes=torch.ones(2, dtype=torch.int32),
    )
    arguments[name] = value
    moved = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    with pytest.raises(ValueError, match=name):
        grow_level(GrowthState.empty(2, 4, 2, DEVICE), **moved)


@pytest.mark.parametrize(("sizes", "name"), [((0, 2), "max_nodes"), ((65, 2), "max_nodes"), ((4, 17), "max_width")])
def test_bad_sizes(sizes: tuple[int, int], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        GrowthState.empty(1, *sizes, DEVICE)
