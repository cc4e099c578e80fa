"""The attention kernel against float64 attention by its definition, request by request."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_adaptivespec.triton_kernels import tree_attention

from tests.kernels.batches import random_tree
from tests.kernels.conftest import DEVICE
from vllm_adaptivespec.core import attention as twin

pytestmark = pytest.mark.kernels

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
PADDING_ROWS = 2


@dataclass
class Case:
    """Arguments of one call, and per request what the twin needs."""

    arguments: dict[str, Any]
    contexts: list[int]
    masks: list[torch.Tensor]
    rows: list[range]
    nodes: list[range]

    def run(self, **changes: Any) -> torch.Tensor:
        moved = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in (self.arguments | changes).items()}
        return tree_attention(**moved).cpu()

    def expected(self, **options: Any) -> list[torch.Tensor]:
        a = self.arguments
        page = a["key_cache"].shape[1]
        results = []
        for r, context in enumerate(self.contexts):
            slots = torch.arange(context)
            blocks = a["block_tables"][r, slots // page].long()
            rows, nodes = self.rows[r], self.nodes[r]
            results.append(
                twin.tree_attention(
                    a["query"][rows.start : rows.stop].double(),
                    a["key_cache"][blocks, slots % page].double(),
                    a["value_cache"][blocks, slots % page].double(),
                    a["node_key"][nodes.start : nodes.stop].double(),
                    a["node_value"][nodes.start : nodes.stop].double(),
                    self.masks[r],
                    a["scale"],
                    **options,
                )
            )
        return results


def make_case(
    rng: random.Random,
    *,
    contexts: list[int],
    max_nodes: int,
    heads: int = 4,
    kv_heads: int = 2,
    head_size: int = 64,
    page: int = 16,
    dtype: torch.dtype = torch.float32,
    layout: str = "NHD",
    frontier: bool = False,
    num_nodes: int | None = None,
) -> Case:
    """Verification of random trees, or one draft level over them (``frontier``: some nodes are queries, no root)."""
    torch.manual_seed(rng.getrandbits(40))
    blocks_each = max(-(-max(contexts, default=1) // page), 1)
    num_blocks = len(contexts) * blocks_each + 3
    table = torch.randperm(num_blocks)[: len(contexts) * blocks_each].reshape(len(contexts), blocks_each)
    if layout == "NHD":
        cache = torch.randn((2, num_blocks, page, kv_heads, head_size))
    else:
        cache = torch.randn((2, num_blocks, kv_heads, page, head_size)).transpose(2, 3)
    masks, rows, nodes, words = [], [], [], []
    next_row = next_node = 0
    for _ in contexts:
        tree = random_tree(rng, rng.randrange(max_nodes + 1) if num_nodes is None else num_nodes, 1000)
        mask = tree.ancestor_mask()
        if frontier:
            picked = sorted(rng.sample(range(len(tree)), rng.randrange(len(tree) + 1)))
            mask = mask[picked]
        else:
            mask = torch.cat((torch.zeros((1, len(tree)), dtype=torch.bool), mask))
        masks.append(mask)
        words += [sum(1 << j for j in range(len(tree)) if row[j]) for row in mask.tolist()]
        rows.append(range(next_row, next_row + len(mask)))
        nodes.append(range(next_node, next_node + len(tree)))
        next_row, next_node = rows[-1].stop, nodes[-1].stop
    words = [w - (1 << 64) if w >= 1 << 63 else w for w in words] + [-1] * PADDING_ROWS

    def starts(ranges: list[range]) -> torch.Tensor:
        return torch.tensor([0, *(r.stop for r in ranges)], dtype=torch.int32)

    # Slots past a request's context hold garbage.
    key_cache, value_cache = cache[0].to(dtype), cache[1].to(dtype)
    arguments = dict(
        query=torch.randn((next_row + PADDING_ROWS, heads, head_size)).to(dtype),
        key_cache=key_cache,
        value_cache=value_cache,
        node_key=torch.randn((next_node + 1, kv_heads, head_size)).to(dtype),
        node_value=torch.randn((next_node + 1, kv_heads, head_size)).to(dtype),
        block_tables=table.to(torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        query_starts=starts(rows),
        node_starts=starts(nodes),
        masks=torch.tensor(words, dtype=torch.int64),
        scale=head_size**-0.5,
        max_queries=max([len(r) for r in rows] + [1]),
        max_nodes=max_nodes,
        max_context=blocks_each * page,
    )
    return Case(arguments, contexts, masks, rows, nodes)


def assert_close(case: Case, result: torch.Tensor, **options: Any) -> None:
    tolerance = TOLERANCE[result.dtype]
    for rows, expected in zip(case.rows, case.expected(**options), strict=True):
        torch.testing.assert_close(result[rows.start : rows.stop].double(), expected, rtol=tolerance, atol=tolerance)
    padding = result[case.rows[-1].stop :] if case.rows else result
    assert padding.isnan().all()  # poisoned, and not written


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@given(
    seed=st.integers(0, 2**32),
    num_requests=st.integers(1, 3),
    num_splits=st.sampled_from([None, 1, 2, 5]),
    window=st.sampled_from([None, 1, 3, 40]),
    softcap=st.sampled_from([None, 3.0]),
    layout=st.sampled_from(["NHD", "HND"]),
    frontier=st.booleans(),
    page=st.sampled_from([16, 32, 128]),
    heads=st.sampled_from([(4, 2), (3, 3), (6, 1)]),
)
@settings(max_examples=20, deadline=None)
def test_random_batches(
    dtype: torch.dtype,
    seed: int,
    num_requests: int,
    num_splits: int | None,
    window: int | None,
    softcap: float | None,
    layout: str,
    frontier: bool,
    page: int,
    heads: tuple[int, int],
) -> None:
    rng = random.Random(seed)
    case = make_case(
        rng,
        contexts=[rng.choice((1, 2, 15, 16, 17, 64, 150)) for _ in range(num_requests)],
        max_nodes=rng.choice((1, 5, 8, 17)),
        heads=heads[0],
        kv_heads=heads[1],
        page=page,
        dtype=dtype,
        layout=layout,
        frontier=frontier,
    )
    assert_close(case, case.run(num_splits=num_splits, window=window, softcap=softcap), window=window, softcap=softcap)


@pytest.mark.parametrize("head_size", [64, 80, 96, 128, 256])
def test_head_sizes(head_size: int) -> None:
    case = make_case(random.Random(head_size), contexts=[70, 5], max_nodes=8, head_size=head_size)
    assert_close(case, case.run())


def test_largest_tree_in_several_tiles() -> None:
    """65 rows of 8 query heads each are more than one tile; bit 63 is the sign of a word."""
    case = make_case(random.Random(0), contexts=[33], max_nodes=64, num_nodes=64, heads=8, kv_heads=1)
    assert_close(case, case.run(num_splits=2))


def test_nothing_to_see() -> None:
    case = make_case(random.Random(0), contexts=[0], max_nodes=0)
    assert (case.run(num_splits=1)[0] == 0).all()
    assert (case.run(num_splits=2)[0] == 0).all()


def test_negative_control_mask() -> None:
    """A mask that lets a node see its sibling must show."""
    case = make_case(random.Random(6), contexts=[20], max_nodes=9, num_nodes=9)
    assert_close(case, case.run())
    broken = case.arguments["masks"].clone()
    broken[1:] |= 1
    siblings = any(not m[0] for m in case.masks[0][1:])
    assert siblings
    with pytest.raises(AssertionError):
        assert_close(case, case.run(masks=broken))


def test_context_is_read_to_its_end_only() -> None:
    """Slots past the context, which hold uncommitted rows, change nothing; those before it do."""
    case = make_case(random.Random(5), contexts=[20], max_nodes=3)
    before = case.run()[: case.rows[0].stop]
    page = case.arguments["key_cache"].shape[1]
    for slot, changes in ((20, False), (19, True)):
        block = int(case.arguments["block_tables"][0, slot // page])
        key_cache = case.arguments["key_cache"].clone()
        key_cache[block, slot % page] += 5
        after = case.run(key_cache=key_cache)[: case.rows[0].stop]
        assert torch.equal(before, after) != changes


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("query", torch.zeros((4, 4, 72))),
        ("query", torch.zeros((4, 5, 64))),
        ("key_cache", torch.zeros((4, 16, 2, 64), dtype=torch.float16)),
        ("key_cache", torch.zeros((4, 24, 2, 64))),
        ("value_cache", torch.zeros((4, 16, 2, 32))),
        ("node_key", torch.zeros((3, 1, 64))),
        ("block_tables", torch.zeros((1, 2), dtype=torch.int64)),
        ("context_lens", torch.zeros(2, dtype=torch.int32)),
        ("query_starts", torch.zeros(2)),
        ("node_starts", torch.zeros(3, dtype=torch.int32)),
        ("masks", torch.zeros(4, dtype=torch.int32)),
        ("max_nodes", 65),
        ("max_queries", 0),
        ("max_context", 1000),
        ("window", 0),
        ("softcap", -1.0),
        ("num_splits", 0),
        ("out", torch.zeros((4, 4, 32))),
    ],
)
def test_bad_arguments(name: str, value: Any) -> None:
    case = make_case(random.Random(1), contexts=[20], max_nodes=3)
    changes = {name: value}
    if name == "key_cache" and value.shape[1] == 24:
        changes["value_cache"] = value
    message = "share" if name == "query" and value.shape[1] == 5 else name
    with pytest.raises(ValueError, match=message):
        case.run(**changes)
