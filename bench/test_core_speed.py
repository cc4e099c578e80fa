"""What the host-side parts of a step cost on a CPU: `core/`, which the CPU path runs at every step.

The README has the commands that save a baseline and compare with it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from vllm_adaptivespec.core.acceptance import MarginRule, Walk, log_ratios
from vllm_adaptivespec.core.attention import tree_attention
from vllm_adaptivespec.core.branches import BranchLayout
from vllm_adaptivespec.core.calibration import RequestHistory
from vllm_adaptivespec.core.costs import Batch
from vllm_adaptivespec.core.growth import TreeGrowth
from vllm_adaptivespec.core.noise import gumbel_noise
from vllm_adaptivespec.core.policy import AcceptanceHistory, AdaptivePolicy, TreeShape
from vllm_adaptivespec.core.throughput import ThroughputPolicy
from vllm_adaptivespec.core.tree import DraftTree
from vllm_adaptivespec.core.valued_growth import DraftRequest

VOCAB = 49_152
TREE = DraftTree((1, 2, 3, 4, 5, 6, 7, 8), (-1, -1, -1, 0, 0, 1, 3, 6))


def grow(shape: TreeShape) -> DraftTree:
    growth = TreeGrowth(shape)
    log_probs = [-0.5 - 0.3 * rank for rank in range(shape.width)]
    while growth.frontier:
        rows = len(growth.frontier)
        growth.expand([log_probs] * rows, [list(range(shape.width))] * rows)
    return growth.tree()


@pytest.mark.parametrize("shape", [(3, 4, 8), (6, 4, 16), (8, 8, 64)], ids=str)
def test_growth(benchmark: Any, shape: tuple[int, int, int]) -> None:
    assert len(benchmark(grow, TreeShape(*shape))) == shape[2]


def test_branch_layout(benchmark: Any) -> None:
    def layout() -> int:
        branches = BranchLayout(TREE)
        return len(list(branches.runs())) + len(list(branches.branch_writes()))

    assert benchmark(layout) > 0


@pytest.mark.parametrize("rows", [9, 36])
def test_argmax_and_ratios(benchmark: Any, rows: int) -> None:
    logits = torch.randn((rows, VOCAB), generator=torch.Generator().manual_seed(0))
    parents = torch.arange(rows)
    tokens = torch.arange(rows)

    def decide() -> torch.Tensor:
        return log_ratios(logits, parents, tokens, logits.argmax(dim=-1))

    assert benchmark(decide).shape == (rows,)


def test_walk(benchmark: Any) -> None:
    choices = [1, 4, 7, 8, 0, 0, 0, 0, 9]

    def walk() -> int:
        w = Walk(TREE, MarginRule(0.3))
        while not w.done:
            w.advance(choices[1 + w.node], [-2.0] * len(TREE))
        return len(w.emitted)

    assert benchmark(walk) > 0


def test_policy(benchmark: Any) -> None:
    policy = AdaptivePolicy(TreeShape(2, 4, 6), TreeShape(5, 3, 8), 0.5)
    history = AcceptanceHistory(0.3, 5)
    assert benchmark(policy.shape, 0.4, history).nodes >= 6


def test_reference_attention(benchmark: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn((9, 9, 64), generator=generator)
    key, value = torch.randn((2, 512, 3, 64), generator=generator)
    node_key, node_value = torch.randn((2, 8, 3, 64), generator=generator)
    mask = torch.cat((torch.zeros((1, 8), dtype=torch.bool), TREE.ancestor_mask()))
    assert benchmark(tree_attention, query, key, value, node_key, node_value, mask, 0.125).shape == (9, 9, 64)


def test_noise(benchmark: Any) -> None:
    assert benchmark(gumbel_noise, 1, 2, VOCAB).shape == (VOCAB,)


@pytest.mark.parametrize("batch", [1, 32])
def test_throughput_policy(benchmark: Any, batch: int) -> None:
    """All that the throughput policy does in a step, learning included, on cheap rows, so that it drafts for all."""
    policy, rng = ThroughputPolicy(), np.random.default_rng(0)
    offers = np.sort(np.log(rng.dirichlet([3.0, 1.0, 0.5, 0.5], 4096)), axis=1)[:, ::-1].tolist()
    requests = [DraftRequest(RequestHistory(), 0.0, TreeShape(8, 4, 8), 2) for _ in range(batch)]
    load = Batch(batch, 200 * batch)
    shown = 0

    def step() -> int:
        nonlocal shown
        taken = policy.participants(load, requests)
        growths = policy.open([requests[i] for i in taken]) if taken else []
        while growing := [g for g in growths if g.frontier]:
            for growth in growing:
                rows = len(growth.frontier)
                growth.expand([offers[(shown + r) % 4096] for r in range(rows)], [[0, 1, 2, 3]] * rows)
                shown += rows
            policy.assess(growths)
            policy.costs.observe_level(len(growing), 0.001)
        if growths:
            policy.select(growths)
        walks = []
        for growth in growths:
            if growth.chosen:
                walk = Walk(growth.tree())
                walk.path = [0]
                walks.append((growth.request.history, growth.drafted(), walk))
        drafted = sum(len(g.chosen) for g in growths)
        policy.costs.observe_target(load, batch + drafted, 0.03 + 1e-5 * drafted)
        policy.costs.observe_first_pass(batch, 0.001)
        policy.observe_walks(walks)
        return drafted

    for _ in range(50):
        step()
    assert benchmark(step) >= batch
