"""Requests of random kinds, arriving and leaving at random: nothing is lost, held or grows."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Any

from tests.engine.engines import Engine, sampling

NUM_REQUESTS = 500


def resident_bytes() -> int:
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def random_params(rng: random.Random, longest: int, vocab: int) -> Any:
    kind = rng.randrange(8)
    arguments: dict[str, Any] = {}
    if kind == 0:
        arguments = {"temperature": 0.9, "top_k": 30}
    elif kind == 1:
        arguments = {"repetition_penalty": 1.2}
    elif kind == 2:
        arguments = {"extra_args": {"adaptivespec_enabled": False}}
    elif kind == 3:
        arguments = {"logprobs": 2}
    elif kind == 4:
        arguments = {"stop_token_ids": [rng.randrange(vocab) for _ in range(20)], "min_tokens": 2}
    return sampling(rng.randrange(2, longest), **arguments)


def soak(
    spec: Engine, prompts: Sequence[list[int]], answers: Sequence[list[int]], vocab: int, may_grow: int = 32 << 20
) -> None:
    """Run ``NUM_REQUESTS`` requests on a speculating engine; greedy ones are checked against plain vLLM's answers.

    Args:
        answers: what the target says to each prompt without speculation; their length bounds the requests'.
        may_grow: bytes by which the process may grow in the second half.
    """
    rng = random.Random(0)
    longest = min(len(answer) for answer in answers)
    engine = spec.llm.llm_engine
    spec.leaks()
    spec.reset_cache()
    free, branch_blocks = spec.free_blocks, len(spec.runner.branches.free)
    sent: dict[str, tuple[int, Any]] = {}
    finished: dict[str, list[int]] = {}
    aborted: set[str] = set()
    memory = 0
    while len(finished.keys() | aborted) < NUM_REQUESTS:
        while len(sent) < NUM_REQUESTS and engine.get_num_unfinished_requests() < 12 and rng.random() < 0.6:
            request_id, which, params = (
                f"soak-{len(sent)}",
                rng.randrange(len(prompts)),
                random_params(rng, longest, vocab),
            )
            sent[request_id] = (which, params)
            engine.add_request(request_id, {"prompt_token_ids": prompts[which]}, params)
        for output in engine.step():
            if output.finished and output.request_id not in aborted:
                finished[output.request_id] = list(output.outputs[0].token_ids)
        running = sorted(set(sent) - set(finished) - aborted)
        if running and rng.random() < 0.03:
            victim = rng.choice(running)
            engine.abort_request([victim])
            aborted.add(victim)
        if not memory and len(finished) > NUM_REQUESTS // 2:
            memory = resident_bytes()
    assert not engine.has_unfinished_requests()
    assert resident_bytes() - memory < may_grow
    for request_id, tokens in finished.items():
        which, params = sent[request_id]
        plain_greedy = params.temperature == 0 and params.repetition_penalty == 1.0 and not params.stop_token_ids
        if plain_greedy:
            assert tokens == answers[which][: len(tokens)], request_id
            assert len(tokens) == params.max_tokens
    assert spec.leaks() == {"requests": 0, "branch_blocks": 0}
    assert len(spec.runner.branches.free) == branch_blocks
    spec.reset_cache()
    assert spec.free_blocks == free
