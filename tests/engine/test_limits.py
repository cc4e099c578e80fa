"""Changed drafts, scarce branch blocks, chunked prompts, aborts: hard cases of the CPU path."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.engine.engines import Engine, Pair, sampling
from tests.suite.oracle import Oracle, prompts_of

pytestmark = pytest.mark.engine


def test_drafts_that_changed_on_the_way_are_a_chain(tiny_pair: Pair, tiny_spec: Engine, oracle: Oracle) -> None:
    prompts = prompts_of((9, 30), seed=9)
    answers = oracle.knowing(tiny_spec, tiny_pair.plain, prompts, 60)
    scheduler_class = type(tiny_spec.scheduler)
    original = scheduler_class.update_draft_token_ids
    rng = random.Random(0)

    def tamper(self: Any, drafts: Any) -> None:
        for tokens in drafts.draft_token_ids:
            if tokens and rng.random() < 0.3:
                tokens[rng.randrange(len(tokens))] = rng.randrange(512)
        original(self, drafts)

    scheduler_class.update_draft_token_ids = tamper
    try:
        assert tiny_spec.tokens(prompts, sampling(60)) == answers
    finally:
        scheduler_class.update_draft_token_ids = original


def test_no_branch_blocks_left_means_chains(tiny_pair: Pair, tiny_spec: Engine, oracle: Oracle) -> None:
    prompts = prompts_of((9, 12, 15), seed=11)
    answers = oracle.knowing(tiny_spec, tiny_pair.plain, prompts, 60)
    pool = tiny_spec.runner.branches
    kept, pool.free = pool.free, pool.free[:2]
    try:
        assert tiny_spec.tokens(prompts, sampling(60)) == answers
    finally:
        tiny_spec.leaks()
        pool.free = kept


def test_seeded_requests_with_chunked_prompts(tiny_pair: Pair, tiny_spec: Engine) -> None:
    """Rows of unfinished prompts must not draw noise; stock vLLM crashes here on a CPU ("does not use offset")."""
    prompts = prompts_of((150, 20, 170), seed=12)
    params = [sampling(30, temperature=0.9, seed=40 + i) for i in range(3)]
    together = tiny_spec.tokens(prompts, params)
    tiny_spec.reset_cache()
    short = prompts_of((20,), seed=13)[0]
    alone = [tiny_spec.tokens([short, p], [sampling(5), s])[1] for p, s in zip(prompts, params, strict=True)]
    assert together == alone


def test_aborts_leave_nothing(tiny_spec: Engine) -> None:
    """Requests are aborted between drafting and verification."""
    engine = tiny_spec.llm.llm_engine
    free = tiny_spec.free_blocks
    prompts = prompts_of(tuple(range(10, 34, 2)), seed=14)
    for i, prompt in enumerate(prompts):
        engine.add_request(f"abort-{i}", {"prompt_token_ids": prompt}, sampling(60))
    rng = random.Random(1)
    alive = {f"abort-{i}" for i in range(len(prompts))}
    while engine.has_unfinished_requests():
        alive -= {o.request_id for o in engine.step() if o.finished}
        if alive and rng.random() < 0.3:
            victim = rng.choice(sorted(alive))
            engine.abort_request([victim])
            alive.discard(victim)
    assert tiny_spec.leaks() == {"requests": 0, "branch_blocks": 0}
    tiny_spec.reset_cache()
    assert tiny_spec.free_blocks == free
