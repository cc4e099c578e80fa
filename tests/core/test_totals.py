"""Counting on the device, against counting walks one by one."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.core.trees import small_vocabulary_trees
from vllm_adaptivespec.core.acceptance import MarginRule, Walk, walk_tree
from vllm_adaptivespec.core.stats import SpecStats
from vllm_adaptivespec.core.totals import DeviceTotals
from vllm_adaptivespec.core.tree import DraftTree


@given(
    batches=st.lists(
        st.lists(st.tuples(small_vocabulary_trees(4, max_nodes=8), st.integers(0, 2**20)), min_size=1, max_size=4),
        min_size=1,
        max_size=4,
    )
)
def test_same_as_one_by_one(batches: list[list[tuple[DraftTree, int]]]) -> None:
    stats, totals = SpecStats(), DeviceTotals(8, 8, torch.device("cpu"))
    for batch in batches:
        walks: list[Walk] = []
        bits = []
        for tree, seed in batch:
            generator = torch.Generator().manual_seed(seed)
            ratios = (-torch.rand(len(tree), generator=generator) * 3).tolist()
            choices = torch.randint(4, (len(tree) + 1,), generator=generator).tolist()
            walk = walk_tree(tree, lambda node, path, choices=choices: choices[1 + node], MarginRule(0.3), ratios)
            walks.append(walk)
            promoted = [tree.tokens[n] != choices[1 + p] for n, p in zip(walk.path, [-1, *walk.path], strict=False)]
            bits.append(sum(1 << i for i, was in enumerate(promoted) if was))
            if len(tree):
                stats.observe(walk)
        totals.observe(
            torch.tensor([t.depth for t, _ in batch], dtype=torch.int32),
            torch.tensor([len(t) for t, _ in batch], dtype=torch.int32),
            torch.tensor([len(w.emitted) for w in walks], dtype=torch.int32),
            torch.tensor(bits),
            torch.tensor([math.nan if w.first_mismatch is None else w.first_mismatch for w in walks]),
        )
    assert totals.read() == stats
