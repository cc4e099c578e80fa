"""The store of trees on flat tensors, against ``DraftTree``."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.core.trees import numbered_trees
from vllm_adaptivespec.core.store import TreeStore
from vllm_adaptivespec.core.tree import ROOT, DraftTree

MAX_NODES = 12


def put(store: TreeStore, slot: int, tree: DraftTree) -> None:
    """What the device's kernels would store of a tree."""
    padding = MAX_NODES - len(tree)
    words = [sum(1 << j for j, seen in enumerate(row) if seen) for row in tree.ancestor_mask().tolist()]
    store.put(
        torch.tensor([slot]),
        torch.tensor([[*tree.parents, *[-1] * padding]], dtype=torch.int32),
        torch.tensor([len(tree)], dtype=torch.int32),
        torch.tensor([[*words, *[0] * padding]]),
        torch.tensor([[*tree.depths, *[0] * padding]], dtype=torch.int32),
    )


def flat(slots: list[int], num_rows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    pairs = [(slot, local) for slot, rows in zip(slots, num_rows, strict=True) for local in range(rows)]
    by_row, local = torch.tensor(pairs).T
    return by_row, local.to(torch.int32)


@given(trees=st.lists(numbered_trees(max_nodes=MAX_NODES), min_size=3, max_size=3), data=st.data())
def test_rows(trees: list[DraftTree], data: st.DataObject) -> None:
    """Trees cut by the scheduler, and rows past the last node, which are padding."""
    store = TreeStore(5, MAX_NODES, torch.device("cpu"))
    slots = [4, 0, 2]
    for slot, tree in zip(slots, trees, strict=True):
        put(store, slot, tree)
    num_rows = [1 + data.draw(st.integers(0, MAX_NODES)) for _ in trees]
    rows = store.rows(*flat(slots, num_rows))
    start = 0
    for tree, count in zip(trees, num_rows, strict=True):
        kept = tree.prefix(count - 1)
        for local in range(count):
            node, at = local - 1, start + local
            is_node = 0 <= node < len(kept)
            assert bool(rows.is_valid[at]) == is_node
            assert int(rows.parents[at]) == (kept.parents[node] if is_node else ROOT)
            assert int(rows.depths[at]) == (kept.depths[node] if is_node else min(local, 1))
            ancestors = {n + 1 for n in kept.path(node)} if is_node else set()
            assert int(rows.masks[at]) == sum(1 << j for j in {0, local} | ancestors)
        start += count
    scheduled = torch.tensor(num_rows) - 1
    depths = store.scheduled_depths(torch.tensor(slots), scheduled).tolist()
    assert depths == [tree.prefix(int(n)).depth for tree, n in zip(trees, scheduled, strict=True)]


@given(tree=numbered_trees(min_nodes=1, max_nodes=MAX_NODES), data=st.data())
def test_rows_in_path_order(tree: DraftTree, data: st.DataObject) -> None:
    store = TreeStore(2, MAX_NODES, torch.device("cpu"))
    put(store, 1, tree)
    path = tree.path(data.draw(st.integers(ROOT, len(tree) - 1)))
    store.path[1, : len(path)] = torch.tensor(path, dtype=torch.int32)
    store.path_len[1] = len(path)
    slots, local = flat([1], [len(tree) + 1])
    found = (local + store.rows_in_path_order(slots, local)).tolist()
    assert found[: len(path) + 1] == [0, *(node + 1 for node in path)]
    assert found[len(path) + 1 :] == list(range(len(path) + 1, len(tree) + 1))


def test_a_new_request_has_no_tree() -> None:
    store = TreeStore(2, MAX_NODES, torch.device("cpu"))
    put(store, 1, DraftTree.chain([5, 6]))
    store.path_len[1] = 2
    store.clear(1)
    rows = store.rows(*flat([1], [3]))
    assert rows.is_valid.tolist() == [False] * 3
    assert store.rows_in_path_order(*flat([1], [3])).tolist() == [0] * 3


def test_the_widest_tree_fits_its_word() -> None:
    store = TreeStore(1, 63, torch.device("cpu"))
    slots, local = torch.zeros(64, dtype=torch.int64), torch.arange(64)
    chain = DraftTree.chain(range(63))
    words = [(1 << (n + 1)) - 1 for n in range(63)]
    store.put(
        torch.tensor([0]),
        torch.tensor([chain.parents], dtype=torch.int32),
        torch.tensor([63], dtype=torch.int32),
        torch.tensor([words]),
        torch.tensor([chain.depths], dtype=torch.int32),
    )
    masks = [m % 2**64 for m in store.rows(slots, local).masks.tolist()]
    assert masks == [(1 << (j + 1)) - 1 for j in range(64)]
    with pytest.raises(ValueError, match="1 to 63"):
        TreeStore(1, 64, torch.device("cpu"))
