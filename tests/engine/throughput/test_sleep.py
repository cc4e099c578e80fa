"""Requests whose drafting sleeps and wakes at random: the draft's cache is what it would be had it never slept."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.engines import Engine, Pair, sampling
from tests.engine.throughput.scripted import script
from tests.suite.oracle import Oracle, prompts_of
from vllm_adaptivespec.runner_v1.backlog import KEPT, UNKNOWN, DraftBacklog

pytestmark = pytest.mark.engine

BLOCK = 32
LENGTHS = (5, 33, 70, 1, 100, 62)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_exact(
    tiny_pair: Pair, tiny_spec: Engine, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    prompts = prompts_of(LENGTHS)
    answers = oracle.knowing(tiny_spec, tiny_pair.plain, prompts, 90)
    policy = script(tiny_spec, monkeypatch, share)
    assert tiny_spec.tokens(prompts, sampling(90)) == answers
    assert bool(policy.pending) == (share > 0)
    if share == 0.1:
        assert max(policy.pending) > tiny_spec.runner.drafter.max_num_tokens  # some needed several passes
    assert tiny_spec.leaks() == {"requests": 0, "branch_blocks": 0}


def draft_cache(engine: Engine, tokens: list[int]) -> dict[str, torch.Tensor]:
    """The draft layers' cache of a sequence's full blocks, once the draft has had to read all of it."""
    runner = engine.runner
    kept = type(runner)
    seen: dict[str, torch.Tensor] = {}
    num_blocks = len(tokens) // BLOCK

    def spy(self: Any, *args: Any) -> Any:
        blocks = self.input_batch.block_table[0].block_table.np[0, :num_blocks].tolist()
        seen.update((name, layer.kv_cache[blocks].clone()) for name, layer in self.draft_layers.items())
        return kept._sample(self, *args)

    runner.__class__ = type("Spied", (kept,), {"_sample": spy})
    try:
        engine.tokens([tokens], sampling(4))
    finally:
        runner.__class__ = kept
    return seen


def differences(
    engine: Engine,
    plain: Engine,
    oracle: Oracle,
    monkeypatch: pytest.MonkeyPatch,
    share: float,
    broken: dict[str, Any] | None = None,
) -> dict[str, float]:
    """Largest difference by draft layer between a cache of much sleep and one that was read as it came.

    Args:
        broken: methods of the backlog to replace while the first of them is made.
    """
    prompt = prompts_of((58,), seed=3)[0]
    (answer,) = oracle.knowing(engine, plain, [prompt], 120)
    engine.reset_cache()
    with pytest.MonkeyPatch.context() as patch:
        for method, replacement in (broken or {}).items():
            patch.setattr(DraftBacklog, method, replacement)
        script(engine, monkeypatch, share)
        assert engine.tokens([prompt], sampling(120)) == [answer]
        engine.runner.drafter.__class__ = oracle.drafter.__mro__[1]
        script(engine, monkeypatch, 1.0)
        slept = draft_cache(engine, prompt + answer)
    engine.reset_cache()
    fresh = draft_cache(engine, prompt + answer)
    return {name: float((slept[name] - fresh[name]).abs().max()) for name in fresh}


@pytest.mark.parametrize("share", [0.0, 0.1, 0.7])
def test_cache_after_sleep(
    tiny_pair: Pair, tiny_spec: Engine, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    for name, difference in differences(tiny_spec, tiny_pair.plain, oracle, monkeypatch, share).items():
        assert difference < 1e-3, name


def keep_nothing(self: DraftBacklog, slots: torch.Tensor, states: torch.Tensor) -> None:
    self.states[slots] = 0.0
    self.known[slots.numpy()] = KEPT


def see_everything(self: DraftBacklog, slots: np.ndarray) -> int:
    return len(slots)


@pytest.mark.parametrize(("method", "broken"), [("keep", keep_nothing), ("missing_from", see_everything)])
def test_negative_control(
    tiny_pair: Pair, tiny_spec: Engine, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, method: str, broken: Any
) -> None:
    """States that are not kept, or tokens taken for read that are not, must show in the draft's cache."""
    found = differences(tiny_spec, tiny_pair.plain, oracle, monkeypatch, 0.0, {method: broken})
    assert max(found.values()) > 1e-2


def test_what_can_never_be_read_is_not_drafted_after(
    tiny_pair: Pair, tiny_spec: Engine, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompts_of((100,), seed=4)[0]
    (answer,) = oracle.knowing(tiny_spec, tiny_pair.plain, [prompt], 20)
    tiny_spec.runner.drafter.__class__ = oracle.drafter.__mro__[1]
    policy = script(tiny_spec, monkeypatch, 1.0)
    assert tiny_spec.tokens([prompt], sampling(20)) == [answer]
    assert policy.pending
    tiny_spec.runner.throughput.backlog.known[:] = UNKNOWN
    policy = script(tiny_spec, monkeypatch, 1.0)
    assert tiny_spec.tokens([prompt], sampling(20)) == [answer]
    assert not policy.pending


def test_preemption(tiny_pair: Pair, crowded: Engine, oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are lost and found again while requests sleep."""
    prompts = prompts_of((40, 33, 50, 1, 60, 45), seed=10)
    answers = oracle.knowing(crowded, tiny_pair.plain, prompts, 90)
    script(crowded, monkeypatch, 0.2)
    assert crowded.tokens(prompts, sampling(90)) == answers
    assert crowded.leaks() == {"requests": 0, "branch_blocks": 0}
