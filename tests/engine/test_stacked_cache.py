"""All layers' caches as one: copies reach every layer and nothing else, and what cannot be one is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_adaptivespec.runner_v1.attention import StackedCache

LAYERS, BLOCKS, SHAPE = 3, 4, (2, 8, 4)
BLOCK_NUMEL = 2 * 8 * 4


def layers_of(caches: list[torch.Tensor]) -> dict[str, Any]:
    return {f"layer{i}": SimpleNamespace(kv_cache=cache) for i, cache in enumerate(caches)}


def parts(blocks_apart: int) -> list[torch.Tensor]:
    """Layers in one allocation, the last of which ends it."""
    numel = ((LAYERS - 1) * blocks_apart + BLOCKS) * BLOCK_NUMEL
    memory = torch.arange(numel, dtype=torch.float32)
    return [
        memory[i * blocks_apart * BLOCK_NUMEL :][: BLOCKS * BLOCK_NUMEL].view(BLOCKS, *SHAPE) for i in range(LAYERS)
    ]


@pytest.mark.parametrize("blocks_apart", [BLOCKS, BLOCKS + 2])
def test_copy_reaches_every_layer(blocks_apart: int) -> None:
    caches = parts(blocks_apart)
    before = [cache.clone() for cache in caches]
    StackedCache(layers_of(caches)).copy_blocks([0, 3], [2, 1])
    for cache, old in zip(caches, before, strict=True):
        assert torch.equal(cache[2], old[0])
        assert torch.equal(cache[1], old[3])
        assert torch.equal(cache[[0, 3]], old[[0, 3]])


def test_one_layer() -> None:
    assert StackedCache(layers_of(parts(BLOCKS)[:1])).by_layer.shape == (1, BLOCKS, *SHAPE)


def test_refused() -> None:
    apart, regular = [torch.zeros((BLOCKS, *SHAPE)) for _ in range(LAYERS)], parts(BLOCKS)
    uneven = [parts(BLOCKS + 2)[0], *regular[1:]]
    for caches in (apart, uneven, [regular[0], regular[2], regular[1]], [regular[0], regular[1][:3]]):
        with pytest.raises(ValueError, match="equal parts of one allocation"):
            StackedCache(layers_of(caches))
    with pytest.raises(ValueError, match="no KV cache"):
        StackedCache({})
