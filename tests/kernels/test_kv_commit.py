"""The commit kernel moves the accepted path's bytes in every cache, and nothing else."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_adaptivespec.triton_kernels import LayerCaches, kv_commit

from tests.kernels.batches import random_tree
from tests.kernels.conftest import DEVICE, on
from vllm_adaptivespec.core.commit import commit_path

pytestmark = pytest.mark.kernels


def make_caches(num: int, dtype: torch.dtype, layout: str, kv_heads: int, head_size: int) -> list[torch.Tensor]:
    shape = (12, 16, kv_heads, head_size) if layout == "NHD" else (12, kv_heads, 16, head_size)
    caches = [torch.randn(shape).to(dtype).to(DEVICE) for _ in range(num)]
    return caches if layout == "NHD" else [c.transpose(1, 2) for c in caches]


@given(
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]),
    layout=st.sampled_from(["NHD", "HND"]),
    heads=st.sampled_from([(1, 64), (3, 64), (2, 80), (2, 256)]),
    num_requests=st.integers(1, 4),
    max_nodes=st.sampled_from([1, 3, 8, 40]),
)
@settings(max_examples=40, deadline=None)
def test_random_paths(
    seed: int, dtype: torch.dtype, layout: str, heads: tuple[int, int], num_requests: int, max_nodes: int
) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    caches = make_caches(4, dtype, layout, *heads)
    expected = [c.clone() for c in caches]
    free = rng.sample(range(12 * 16), 12 * 16)
    starts, slots, paths, counts = [0], [], [], []
    for _ in range(num_requests):
        tree = random_tree(rng, rng.randrange(max_nodes + 1), 500)
        own = [free.pop() if rng.random() < 0.95 else -1 for _ in range(1 + len(tree))]
        path = list(tree.path(rng.randrange(len(tree)))) if len(tree) and rng.random() < 0.8 else []
        starts.append(starts[-1] + len(own))
        slots += own
        paths.append(path + [-1] * (max_nodes - len(path)))
        counts.append(len(path))
        for cache in expected:
            commit_path(cache, own[1:], path)
    kv_commit(
        LayerCaches(caches),
        on(DEVICE, slots, torch.int64),
        on(DEVICE, starts, torch.int32),
        on(DEVICE, paths, torch.int32),
        on(DEVICE, counts, torch.int32),
    )
    for cache, reference in zip(caches, expected, strict=True):
        raw = torch.uint8
        assert torch.equal(cache.contiguous().view(raw), reference.contiguous().view(raw))


def test_overlap() -> None:
    """Targets that are sources of others: nodes 1, 2, 3 move to the places of 0, 1, 2."""
    caches = make_caches(2, torch.float32, "NHD", 2, 64)
    before = [c.clone() for c in caches]
    slots = torch.tensor([5, 6, 7, 8, 9], dtype=torch.int64, device=DEVICE)
    kv_commit(
        LayerCaches(caches),
        slots,
        on(DEVICE, [0, 5], torch.int32),
        on(DEVICE, [[1, 2, 3, -1]], torch.int32),
        on(DEVICE, [3], torch.int32),
    )
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache[0, 6:9], old[0, 7:10])
        old[0, 6:9] = cache[0, 6:9]
        assert torch.equal(cache, old)


def test_negative_control_wrong_path() -> None:
    caches = make_caches(1, torch.float32, "NHD", 1, 64)
    expected = caches[0].clone()
    commit_path(expected, [6, 7, 8], [1])
    kv_commit(
        LayerCaches(caches),
        on(DEVICE, [5, 6, 7, 8], torch.int64),
        on(DEVICE, [0, 4], torch.int32),
        on(DEVICE, [[2]], torch.int32),
        on(DEVICE, [1], torch.int32),
    )
    assert not torch.equal(caches[0], expected)


def test_counts_past_the_path_are_cut() -> None:
    caches = make_caches(1, torch.float32, "NHD", 1, 64)
    expected = caches[0].clone()
    commit_path(expected, [6, 7, 8, 9], [1, 2, 3])
    kv_commit(
        LayerCaches(caches),
        on(DEVICE, [5, 6, 7, 8, 9], torch.int64),
        on(DEVICE, [0, 5], torch.int32),
        on(DEVICE, [[1, 2, 3]], torch.int32),
        on(DEVICE, [9], torch.int32),
    )
    assert torch.equal(caches[0], expected)


def test_caches_must_be_alike() -> None:
    cache = torch.zeros((2, 16, 1, 64))
    with pytest.raises(ValueError, match="must not be empty"):
        LayerCaches([])
    with pytest.raises(ValueError, match=r"caches\[1\] must have shape"):
        LayerCaches([cache, torch.zeros((2, 16, 1, 32))])
    with pytest.raises(ValueError, match=r"caches\[1\] must have strides"):
        LayerCaches([cache.expand(2, 16, 2, 64), torch.zeros((2, 16, 2, 64))])
    with pytest.raises(ValueError, match="bytes an element"):
        LayerCaches([cache.double()])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("slots", torch.zeros(4)),
        ("row_starts", torch.zeros(2, dtype=torch.int64)),
        ("path", torch.zeros((1, 3), dtype=torch.int64)),
        ("path", torch.zeros((1, 65), dtype=torch.int32)),
        ("num_accepted", torch.zeros(2, dtype=torch.int32)),
    ],
)
def test_bad_arguments(name: str, value: torch.Tensor) -> None:
    arguments = dict(
        slots=torch.zeros(4, dtype=torch.int64),
        row_starts=torch.tensor([0, 4], dtype=torch.int32),
        path=torch.zeros((1, 3), dtype=torch.int32),
        num_accepted=torch.zeros(1, dtype=torch.int32),
    )
    arguments[name] = value
    caches = LayerCaches(make_caches(1, torch.float32, "NHD", 1, 64))
    with pytest.raises(ValueError, match=name):
        kv_commit(caches, **{k: v.to(DEVICE) for k, v in arguments.items()})
