"""Length limits, memory pressure, preemption, aborts and scheduling: the hard cases of the integration notes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.engine.engines import Engine, Pair, sampling, start_tiny
from tests.engine.oracle import OracleProposer
from tests.engine.test_oracle_exactness import prompts_of

pytestmark = pytest.mark.engine


def with_oracle(engine: Engine, plain: Engine, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    answers = [plain.tokens([p], sampling(num_tokens))[0] for p in prompts]
    OracleProposer.answers = {tuple(p): a for p, a in zip(prompts, answers, strict=True)}
    engine.runner.drafter.__class__ = OracleProposer
    return answers


@pytest.mark.parametrize("length", [150, 155, 158])
def test_up_to_max_model_len(tiny_pair: Pair, tiny_spec: Engine, length: int) -> None:
    """Trees are cut to what still fits, down to nothing, and the output ends exactly at the limit."""
    prompts = prompts_of((length, 200, 249, 255), seed=length)
    params = sampling(max_tokens=120)
    expected = [tiny_pair.plain.tokens([p], params)[0] for p in prompts]
    OracleProposer.answers = {tuple(p): a for p, a in zip(prompts, expected, strict=True)}
    tiny_spec.runner.drafter.__class__ = OracleProposer
    assert tiny_spec.tokens(prompts, params) == expected
    assert [len(p) + len(e) for p, e in zip(prompts, expected, strict=True)][1:] == [256] * 3


def test_trees_cut_by_the_scheduler(tiny_pair: Pair, tiny_spec: Engine) -> None:
    """A token budget smaller than all trees together cuts node lists anywhere, also between siblings."""
    prompts = prompts_of((9, 12, 15, 18, 21, 24), seed=8)
    answers = with_oracle(tiny_spec, tiny_pair.plain, prompts, 60)
    scheduler = tiny_spec.scheduler
    kept = scheduler.max_num_scheduled_tokens
    try:
        for budget in (7, 13, 23):
            scheduler.max_num_scheduled_tokens = budget
            tiny_spec.reset_cache()
            assert tiny_spec.tokens(prompts, sampling(60)) == answers
    finally:
        scheduler.max_num_scheduled_tokens = kept


def test_drafts_that_changed_on_the_way_are_a_chain(tiny_pair: Pair, tiny_spec: Engine) -> None:
    prompts = prompts_of((9, 30), seed=9)
    answers = with_oracle(tiny_spec, tiny_pair.plain, prompts, 60)
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


@pytest.fixture(scope="session")  # an engine that ends takes the process groups of all others with it
def crowded(tiny: tuple[Path, Path]) -> Engine:
    """Six requests on blocks for about three: requests are preempted and resumed all the time."""
    return start_tiny(*tiny, 14)


def test_preemption_and_resumption(tiny_pair: Pair, crowded: Engine) -> None:
    prompts = prompts_of((40, 33, 50, 1, 60, 45), seed=10)
    answers = with_oracle(crowded, tiny_pair.plain, prompts, 90)
    free = crowded.free_blocks
    preempted = 0
    original = type(crowded.scheduler)._preempt_request

    def count(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal preempted
        preempted += 1
        return original(self, *args, **kwargs)

    type(crowded.scheduler)._preempt_request = count
    try:
        for seed in range(3):
            OracleProposer.seed = seed
            assert crowded.tokens(prompts, sampling(90)) == answers
    finally:
        type(crowded.scheduler)._preempt_request = original
    assert preempted > 0
    assert crowded.free_blocks == free
    assert crowded.leaks() == {"requests": 0, "branch_blocks": 0}


def test_no_branch_blocks_left_means_chains(tiny_pair: Pair, tiny_spec: Engine) -> None:
    prompts = prompts_of((9, 12, 15), seed=11)
    answers = with_oracle(tiny_spec, tiny_pair.plain, prompts, 60)
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
