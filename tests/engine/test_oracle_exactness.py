"""Greedy output with oracle trees equals the target's own, token by token, whatever the trees look like."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.engine.engines import Engine, Pair, sampling
from tests.engine.oracle import OracleProposer

pytestmark = pytest.mark.engine

LENGTHS = (5, 33, 70, 1, 100, 62)
NUM_TOKENS = 90


def prompts_of(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 512) for _ in range(length)] for length in lengths]


@pytest.fixture(scope="module")
def answers(tiny_pair: Pair) -> dict[tuple[int, ...], list[int]]:
    """The target's own greedy continuations, one request at a time, by plain vLLM."""
    prompts = prompts_of(LENGTHS)
    return {tuple(p): tiny_pair.plain.tokens([p], sampling(NUM_TOKENS))[0] for p in prompts}


@pytest.fixture
def oracle(tiny_spec: Engine, answers: dict[tuple[int, ...], list[int]]) -> Engine:
    tiny_spec.runner.drafter.__class__ = OracleProposer
    OracleProposer.answers = answers
    return tiny_spec


def wrong(engine: Engine, answers: dict[tuple[int, ...], list[int]]) -> int:
    """How many of the prompts come out wrong when all run together."""
    outputs = engine.tokens([list(p) for p in answers], sampling(NUM_TOKENS))
    return sum(output != answer for output, answer in zip(outputs, answers.values(), strict=True))


@pytest.mark.parametrize("seed", range(3))
def test_greedy_output_is_the_targets(oracle: Engine, answers: dict[tuple[int, ...], list[int]], seed: int) -> None:
    OracleProposer.seed = seed
    before = oracle.llm.collective_rpc("adaptivespec_stats")[0]
    assert wrong(oracle, answers) == 0
    after = oracle.llm.collective_rpc("adaptivespec_stats")[0]
    verified, accepted = (after[k] - before[k] for k in ("verifications", "accepted"))
    assert accepted > verified  # long paths, or the test says little
    assert after["chains"] - before["chains"] < verified / 2  # most were real trees
    assert oracle.leaks() == {"requests": 0, "branch_blocks": 0}


def test_prefix_hits_on_accepted_blocks(oracle: Engine, answers: dict[tuple[int, ...], list[int]]) -> None:
    """Blocks filled by accepted paths are shared afterwards: what follows them must be right."""
    assert wrong(oracle, answers) == 0
    longer = [list(p) + answer[:70] for p, answer in answers.items()]
    outputs = oracle.generate(longer, sampling(15))
    assert sum(o.num_cached_tokens for o in outputs) >= 32 * len(longer)
    assert [list(o.outputs[0].token_ids) for o in outputs] == [answer[70:85] for answer in answers.values()]


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
def test_negative_control(
    oracle: Engine, answers: dict[tuple[int, ...], list[int]], method: str, replacement: Any
) -> None:
    """Each part broken alone must show in the outputs, or the test above has no power over it."""
    runner_class = type(oracle.runner)
    oracle.runner.__class__ = type("Broken", (runner_class,), {method: replacement})
    assert wrong(oracle, answers) > 0


def test_negative_control_branch_contents(
    oracle: Engine, answers: dict[tuple[int, ...], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_adaptivespec.runner_v1.branch_blocks import RequestBranches

    monkeypatch.setattr(RequestBranches, "in_sync", broken_sync)
    assert wrong(oracle, answers) > 0
