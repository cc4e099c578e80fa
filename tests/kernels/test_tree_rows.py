"""Trees by slot and the rows of a batch, on the device, against the twins in ``core``."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_adaptivespec.triton_kernels import path_rows, record_step, stage_rows, verify_rows

from tests.core.trees import numbered_trees
from tests.kernels.conftest import DEVICE, on
from vllm_adaptivespec.core.policy import HISTORY_START, HistoryBatch
from vllm_adaptivespec.core.store import TreeStore
from vllm_adaptivespec.core.totals import DeviceTotals
from vllm_adaptivespec.core.tree import ROOT, DraftTree

pytestmark = pytest.mark.kernels

MAX_NODES, SLOTS = 12, 6


def store_of(trees: dict[int, DraftTree], max_nodes: int = MAX_NODES) -> TreeStore:
    store = TreeStore(SLOTS, max_nodes, DEVICE)
    for slot, tree in trees.items():
        padding = max_nodes - len(tree)
        words = [sum(1 << j for j, seen in enumerate(row) if seen) for row in tree.ancestor_mask().tolist()]
        store.put(
            on(DEVICE, [slot], torch.int64),
            on(DEVICE, [[*tree.parents, *[-1] * padding]], torch.int32),
            on(DEVICE, [len(tree)], torch.int32),
            on(DEVICE, [[*words, *[0] * padding]], torch.int64),
            on(DEVICE, [[*tree.depths, *[0] * padding]], torch.int32),
        )
    return store


def rows_of(counts: dict[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    pairs = [(slot, local) for slot, count in counts.items() for local in range(count)]
    return on(DEVICE, [p[0] for p in pairs], torch.int64), on(DEVICE, [p[1] for p in pairs], torch.int32)


batches = st.dictionaries(
    st.integers(0, SLOTS - 1),
    st.tuples(numbered_trees(max_nodes=MAX_NODES), st.integers(1, MAX_NODES + 1)),
    min_size=1,
    max_size=4,
)


@given(batch=batches, data=st.data())
@settings(max_examples=25, deadline=None)
def test_rows(batch: dict[int, tuple[DraftTree, int]], data: st.DataObject) -> None:
    store = store_of({slot: tree for slot, (tree, _) in batch.items()})
    slots, local = rows_of({slot: count for slot, (_, count) in batch.items()})
    expected = store.rows(slots, local)
    num_rows = len(slots)
    rows = torch.randperm(60)[:num_rows].to(DEVICE)
    masks, positions = torch.full((60,), -7, device=DEVICE), torch.arange(100, 160, device=DEVICE)
    before = positions.clone()
    shift = stage_rows(store, slots, local, rows, masks, positions)
    assert shift.tolist() == (expected.depths - local).tolist()
    assert masks[rows].tolist() == expected.masks.tolist()
    assert positions[rows].tolist() == (before[rows] + expected.depths - local).tolist()
    others = torch.ones(60, dtype=torch.bool, device=DEVICE)
    others[rows] = False
    assert (masks[others] == -7).all()
    assert torch.equal(positions[others], before[others])

    tokens = torch.randint(-1, 50, (num_rows,), device=DEVICE, dtype=torch.int32)
    chain = torch.arange(num_rows, device=DEVICE) + 5
    verified = verify_rows(store, slots, local, chain, tokens)
    assert verified.positions.tolist() == (chain + expected.depths - local).tolist()
    assert verified.tokens.tolist() == torch.where(expected.is_valid, tokens, -1).tolist()
    assert verified.parents.tolist() == expected.parents.tolist()

    for slot, (tree, _) in batch.items():
        path = tree.path(data.draw(st.integers(ROOT, len(tree) - 1)))
        store.path[slot, : len(path)] = on(DEVICE, path, torch.int32)
        store.path_len[slot] = len(path)
    moved = path_rows(store, slots, local, rows)
    assert moved.tolist() == (rows + store.rows_in_path_order(slots, local)).tolist()


def test_more_rows_than_one_program() -> None:
    trees = {slot: DraftTree.chain(range(40)) for slot in range(SLOTS)}
    store = store_of(trees, 63)
    slots, local = rows_of(dict.fromkeys(trees, 41))
    masks = torch.zeros(300, dtype=torch.int64, device=DEVICE)
    positions = torch.zeros(300, dtype=torch.int64, device=DEVICE)
    rows = torch.arange(len(slots), device=DEVICE)
    stage_rows(store, slots, local, rows, masks, positions)
    assert masks[: len(slots)].tolist() == store.rows(slots, local).masks.tolist()
    assert (masks[len(slots) :] == 0).all()


@given(batch=batches, steps=st.integers(1, 4), data=st.data())
@settings(max_examples=20, deadline=None)
def test_record_step(batch: dict[int, tuple[DraftTree, int]], steps: int, data: st.DataObject) -> None:
    store = store_of({slot: tree for slot, (tree, _) in batch.items()})
    slots = on(DEVICE, list(batch), torch.int64)
    history = HistoryBatch(
        0.3,
        2,
        torch.full((SLOTS,), HISTORY_START, dtype=torch.float64, device=DEVICE),
        torch.zeros(SLOTS, dtype=torch.int32, device=DEVICE),
    )
    totals = DeviceTotals(4, MAX_NODES, DEVICE)
    expected_history, expected_totals = copy.deepcopy(history), copy.deepcopy(totals)
    constants = on(DEVICE, [0.3, HISTORY_START], torch.float64)
    counts = [count for _, count in batch.values()]
    starts = on(DEVICE, [0, *torch.tensor(counts).cumsum(0).tolist()], torch.int32)
    for _ in range(steps):
        paths, promoted, margins = [], [], []
        for tree, count in batch.values():
            kept = tree.prefix(count - 1)
            path = kept.path(data.draw(st.integers(ROOT, len(kept) - 1)))
            paths.append([*path, *[-1] * (MAX_NODES - len(path))])
            promoted.append(data.draw(st.integers(0, 2 ** len(path) - 1)))
            margins.append(data.draw(st.sampled_from([math.nan, -math.inf, -5.0, -1.0, -0.4, -0.01])))
        accepted = [sum(n >= 0 for n in p) for p in paths]
        made: dict[str, Any] = dict(
            path=on(DEVICE, paths, torch.int32),
            num_emitted=on(DEVICE, [a + 1 for a in accepted], torch.int32),
            promoted=on(DEVICE, promoted, torch.int64),
            first_margin=on(DEVICE, margins, torch.float32),
        )
        record_step(store, history, constants, 2, totals, slots, starts, **made)
        scheduled = starts.diff() - 1
        depth = store.scheduled_depths(slots, scheduled)
        expected_history.observe(slots, on(DEVICE, accepted, torch.int32), depth)
        nodes = torch.minimum(scheduled, store.num_nodes[slots])
        expected_totals.observe(depth, nodes, made["num_emitted"], made["promoted"], made["first_margin"])
        assert store.path[slots].tolist() == paths
        assert store.path_len[slots].tolist() == accepted
    assert torch.allclose(history.rates, expected_history.rates, atol=1e-12)
    assert history.misses.tolist() == expected_history.misses.tolist()
    assert totals.read() == expected_totals.read()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("slots", torch.zeros(3, dtype=torch.int32)),
        ("local", torch.zeros(2, dtype=torch.int32)),
        ("rows", torch.zeros(3, dtype=torch.int32)),
        ("row_masks", torch.zeros(5, dtype=torch.int32)),
        ("positions", torch.zeros((5, 1), dtype=torch.int64)),
    ],
)
def test_bad_arguments(name: str, value: torch.Tensor) -> None:
    wide = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    arguments = dict(
        slots=wide,
        local=torch.zeros(3, dtype=torch.int32, device=DEVICE),
        rows=wide,
        row_masks=torch.zeros(5, dtype=torch.int64, device=DEVICE),
        positions=torch.zeros(5, dtype=torch.int64, device=DEVICE),
    )
    arguments[name] = value.to(DEVICE)
    with pytest.raises(ValueError, match=name):
        stage_rows(TreeStore(2, 4, DEVICE), **arguments)
