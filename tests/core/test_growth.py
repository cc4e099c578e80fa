"""TreeGrowth against a beam search that expands, keeps and sorts everything."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.trees import Path, token_path
from vllm_adaptivespec.core.growth import TreeGrowth
from vllm_adaptivespec.core.policy import TreeShape
from vllm_adaptivespec.core.tree import ROOT, DraftTree

Draft = Callable[[Path], list[tuple[float, int]]]
"""Given a path of tokens, every next token with its log-probability, best first."""


def random_draft(seed: int, vocab: int) -> Draft:
    """Proper distributions without ties."""

    def children(path: Path) -> list[tuple[float, int]]:
        rng = random.Random(f"{seed} {path}")
        weights = [rng.random() ** 3 + 1e-6 for _ in range(vocab)]
        return sorted(((math.log(w / sum(weights)), token) for token, w in enumerate(weights)), reverse=True)

    return children


def coarse_draft(seed: int, vocab: int) -> Draft:
    """Small whole log-probabilities, certain (0) and impossible (-inf) tokens among them: ties everywhere."""

    def children(path: Path) -> list[tuple[float, int]]:
        rng = random.Random(f"{seed} {path}")
        return sorted(((rng.choice([0.0, -1.0, -1.0, -2.0, -math.inf]), token) for token in range(vocab)), reverse=True)

    return children


drafts = st.builds(
    lambda make, seed, vocab: make(seed, vocab),
    st.sampled_from([random_draft, coarse_draft]),
    st.integers(0, 2**32),
    st.integers(1, 5),
)
shapes = st.builds(TreeShape, depth=st.integers(1, 4), width=st.integers(1, 4), nodes=st.integers(1, 12))


def grow(draft: Draft, shape: TreeShape, extra_columns: int = 0) -> TreeGrowth:
    """Run the growth as an engine would; rows may offer more children than the width."""
    growth = TreeGrowth(shape)
    while growth.frontier:
        offers = [
            draft(tuple(growth.tokens[c] for c in growth.path(node)))[: shape.width + extra_columns]
            for node in growth.frontier
        ]
        growth.expand([[p for p, _ in row] for row in offers], [[token for _, token in row] for row in offers])
    return growth


def beam_search(draft: Draft, shape: TreeShape) -> list[tuple[float, Path]]:
    """The best ``nodes`` of all candidates; each level expands its best ``width``, worth it or not.

    Sorting is stable, so among equals those found first win: parents, then better parents' children, then better
    ranks.
    """
    found: list[tuple[float, Path]] = []
    beam: list[tuple[float, Path]] = [(0.0, ())]
    for _ in range(shape.depth):
        level = [
            (score + log_prob, (*path, token)) for score, path in beam for log_prob, token in draft(path)[: shape.width]
        ]
        found += level
        beam = sorted(level, key=lambda candidate: -candidate[0])[: shape.width]
    return sorted(found, key=lambda candidate: -candidate[0])[: shape.nodes]


def token_paths(tree: DraftTree) -> list[Path]:
    return [token_path(tree, node) for node in range(len(tree))]


def score(draft: Draft, path: Path) -> float:
    """Log-probability of a path, added up from the root as the growth does."""
    total = 0.0
    for depth, token in enumerate(path):
        total += {t: p for p, t in draft(path[:depth])}[token]
    return total


@given(drafts, shapes, st.integers(0, 2))
def test_equals_beam_search(draft: Draft, shape: TreeShape, extra_columns: int) -> None:
    """Also with ties, in the same order, although the growth expands no node that cannot matter."""
    tree = grow(draft, shape, extra_columns).tree()
    assert token_paths(tree) == [path for _, path in beam_search(draft, shape)]


@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(1, 3), st.integers(1, 20))
def test_wide_enough_beam_finds_the_best_of_all_paths(seed: int, vocab: int, depth: int, nodes: int) -> None:
    draft = random_draft(seed, vocab)
    everything: list[Path] = [()]
    for path in everything:
        if len(path) < depth:
            everything += [(*path, token) for token in range(vocab)]
    best = sorted(everything[1:], key=lambda path: -score(draft, path))[:nodes]
    assert token_paths(grow(draft, TreeShape(depth, vocab**depth, nodes)).tree()) == best


@given(drafts, shapes)
def test_best_first_and_parents_before_children(draft: Draft, shape: TreeShape) -> None:
    tree = grow(draft, shape).tree()
    scores = [score(draft, path) for path in token_paths(tree)]
    assert scores == sorted(scores, reverse=True)
    assert all(parent < node for node, parent in enumerate(tree.parents))


@given(drafts, shapes)
def test_limits(draft: Draft, shape: TreeShape) -> None:
    growth = TreeGrowth(shape)
    levels = 0
    while growth.frontier:
        # Path blocks are reserved for this many nodes of a level.
        assert len(growth.frontier) <= (min(shape.width, shape.nodes) if levels else 1)
        offers = [draft(tuple(growth.tokens[c] for c in growth.path(node))) for node in growth.frontier]
        growth.expand([[p for p, _ in row] for row in offers], [[t for _, t in row] for row in offers])
        levels += 1
    tree = growth.tree()
    assert growth.level == levels <= shape.depth
    assert tree.depth <= levels
    assert len(tree) <= shape.nodes
    assert all(len(children) <= shape.width for children in tree.children)


@given(st.builds(random_draft, st.integers(0, 2**32), st.integers(1, 5)), shapes)
def test_every_pass_of_the_draft_could_matter(draft: Draft, shape: TreeShape) -> None:
    """Ties aside, a node is expanded only if a certain child (log-probability 0) of it would be in the tree."""
    growth = TreeGrowth(shape)
    while growth.frontier:
        for node in growth.frontier:
            if node != ROOT:
                with_child = [*growth.scores, growth.scores[node]]
                best = sorted(range(len(with_child)), key=lambda c: -with_child[c])[: shape.nodes]
                assert len(growth.scores) in best
        offers = [draft(tuple(growth.tokens[c] for c in growth.path(node))) for node in growth.frontier]
        growth.expand([[p for p, _ in row] for row in offers], [[t for _, t in row] for row in offers])


class TestByHand:
    def test_two_levels(self) -> None:
        growth = TreeGrowth(TreeShape(depth=2, width=2, nodes=3))
        assert growth.frontier == [ROOT]
        growth.expand([[-0.5, -1.0, -9.0]], [[70, 71, 72]])  # the third is beyond the width
        assert growth.tokens == [70, 71]
        assert growth.frontier == [0, 1]
        growth.expand([[-0.25, -3.0], [-0.75, -2.0]], [[80, 81], [90, 91]])
        assert growth.frontier == []
        # -0.5, 70 80: -0.75, 71: -1.0; left out are 71 90: -1.75 and the rest
        assert growth.tree() == DraftTree((70, 80, 71), (ROOT, 0, ROOT))

    def test_worst_node_of_a_full_tree_is_not_expanded(self) -> None:
        growth = TreeGrowth(TreeShape(depth=3, width=2, nodes=2))
        growth.expand([[-0.5, -1.0]], [[70, 71]])
        assert growth.frontier == [0]  # a child of 71 could at best equal 71
        growth.expand([[-1.5, -2.0]], [[80, 81]])
        assert growth.frontier == []
        assert growth.tree() == DraftTree((70, 71), (ROOT, ROOT))

    def test_certain_child_follows_its_parent(self) -> None:
        growth = TreeGrowth(TreeShape(depth=3, width=1, nodes=3))
        for token in (5, 6, 7):
            growth.expand([[0.0]], [[token]])
        assert growth.tree() == DraftTree.chain([5, 6, 7])

    @pytest.mark.parametrize("shape", [TreeShape(0, 4, 8), TreeShape(3, 0, 8), TreeShape(3, 4, 0)])
    def test_nothing_to_grow(self, shape: TreeShape) -> None:
        growth = TreeGrowth(shape)
        assert growth.frontier == []
        assert growth.tree() == DraftTree((), ())

    def test_one_row_per_frontier_node(self) -> None:
        growth = TreeGrowth(TreeShape(2, 2, 4))
        rows: Sequence[Sequence[float]] = [[-1.0], [-1.0]]
        with pytest.raises(ValueError, match="zip"):
            growth.expand(rows, [[1], [2]])
