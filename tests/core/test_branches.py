"""BranchLayout: causal sequences along paths see exactly what the ancestor mask allows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.core.trees import node_path, numbered_trees
from vllm_adaptivespec.core.attention import tree_attention
from vllm_adaptivespec.core.branches import TRUNK, BranchLayout
from vllm_adaptivespec.core.tree import ROOT, DraftTree

Rows = list[int]
"""Rows of a tree's part of the batch: 0 for the root, 1 + node for a node."""

FORKED = DraftTree((10, 11, 12, 13, 14, 15), (ROOT, ROOT, 0, 0, 1, 2))


def path_rows(layout: BranchLayout, path: int) -> Rows:
    """The root's row and those of a path's nodes: the sequence that stands in the path's blocks."""
    nodes = layout.paths[path] if layout.paths else ()
    return [0, *(1 + node for node in nodes)]


def causal_runs(layout: BranchLayout) -> list[tuple[Rows, Rows]]:
    """What a causal kernel is given for each run: its query rows (the next ones) and the whole sequence's rows."""
    runs, row = [], 0
    for run in layout.runs():
        runs.append((list(range(row, row + run.num_rows)), path_rows(layout, run.path)[: run.depth + 1]))
        row += run.num_rows
    return runs


def seen_by_causal_rule(layout: BranchLayout) -> dict[int, set[int]]:
    """Rows each row attends to when its run is the end of a causal sequence."""
    seen: dict[int, set[int]] = {}
    for queries, sequence in causal_runs(layout):
        for index, row in enumerate(queries):
            seen[row] = set(sequence[: len(sequence) - len(queries) + index + 1])
    return seen


def with_root(tree: DraftTree) -> torch.Tensor:
    """``[1 + num_nodes, 1 + num_nodes]`` the ancestor mask with the root's row and column."""
    mask = torch.zeros(1 + len(tree), 1 + len(tree), dtype=torch.bool)
    mask[:, 0] = True
    mask[1:, 1:] = tree.ancestor_mask()
    return mask


class TestRuns:
    def test_by_hand(self) -> None:
        layout = BranchLayout(FORKED)
        assert layout.paths == [(0, 2, 5), (0, 3), (1, 4)]
        assert layout.num_branches == 2
        assert [(r.path, r.num_rows, r.depth) for r in layout.runs()] == [
            (TRUNK, 2, 1),  # the root and node 0
            (2, 1, 1),
            (TRUNK, 1, 2),
            (1, 1, 2),
            (2, 1, 2),
            (TRUNK, 1, 3),
        ]

    def test_chain_is_one_run(self) -> None:
        layout = BranchLayout(DraftTree.chain([1, 2, 3]))
        assert [(r.path, r.num_rows, r.depth) for r in layout.runs()] == [(TRUNK, 4, 3)]
        assert list(layout.branch_writes()) == []

    def test_empty_tree_is_the_root(self) -> None:
        layout = BranchLayout(DraftTree((), ()))
        assert [(r.path, r.num_rows, r.depth) for r in layout.runs()] == [(TRUNK, 1, 0)]
        assert layout.num_branches == 0

    @given(numbered_trees())
    def test_cover_every_row_once_in_order(self, tree: DraftTree) -> None:
        queries = [row for rows, _ in causal_runs(BranchLayout(tree)) for row in rows]
        assert queries == list(range(1 + len(tree)))

    @given(numbered_trees())
    def test_each_is_a_contiguous_end_of_its_path(self, tree: DraftTree) -> None:
        layout = BranchLayout(tree)
        for queries, sequence in causal_runs(layout):
            assert sequence[len(sequence) - len(queries) :] == queries
        depths = [0, *tree.depths]
        row = 0
        for run in layout.runs():
            row += run.num_rows
            assert run.depth == depths[row - 1]

    @given(numbered_trees())
    def test_causal_rule_is_the_ancestor_mask(self, tree: DraftTree) -> None:
        allowed = {row: set(columns.nonzero().flatten().tolist()) for row, columns in enumerate(with_root(tree))}
        assert seen_by_causal_rule(BranchLayout(tree)) == allowed

    @given(numbered_trees())
    @example(DraftTree((100, 101, 102, 103, 104), (ROOT, ROOT, 1, 1, 2)))  # 1's first leaf is not below its first child
    def test_as_few_as_the_order_allows(self, tree: DraftTree) -> None:
        """A new sequence is needed just where a row does not continue the row before it."""
        breaks = sum(parent != node - 1 for node, parent in enumerate(tree.parents))
        assert len(list(BranchLayout(tree).runs())) == 1 + breaks


