"""The suite on the CPU path, and each of its parts broken alone."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.engines import Engine, Pair, sampling
from tests.suite.exactness import *  # noqa: F403
from tests.suite.oracle import Oracle, prompts_of

pytestmark = pytest.mark.engine

LENGTHS = (5, 33, 70, 1, 100, 62)
NUM_TOKENS = 90


def wrong(engine: Engine, plain: Engine, oracle: Oracle) -> int:
    """How many of the prompts come out wrong when all run together."""
    prompts = prompts_of(LENGTHS)
    answers = oracle.knowing(engine, plain, prompts, NUM_TOKENS)
    outputs = engine.tokens(prompts, sampling(NUM_TOKENS))
    return sum(output != answer for output, answer in zip(outputs, answers, strict=True))


def test_nothing_is_held_afterwards(tiny_pair: Pair, tiny_spec: Engine, oracle: Oracle) -> None:
    assert wrong(tiny_spec, tiny_pair.plain, oracle) == 0
    assert tiny_spec.leaks() == {"requests": 0, "branch_blocks": 0}


def broken_commit(self: Any) -> None:
    """Keeps the bookkeeping, writes nothing."""
    for step in self.step_trees:
        if step.branches is not None:
            step.branches.synced_to = -1


def broken_mask(self: Any, common: Any) -> Any:
    """Nodes see all rows before them, as in a chain."""
    return common


def broken_positions(self: Any, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
    """Nodes keep the positions of a chain."""
    result = type(self).__mro__[1]._prepare_inputs(self, scheduler_output, num_scheduled_tokens)
    chain = self.positions[: int(num_scheduled_tokens.sum())].clone()
    for step in self.step_trees:
        rows = slice(step.root_row + 1, step.root_row + 1 + len(step.tree))
        self.positions[rows] = step.base + 1 + chain.new_tensor(range(len(step.tree)))
    return result


def broken_sync(self: Any, tail: int, length: int) -> bool:
    """Branch blocks are never brought up to date."""
    return True


@pytest.mark.parametrize(
    ("method", "replacement"),
    [
        ("_commit", broken_commit),
        ("_split_by_path", broken_mask),
        ("_prepare_inputs", broken_positions),
    ],
)
def test_negative_control(tiny_pair: Pair, tiny_spec: Engine, oracle: Oracle, method: str, replacement: Any) -> None:
    """Each part broken alone must show in the outputs, or the tests above have no power over it."""
    runner_class = type(tiny_spec.runner)
    tiny_spec.runner.__class__ = type("Broken", (runner_class,), {method: replacement})
    assert wrong(tiny_spec, tiny_pair.plain, oracle) > 0


def test_negative_control_branch_contents(
    tiny_pair: Pair, tiny_spec: Engine, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_adaptivespec.runner_v1.branch_blocks import RequestBranches

    monkeypatch.setattr(RequestBranches, "in_sync", broken_sync)
    assert wrong(tiny_spec, tiny_pair.plain, oracle) > 0
