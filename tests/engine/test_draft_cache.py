"""The draft's own cache holds the true hidden states' K/V of every accepted token, whatever shapes were accepted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine.engines import Engine, Pair, sampling
from tests.suite.oracle import Oracle, prompts_of

pytestmark = pytest.mark.engine

BLOCK = 32


def cached(engine: Engine, tokens: list[int], num_blocks: int) -> dict[str, torch.Tensor]:
    """Contents of the first full blocks of a cached sequence, by layer, draft and target."""
    # A request that stays queued would be simpler to ask, but shared blocks are found by their hashes: run a request
    # that hits them and read its block table while it is in the batch.
    seen: dict[str, torch.Tensor] = {}
    runner = engine.runner
    original = type(runner)._sample

    def spy(self: Any, *args: Any) -> Any:
        blocks = self.input_batch.block_table[0].block_table.np[0, :num_blocks].tolist()
        for name, layer in {**self.target_layers, **self.draft_layers}.items():
            seen[name] = layer.kv_cache[blocks].clone()
        return original(self, *args)

    kept = type(runner)
    runner.__class__ = type("Spied", (kept,), {"_sample": spy})
    try:
        output = engine.generate([tokens], sampling(1))[0]
    finally:
        runner.__class__ = kept
    engine.last_hit = output.num_cached_tokens
    return seen


def compare(engine: Engine, plain: Engine, oracle: Oracle) -> dict[str, float]:
    """Largest difference by layer between the cache after generation and after a fresh prefill of the same tokens."""
    prompt = prompts_of((40,), seed=3)[0]
    (answer,) = oracle.knowing(engine, plain, [prompt], 120)
    assert engine.tokens([prompt], sampling(120)) == [answer]
    engine.runner.drafter.__class__ = oracle.drafter.__mro__[1]
    sequence = prompt + answer[:-8]
    num_blocks = 3
    generated = cached(engine, sequence, num_blocks)
    assert engine.last_hit >= BLOCK * num_blocks
    engine.reset_cache()
    fresh = cached(engine, sequence, num_blocks)
    assert engine.last_hit == 0
    return {name: float((generated[name] - fresh[name]).abs().max()) for name in fresh}


def test_cache_equals_a_fresh_prefill(tiny_pair: Pair, tiny_spec: Engine, oracle: Oracle) -> None:
    tiny_spec.reset_cache()
    for name, difference in compare(tiny_spec, tiny_pair.plain, oracle).items():
        assert difference < 1e-3, name


def test_negative_control_wrong_rows_for_the_draft(
    tiny_pair: Pair, tiny_spec: Engine, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Feeding the draft a chain's rows instead of the accepted path's must show in its cache, and nowhere else."""
    from vllm_adaptivespec.runner_v1.proposer import EagleProposer, TreeProposer

    def chain_rows(self: Any, metadata: Any, sampled: Any, counts: Any) -> Any:
        result, rows = EagleProposer.prepare_inputs(self, metadata, sampled, counts)
        result.slot_mapping = self.runner.chain_slots[rows]
        return result, rows

    monkeypatch.setattr(TreeProposer, "prepare_inputs", chain_rows)
    tiny_spec.reset_cache()
    differences = compare(tiny_spec, tiny_pair.plain, oracle)
    draft = set(tiny_spec.runner.draft_layers)
    assert max(differences[name] for name in draft) > 1e-2
    assert max(value for name, value in differences.items() if name not in draft) < 1e-3
