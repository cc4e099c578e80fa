"""DraftTree against its description in terms of paths."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.core.trees import Path, node_path, numbered_trees
from vllm_adaptivespec.core.tree import ROOT, DraftTree

#      root
#     /    \
#    0      1
#   / \      \
#  2   3      4
#  |
#  5
FORKED = DraftTree((10, 11, 12, 13, 14, 15), (ROOT, ROOT, 0, 0, 1, 2))


def leaf_nodes(paths: set[Path]) -> set[Path]:
    """Paths that no other path continues."""
    return {p for p in paths if not any(q[:-1] == p for q in paths)}


def first_child_path(tree: DraftTree) -> Path:
    """Where the best child is taken at every node."""
    path: Path = ()
    while longer := [p for p in (node_path(tree, n) for n in range(len(tree))) if p[:-1] == path]:
        path = longer[0]
    return path


class TestConstruction:
    @pytest.mark.parametrize(
        "parents",
        [(0,), (1,), (-2,), (ROOT, 1), (ROOT, 2), (ROOT, -2), (ROOT, 0, 2), (ROOT, 0, 5), (ROOT, 2, 0)],
    )
    def test_parent_must_come_before_its_child(self, parents: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match="does not come before it"):
            DraftTree(tuple(range(len(parents))), parents)

    @pytest.mark.parametrize(("tokens", "parents"), [((1,), ()), ((), (ROOT,)), ((1, 2, 3), (ROOT, 0))])
    def test_lengths_must_agree(self, tokens: tuple[int, ...], parents: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match="tokens but"):
            DraftTree(tokens, parents)

    @given(st.lists(st.integers(-3, 8), max_size=8))
    def test_exactly_the_topologically_ordered_lists_are_trees(self, parents: list[int]) -> None:
        valid = all(p == ROOT or (p >= 0 and p in range(node)) for node, p in enumerate(parents))
        if valid:
            assert len(DraftTree(tuple(parents), tuple(parents))) == len(parents)
        else:
            with pytest.raises(ValueError):
                DraftTree(tuple(parents), tuple(parents))

    def test_chain(self) -> None:
        chain = DraftTree.chain([7, 8, 9])
        assert (chain.tokens, chain.parents) == ((7, 8, 9), (ROOT, 0, 1))
        assert chain.is_chain
        assert DraftTree.chain([]) == DraftTree((), ())


class TestStructure:
    def test_by_hand(self) -> None:
        assert FORKED.depths == (1, 1, 2, 2, 2, 3)
        assert FORKED.depth == 3
        assert FORKED.children == ((2, 3), (4,), (5,), (), (), (), (0, 1))
        assert FORKED.children[ROOT] == (0, 1)
        assert FORKED.leaves == (5, 3, 4)
        assert FORKED.path(5) == (0, 2, 5)
        assert FORKED.path(ROOT) == ()

    def test_empty(self) -> None:
        empty = DraftTree((), ())
        assert (len(empty), empty.depth, empty.leaves, empty.children) == (0, 0, (), ((),))
        assert empty.is_chain
        assert empty.ancestor_mask().shape == (0, 0)

    @given(numbered_trees())
    def test_against_paths(self, tree: DraftTree) -> None:
        paths = [node_path(tree, n) for n in range(len(tree))]
        assert [tree.path(n) for n in range(len(tree))] == paths
        assert list(tree.depths) == [len(p) for p in paths]
        assert tree.depth == max((len(p) for p in paths), default=0)
        for node in range(ROOT, len(tree)):
            expected = tuple(n for n in range(len(tree)) if paths[n][:-1] == node_path(tree, node))
            assert tree.children[node] == expected
        assert tree.is_chain == all(tree.parents[n] == n - 1 for n in range(len(tree)))

    @given(numbered_trees(min_nodes=1))
    def test_leaves(self, tree: DraftTree) -> None:
        leaves = leaf_nodes({node_path(tree, n) for n in range(len(tree))})
        assert len(set(tree.leaves)) == len(tree.leaves)
        assert {node_path(tree, leaf) for leaf in tree.leaves} == leaves
        # The trunk comes first.
        assert node_path(tree, tree.leaves[0]) == first_child_path(tree)

    @given(numbered_trees())
    def test_ancestor_mask(self, tree: DraftTree) -> None:
        mask = tree.ancestor_mask()
        assert mask.dtype == torch.bool
        sees = {(row, column) for row in range(len(tree)) for column in node_path(tree, row)}
        assert {(row, column) for row, column in mask.nonzero().tolist()} == sees


class TestPrefix:
    @given(numbered_trees(), st.integers(0, 15))
    def test_every_prefix_is_a_tree(self, tree: DraftTree, num_nodes: int) -> None:
        """The scheduler cuts drafts at their tail: what is left must be verified correctly."""
        prefix = tree.prefix(num_nodes)
        kept = range(min(num_nodes, len(tree)))
        assert [node_path(prefix, n) for n in range(len(prefix))] == [node_path(tree, n) for n in kept]
        assert prefix.tokens == tree.tokens[: len(kept)]

    def test_whole_tree_is_itself(self) -> None:
        assert FORKED.prefix(6) is FORKED
        assert FORKED.prefix(100) is FORKED


class TestWithinLeaves:
    def test_by_hand(self) -> None:
        assert FORKED.subset(FORKED.within_leaves(2)) == DraftTree((10, 11, 12, 14, 15), (ROOT, ROOT, 0, 1, 2))
        assert FORKED.subset(FORKED.within_leaves(1)) == DraftTree((10, 12, 15), (ROOT, 0, 1))

    @given(numbered_trees(), st.integers(1, 6))
    def test_keeps_every_node_that_opens_no_further_path(self, tree: DraftTree, max_leaves: int) -> None:
        """Best first, a node is kept if its parent was and if the paths kept so far and it are not too many."""
        kept: set[Path] = set()
        for node in range(len(tree)):
            path = node_path(tree, node)
            if (path[:-1] in kept or len(path) == 1) and len(leaf_nodes(kept | {path})) <= max_leaves:
                kept.add(path)
        limited = tree.subset(tree.within_leaves(max_leaves))
        token_paths = [tuple(100 + n for n in p) for p in sorted(kept, key=lambda p: p[-1])]
        assert [tuple(limited.tokens[n] for n in node_path(limited, n)) for n in range(len(limited))] == token_paths

    @given(numbered_trees(min_nodes=1), st.integers(1, 6))
    def test_properties(self, tree: DraftTree, max_leaves: int) -> None:
        limited = tree.subset(tree.within_leaves(max_leaves))
        assert len(limited.leaves) == min(max_leaves, len(tree.leaves))
        if len(tree.leaves) <= max_leaves:
            assert limited is tree
        # In the old order, under the old parents, and with the best path in full.
        assert list(limited.tokens) == sorted(limited.tokens)
        for node, parent in enumerate(limited.parents):
            old_parent = tree.parents[limited.tokens[node] - 100]
            assert (parent if parent == ROOT else limited.tokens[parent] - 100) == old_parent
        assert {100 + n for n in first_child_path(tree)} <= set(limited.tokens)
