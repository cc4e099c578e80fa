"""SmolLM2 with its trained head under the throughput policy: plain vLLM's output, whatever is drafted when."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tests.engine.engines import Engine, Pair, sampling
from tests.engine.smol import assert_equal
from tests.engine.soak import soak
from tests.engine.test_smol_soak import LONGEST, VOCAB, WARM_UP
from tests.engine.throughput.scripted import script

pytestmark = [pytest.mark.engine, pytest.mark.slow]

NUM_TOKENS = 64


@pytest.mark.parametrize("share", [0.7, 0.2])
@pytest.mark.parametrize("arguments", [{}, {"temperature": 0.8, "seed": 3, "top_k": 40}], ids=["greedy", "seeded"])
def test_output_is_plain_vllms(
    smol_pair: Pair,
    smol_spec: Engine,
    smol_prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    share: float,
    arguments: dict[str, Any],
) -> None:
    params = sampling(NUM_TOKENS, logprobs=1, ignore_eos=False, **arguments)
    expected = smol_pair.plain.generate(smol_prompts[:8], params)
    policy = script(smol_spec, monkeypatch, share)
    before = smol_spec.llm.collective_rpc("adaptivespec_stats")[0]
    assert_equal(smol_spec.generate(smol_prompts[:8], params), expected)
    after = smol_spec.llm.collective_rpc("adaptivespec_stats")[0]
    assert policy.pending
    assert len(after["shapes"]) > 5  # depths and sizes do change
    assert after["accepted"] > before["accepted"]
    assert smol_spec.leaks() == {"requests": 0, "branch_blocks": 0}


def test_by_its_own_decisions(smol_pair: Pair, smol_spec: Engine, smol_prompts: list[list[int]]) -> None:
    """Batches of changing size, with the real policy on real times; what it says of itself survives JSON."""
    params = sampling(48, logprobs=1, ignore_eos=False)
    for batch in (1, 8, 2):
        prompts = smol_prompts[:batch]
        assert_equal(smol_spec.generate(prompts, params), smol_pair.plain.generate(prompts, params))
    learned = json.loads(json.dumps(smol_spec.llm.collective_rpc("adaptivespec_stats")[0]["policy"]))
    assert learned["step_observations"] > 30
    assert learned["drafted_steps"] > 0


def test_soak(
    smol_pair: Pair, smol_spec: Engine, smol_prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(0)
    prompts = [rng.choice(smol_prompts)[: rng.randrange(2, 70)] for _ in range(40)]
    answers = smol_pair.plain.tokens(prompts, sampling(LONGEST))
    script(smol_spec, monkeypatch, 0.5)
    soak(smol_spec, prompts, answers, VOCAB, may_grow=WARM_UP)