class TestPaths:
    @given(numbered_trees(min_nodes=1))
    def test_one_per_leaf_and_the_trunk_is_the_best(self, tree: DraftTree) -> None:
        layout = BranchLayout(tree)
        leaves = [n for n in range(len(tree)) if n not in tree.parents]
        assert sorted(layout.paths) == sorted(node_path(tree, leaf) for leaf in leaves)
        assert layout.paths[TRUNK] == node_path(tree, tree.leaves[0])
        assert layout.num_branches == len(leaves) - 1

    @given(numbered_trees())
    def test_a_node_attends_along_a_path_it_lies_on(self, tree: DraftTree) -> None:
        layout = BranchLayout(tree)
        assert len(layout.path_of) == len(tree)
        for node, path in enumerate(layout.path_of):
            assert node in layout.paths[path]
            # Rows off the trunk must stay out of the request's own blocks; the trunk's must not be missing there.
            assert (path == TRUNK) == (node in layout.paths[TRUNK])

    @given(numbered_trees())
    def test_writes_fill_every_branch(self, tree: DraftTree) -> None:
        layout = BranchLayout(tree)
        held: dict[int, dict[int, int]] = {}
        for write in layout.branch_writes():
            at = held.setdefault(write.path, {})
            assert write.depth not in at  # one writer per slot: their order is not defined
            at[write.depth] = write.row
        assert set(held) == set(range(1, len(layout.paths)))
        for path, at in held.items():
            assert [at[depth] for depth in range(len(at))] == path_rows(layout, path)


@settings(max_examples=25)
@given(numbered_trees(min_nodes=1), st.integers(0, 2**32 - 1))
def test_layout_gives_tree_attention(tree: DraftTree, seed: int) -> None:
    """The numbers, in float64: causal attention run by run equals dense attention under the ancestor mask."""
    case = AttentionCase(tree, seed)
    torch.testing.assert_close(case.by_runs(BranchLayout(tree)), case.dense(with_root(tree)), rtol=1e-12, atol=1e-12)


class AttentionCase:
    """Random queries, keys and values for a tree's rows and a prefix."""

    def __init__(self, tree: DraftTree, seed: int, prefix: int = 5, heads: int = 4, kv_heads: int = 2) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(rows: int, num_heads: int) -> torch.Tensor:
            return torch.randn(rows, num_heads, 8, dtype=torch.float64, generator=generator)

        rows = 1 + len(tree)
        self.query = normal(rows, heads)
        self.prefix_key, self.prefix_value = normal(prefix, kv_heads), normal(prefix, kv_heads)
        self.key, self.value = normal(rows, kv_heads), normal(rows, kv_heads)

    def dense(self, mask: torch.Tensor) -> torch.Tensor:
        return tree_attention(self.query, self.prefix_key, self.prefix_value, self.key, self.value, mask, scale=8**-0.5)

    def by_runs(self, layout: BranchLayout) -> torch.Tensor:
        """``[rows, heads, head_dim]`` as a causal kernel would, sequence by sequence, row by row, head by head."""
        output = torch.full_like(self.query, torch.nan)
        group = self.query.shape[1] // self.key.shape[1]
        for queries, sequence in causal_runs(layout):
            key = torch.cat((self.prefix_key, self.key[sequence]))
            value = torch.cat((self.prefix_value, self.value[sequence]))
            for index, row in enumerate(queries):
                end = len(key) - len(queries) + index + 1
                for head in range(self.query.shape[1]):
                    scores = key[:end, head // group] @ self.query[row, head] / 8**0.5
                    weights = scores.exp() / scores.exp().sum()
                    output[row, head] = weights @ value[:end, head // group]
        return output


class TestAttentionNegativeControls:
    """The comparison above would notice the mistakes it is there for."""

    case = AttentionCase(FORKED, seed=0)
    right = case.dense(with_root(FORKED))

    def differing_rows(self, output: torch.Tensor) -> set[int]:
        return {row for row in range(len(output)) if (output[row] - self.right[row]).abs().max() > 1e-3}

    def test_same_is_same(self) -> None:
        assert self.differing_rows(self.case.by_runs(BranchLayout(FORKED))) == set()

    def test_everything_visible(self) -> None:
        assert self.differing_rows(self.case.dense(torch.ones_like(with_root(FORKED)))) == set(range(7))

    def test_tree_taken_for_a_chain(self) -> None:
        causal = torch.ones(7, 7).tril().bool()
        # The root and node 0 are all that a chain shares with this tree.
        assert self.differing_rows(self.case.dense(causal)) == {2, 3, 4, 5, 6}
        assert self.differing_rows(self.case.by_runs(BranchLayout(DraftTree.chain(FORKED.tokens)))) == {2, 3, 4, 5, 6}

    def test_wrong_path(self) -> None:
        layout = BranchLayout(FORKED)
        layout.paths[1], layout.paths[2] = layout.paths[2], layout.paths[1]
        assert self.differing_rows(self.case.by_runs(layout)) == {2, 4, 5}

    def test_wrong_heads(self) -> None:
        with pytest.raises(ValueError, match="4 query heads cannot share 3"):
            AttentionCase(FORKED, seed=0, kv_heads=3).dense(with_root(FORKED))


def test_tree_attention_matches_torch() -> None:
    """torch's own attention with a dense mask and grouped heads, in float32."""
    case = AttentionCase(FORKED, seed=1)
    seen = torch.cat((torch.ones(7, 5, dtype=torch.bool), with_root(FORKED)), dim=1)
    key, value = torch.cat((case.prefix_key, case.key)), torch.cat((case.prefix_value, case.value))
    q, k, v = (t.float().transpose(0, 1).unsqueeze(0) for t in (case.query, key, value))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    output = case.dense(with_root(FORKED)).float()
    torch.testing.assert_close(output, expected.squeeze(0).transpose(0, 1), rtol=1e-5, atol=1e-5)
