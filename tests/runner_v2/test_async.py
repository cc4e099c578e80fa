"""Asynchronous scheduling: the next step is scheduled before the last one's tokens are known.

vLLM switches it off on CPUs, so it is put back after the platform has had its say. Steps then come in the order they
have on a GPU: scheduled from placeholders, drafts and counts taken from device tensors, rejections taken back
afterwards. What a CPU cannot show is work that really runs at the same time on several streams.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.engines import Engine, Pair, sampling, start_tiny
from tests.runner_v2.conftest import SMALL
from tests.suite.exactness import (
    test_greedy_output_is_the_targets,  # noqa: F401
    test_requests_come_and_go,  # noqa: F401
    test_up_to_max_model_len,  # noqa: F401
)
from tests.suite.oracle import Oracle, prompts_of
from tests.suite.parameters import test_logprobs, test_mixed_batch  # noqa: F401

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def asynchronous(tiny: tuple[Path, Path]) -> Engine:
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def keep(cls: Any, vllm_config: Any) -> None:
        original(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", classmethod(keep))
        engine = start_tiny(*tiny, 64, **SMALL)
    assert type(engine.scheduler).__name__ == "AsyncScheduler"
    return engine


@pytest.fixture
def tiny_spec(asynchronous: Engine) -> Iterator[Engine]:
    """In place of the synchronous engine."""
    with asynchronous.restored():
        yield asynchronous


def test_steps_are_scheduled_before_the_last_ones_output(
    tiny_pair: Pair, tiny_spec: Engine, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the tests here would say no more than those of synchronous scheduling."""
    prompts = prompts_of((5, 9))
    oracle.knowing(tiny_spec, tiny_pair.plain, prompts, 12)
    unknown: list[int] = []
    scheduler = type(tiny_spec.scheduler)
    original = scheduler.schedule

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        unknown.append(sum(request.num_output_placeholders for request in self.running))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(scheduler, "schedule", noted)
    tiny_spec.tokens(prompts, sampling(12))
    assert max(unknown) > 2 * 8  # both requests with all their nodes
