"""The draft's own cache holds the true hidden states' K/V of every accepted token, whatever shapes were accepted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.engine.engines import Engine, Pair, sampling
from tests.suite.oracle import Oracle, Size, prompts_of

BLOCK = 32


@dataclass(frozen=True)
class Inside:
    """Where a model runner keeps what is compared.

    Args:
        sample: its method between the target's pass and the draft's.
        blocks: the first blocks of the only request in its batch.
        layers: its attention layers by name, of the target and of the draft.
        use_chain_rows: breaks the drafter, so that it reads a chain's rows instead of the accepted path's.
    """

    sample: str
    blocks: Callable[[Any, int], list[int]]
    layers: Callable[[Any], tuple[dict[str, Any], dict[str, Any]]]
    use_chain_rows: Callable[[pytest.MonkeyPatch], None]


def cached(engine: Engine, inside: Inside, tokens: list[int], num_blocks: int) -> dict[str, torch.Tensor]:
    """Contents of the first full blocks of a cached sequence, by layer, draft and target."""
    # A request that stays queued would be simpler to ask, but shared blocks are found by their hashes: run a request
    # that hits them and read its block table while it is in the batch.
    seen: dict[str, torch.Tensor] = {}
    runner = engine.runner
    kept = type(runner)

    def spy(self: Any, *args: Any) -> Any:
        blocks = inside.blocks(self, num_blocks)
        for layers in inside.layers(self):
            seen.update((name, layer.kv_cache[blocks].clone()) for name, layer in layers.items())
        return getattr(kept, inside.sample)(self, *args)

    runner.__class__ = type("Spied", (kept,), {inside.sample: spy})
    try:
        output = engine.generate([tokens], sampling(1))[0]
    finally:
        runner.__class__ = kept
    engine.last_hit = output.num_cached_tokens
    return seen


def compare(engine: Engine, plain: Engine, oracle: Oracle, inside: Inside, num_tokens: int) -> dict[str, float]:
    """Largest difference by layer between the cache after generation and after a fresh prefill of the same tokens."""
    prompt = prompts_of((58,), seed=3)[0]
    (answer,) = oracle.knowing(engine, plain, [prompt], num_tokens)
    engine.reset_cache()
    assert engine.tokens([prompt], sampling(num_tokens)) == [answer]
    getattr(engine.runner, oracle.part).__class__ = oracle.drafter.__mro__[1]
    sequence = prompt + answer
    num_blocks = len(sequence) // BLOCK - 1
    generated = cached(engine, inside, sequence, num_blocks)
    assert engine.last_hit >= BLOCK * num_blocks
    engine.reset_cache()
    fresh = cached(engine, inside, sequence, num_blocks)
    assert engine.last_hit == 0
    return {name: float((generated[name] - fresh[name]).abs().max()) for name in fresh}


def test_cache_equals_a_fresh_prefill(
    tiny_pair: Pair, tiny_spec: Engine, oracle: Oracle, inside: Inside, size: Size
) -> None:
    for name, difference in compare(tiny_spec, tiny_pair.plain, oracle, inside, size.cache_tokens).items():
        assert difference < 1e-3, name


def test_negative_control_wrong_rows_for_the_draft(
    tiny_pair: Pair,
    tiny_spec: Engine,
    oracle: Oracle,
    inside: Inside,
    size: Size,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Feeding the draft a chain's rows instead of the accepted path's must show in its cache, and nowhere else."""
    inside.use_chain_rows(monkeypatch)
    differences = compare(tiny_spec, tiny_pair.plain, oracle, inside, size.cache_tokens)
    _, draft = inside.layers(tiny_spec.runner)
    assert max(differences[name] for name in draft) > 1e-2
    assert max(value for name, value in differences.items() if name not in draft) < 1e-3
