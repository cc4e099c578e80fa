"""Output with oracle trees equals the target's own, token by token, whatever the trees and the requests look like."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.engine.engines import Engine, Pair, sampling
from tests.suite.oracle import Oracle, Size, prompts_of, stats, tokens_of


@pytest.mark.parametrize("seed", range(3))
def test_greedy_output_is_the_targets(
    tiny_pair: Pair, tiny_spec: Engine, oracle: Oracle, size: Size, seed: int
) -> None:
    prompts = prompts_of(size.lengths)
    answers = oracle.knowing(tiny_spec, tiny_pair.plain, prompts, size.num_tokens)
    oracle.answers.seed = seed
    before = stats(tiny_spec)
    assert tiny_spec.tokens(prompts, sampling(size.num_tokens)) == answers
    after = stats(tiny_spec)
    verified, accepted = (after[k] - before[k] for k in ("verifications", "accepted"))
    assert accepted > verified  # long paths, or the test says little
    assert 0 < after["chains"] - before["chains"] < verified / 2  # most were real trees


def test_prefix_hits_on_accepted_blocks(tiny_pair: Pair, tiny_spec: Engine, oracle: Oracle, size: Size) -> None:
    """Blocks filled by accepted paths are shared afterwards: what follows them must be right."""
    prompts = prompts_of(size.lengths)
    answers = oracle.knowing(tiny_spec, tiny_pair.plain, prompts, size.num_tokens)
    assert tiny_spec.tokens(prompts, sampling(size.num_tokens)) == answers
    kept = size.num_tokens - 6
    longer = [p + answer[:kept] for p, answer in zip(prompts, answers, strict=True)]
    outputs = tiny_spec.generate(longer, sampling(6))
    # vLLM leaves a request's last cached block out, for the draft's sake.
    assert sum(o.num_cached_tokens for o in outputs) >= 16 * len(longer)
    assert tokens_of(outputs) == [answer[kept:] for answer in answers]


def test_up_to_max_model_len(tiny_pair: Pair, tiny_spec: Engine, oracle: Oracle) -> None:
    """Trees are cut to what still fits, down to nothing, and the output ends exactly at the limit."""
    prompts = prompts_of((228, 240, 249, 255), seed=1)
    answers = oracle.knowing(tiny_spec, tiny_pair.plain, prompts, 120)
    assert tiny_spec.tokens(prompts, sampling(120)) == answers
    assert [len(p) + len(a) for p, a in zip(prompts, answers, strict=True)] == [256] * 4


@pytest.mark.parametrize("budget", [7, 13, 23])
def test_trees_cut_by_the_scheduler(
    tiny_pair: Pair, tiny_spec: Engine, oracle: Oracle, size: Size, monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    """A token budget smaller than all trees together cuts node lists anywhere, also between siblings."""
    prompts = prompts_of((9, 12, 15, 18, 21, 24)[: len(size.lengths)], seed=8)
    answers = oracle.knowing(tiny_spec, tiny_pair.plain, prompts, size.num_tokens // 2)
    monkeypatch.setattr(tiny_spec.scheduler, "max_num_scheduled_tokens", budget)
    assert tiny_spec.tokens(prompts, sampling(size.num_tokens // 2)) == answers


def test_preemption_and_resumption(tiny_pair: Pair, crowded: Engine, oracle: Oracle, size: Size) -> None:
    """Six requests on blocks for about three."""
    prompts = prompts_of((40, 33, 50, 1, 60, 45), seed=10)
    answers = oracle.knowing(crowded, tiny_pair.plain, prompts, size.crowded_tokens)
    free = crowded.free_blocks
    preempted = 0
    scheduler = type(crowded.scheduler)
    original = scheduler._preempt_request

    def count(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal preempted
        preempted += 1
        return original(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "_preempt_request", count)
        assert crowded.tokens(prompts, sampling(size.crowded_tokens)) == answers
    assert preempted > 0
    assert crowded.free_blocks == free


def test_requests_come_and_go(tiny_pair: Pair, tiny_spec: Engine, oracle: Oracle, size: Size) -> None:
    """Requests join, finish and are aborted between drafting and verification; the others do not notice."""
    prompts = prompts_of(range(10, 10 + 3 * len(size.lengths), 2), seed=14)
    answers = oracle.knowing(tiny_spec, tiny_pair.plain, prompts, 24)
    free = tiny_spec.free_blocks
    engine = tiny_spec.llm.llm_engine
    rng = random.Random(1)
    waiting = list(range(len(prompts)))
    running: set[int] = set()
    finished: dict[int, list[int]] = {}
    while waiting or running:
        if waiting and rng.random() < 0.5:
            which = waiting.pop(0)
            running.add(which)
            engine.add_request(f"go-{which}", {"prompt_token_ids": prompts[which]}, sampling(24))
        if len(running) > 2 and rng.random() < 0.15:
            victim = rng.choice(sorted(running))
            engine.abort_request([f"go-{victim}"])
            running.discard(victim)
        for output in engine.step():
            which = int(output.request_id.split("-")[1])
            if output.finished and which in running:
                running.discard(which)
                finished[which] = list(output.outputs[0].token_ids)
    assert len(finished) > len(prompts) / 2
    assert finished == {which: answers[which] for which in finished}
    tiny_spec.tokens([[1, 2, 3]], sampling(1))  # the worker hears of the last ones
    tiny_spec.reset_cache()
    assert tiny_spec.free_blocks == free
