"""The commit by its definition, on slots that are positions."""

from __future__ import annotations

import torch

from vllm_adaptivespec.core.commit import commit_path


def cache_of(values: list[float]) -> torch.Tensor:
    """Two blocks of four tokens, one element each."""
    return torch.tensor(values).reshape(2, 4, 1)


def test_path_is_moved_as_if_read_first() -> None:
    cache = cache_of([0, 1, 2, 3, 4, 5, 6, 7])
    commit_path(cache, [2, 3, 4, 5], [1, 2, 3])
    assert cache.flatten().tolist() == [0, 1, 3, 4, 5, 5, 6, 7]


def test_unwritten_slots_are_left_out() -> None:
    cache = cache_of([0, 1, 2, 3, 4, 5, 6, 7])
    commit_path(cache, [-1, 3, -1, 5], [1, 3])
    assert cache.flatten().tolist() == [0, 1, 2, 5, 4, 5, 6, 7]


def test_path_in_place_changes_nothing() -> None:
    cache = cache_of([0, 1, 2, 3, 4, 5, 6, 7])
    commit_path(cache, [2, 3, 4], [0, 1, 2])
    assert torch.equal(cache, cache_of([0, 1, 2, 3, 4, 5, 6, 7]))
