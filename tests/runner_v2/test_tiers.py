"""Nodes by batch size, through vLLM's own schedule: what is verified shrinks as the batch grows, down to nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.engines import Engine, Pair, sampling, start_tiny
from tests.runner_v2.conftest import SMALL
from tests.suite.oracle import Oracle, prompts_of, stats

pytestmark = pytest.mark.engine

TIERS = [[1, 1, 8], [2, 2, 3], [3, 6, 0]]


@pytest.fixture(scope="module")
def tiered(tiny: tuple[Path, Path]) -> Engine:
    return start_tiny(*tiny, 64, **SMALL, num_speculative_tokens_per_batch_size=TIERS)


@pytest.fixture
def engine(tiered: Engine) -> Iterator[Engine]:
    with tiered.restored():
        yield tiered


def test_batches_of_all_sizes(tiny_pair: Pair, engine: Engine, oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three requests of different lengths: nothing is verified, then three nodes each, then eight."""
    prompts = prompts_of((5, 33, 21))
    answers = oracle.knowing(engine, tiny_pair.plain, prompts, 40)
    scheduled: set[tuple[int, int]] = set()
    schedule = type(engine.scheduler).schedule

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = schedule(self, *args, **kwargs)
        drafts = [len(tokens) for tokens in output.scheduled_spec_decode_tokens.values()]
        scheduled.add((len(output.num_scheduled_tokens), max(drafts, default=0)))
        return output

    monkeypatch.setattr(type(engine.scheduler), "schedule", noted)
    before = stats(engine)
    lengths = (8, 20, 40)
    outputs = engine.tokens(prompts, [sampling(length) for length in lengths])
    assert outputs == [answer[:length] for answer, length in zip(answers, lengths, strict=True)]
    assert {(3, 0), (2, 3), (1, 8)} <= scheduled
    assert stats(engine)["accepted"] > before["accepted"]
