"""The draft's own cache holds the true hidden states' K/V of every accepted token, whatever shapes were accepted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine.engines import Engine, Pair, sampling
from tests.suite.oracle import Oracle, prompts_of
from vllm_adaptivespec.runner_v2.speculator import TreeSpeculator

pytestmark = pytest.mark.engine

BLOCK, NUM_BLOCKS, NUM_TOKENS = 32, 2, 50


def cached(engine: Engine, tokens: list[int]) -> dict[str, torch.Tensor]:
    """Contents of the first full blocks of a sequence, by layer, draft and target, at its last step."""
    seen: dict[str, torch.Tensor] = {}
    runner = engine.runner
    kept = type(runner)

    def spy(self: Any, *args: Any) -> Any:
        blocks = self.block_tables.input_block_tables[0][0, :NUM_BLOCKS].tolist()
        for name, layer in {**self.model_state.target_layers, **self.speculator.draft_layers}.items():
            seen[name] = layer.kv_cache[blocks].clone()
        return kept.sample(self, *args)

    runner.__class__ = type("Spied", (kept,), {"sample": spy})
    try:
        output = engine.generate([tokens], sampling(1))[0]
    finally:
        runner.__class__ = kept
    engine.last_hit = output.num_cached_tokens
    return seen


def compare(engine: Engine, plain: Engine, oracle: Oracle) -> dict[str, float]:
    """Largest difference by layer between the cache after generation and after a fresh prefill of the same tokens."""
    prompt = prompts_of((58,), seed=3)[0]
    (answer,) = oracle.knowing(engine, plain, [prompt], NUM_TOKENS)
    engine.reset_cache()
    assert engine.tokens([prompt], sampling(NUM_TOKENS)) == [answer]
    engine.runner.speculator.__class__ = TreeSpeculator
    sequence = prompt + answer
    generated = cached(engine, sequence)
    assert engine.last_hit >= BLOCK * NUM_BLOCKS
    engine.reset_cache()
    fresh = cached(engine, sequence)
    assert engine.last_hit == 0
    return {name: float((generated[name] - fresh[name]).abs().max()) for name in fresh}


def test_cache_equals_a_fresh_prefill(tiny_pair: Pair, tiny_spec: Engine, oracle: Oracle) -> None:
    for name, difference in compare(tiny_spec, tiny_pair.plain, oracle).items():
        assert difference < 1e-3, name


def test_negative_control_rows_not_in_path_order(
    tiny_pair: Pair, tiny_spec: Engine, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Feeding the draft a chain's rows instead of the accepted path's must show in its cache, and nowhere else."""
    monkeypatch.setattr(TreeSpeculator, "_follow_paths", lambda self, *args: None)
    differences = compare(tiny_spec, tiny_pair.plain, oracle)
    draft = set(tiny_spec.runner.speculator.draft_layers)
    assert max(differences[name] for name in draft) > 1e-2
    assert max(value for name, value in differences.items() if name not in draft) < 1e-3
