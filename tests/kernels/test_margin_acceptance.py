"""The acceptance kernel decides what ``core`` decides, field by field."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_adaptivespec.triton_kernels import Acceptance, margin_acceptance

from tests.kernels.batches import Batch, random_batch
from tests.kernels.conftest import DEVICE
from vllm_adaptivespec.core.acceptance import MarginRule
from vllm_adaptivespec.core.noise import gumbel_noise
from vllm_adaptivespec.core.rows import RowSampling, accept_rows, target_choices
from vllm_adaptivespec.core.tree import DraftTree

pytestmark = pytest.mark.kernels


def run(batch: Batch, sampled: bool = False, **changes: object) -> Acceptance:
    return margin_acceptance(**batch.arguments(DEVICE, sampled=sampled) | changes)


def assert_equal(batch: Batch, result: Acceptance, choices: torch.Tensor | None = None) -> None:
    walks = accept_rows(batch.logits, batch.row_starts, batch.trees, batch.rules, batch.samplings, choices)
    path, emitted, counts = result.path.tolist(), result.emitted.tolist(), result.num_emitted.tolist()
    margins, promoted = result.first_margin.tolist(), result.promoted.tolist()
    n = batch.max_nodes
    for i, walk in enumerate(walks):
        if walk is None:
            assert counts[i] == 0
            assert path[i] == [-1] * n
            assert emitted[i] == [-1] * (n + 1)
            assert promoted[i] == 0
            assert math.isnan(margins[i])
            continue
        assert counts[i] == len(walk.emitted), i
        assert path[i] == walk.path + [-1] * (n - len(walk.path)), i
        assert emitted[i] == walk.emitted + [-1] * (n + 1 - len(walk.emitted)), i
        assert promoted[i].bit_count() == walk.promoted, i
        assert promoted[i] == sum(1 << k for k in promoted_steps(batch, i, walk.emitted, choices)), i
        if walk.first_mismatch is None:
            assert math.isnan(margins[i]), i
        else:
            assert margins[i] == pytest.approx(walk.first_mismatch, rel=1e-5), i


def promoted_steps(batch: Batch, request: int, emitted: list[int], choices: torch.Tensor | None) -> list[int]:
    """Steps at which the emitted token is not the target's choice of the row it was decided at."""
    start, end = batch.row_starts[request], batch.row_starts[request + 1]
    tree = batch.trees[request]
    if choices is None:
        chosen = target_choices(batch.logits[start:end], tree, batch.samplings[request]).tolist()
    else:
        chosen = choices[start:end].tolist()
    steps, node = [], -1
    for step, token in enumerate(emitted):
        if token != chosen[1 + node]:
            steps.append(step)
        node = next((c for c in tree.children[node] if tree.tokens[c] == token), -1)
    return steps


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@given(
    seed=st.integers(0, 2**32),
    num_requests=st.integers(1, 5),
    vocab=st.sampled_from([2, 7, 100, 4095, 4096, 4097, 9001]),
    max_nodes=st.sampled_from([1, 2, 8, 16, 21]),
)
@settings(max_examples=25, deadline=None)
def test_greedy(dtype: torch.dtype, seed: int, num_requests: int, vocab: int, max_nodes: int) -> None:
    batch = random_batch(
        random.Random(seed), num_requests=num_requests, vocab=vocab, max_nodes=max_nodes, dtype=dtype, specials=True
    )
    assert_equal(batch, run(batch))


def test_thousands_of_trees() -> None:
    rng = random.Random(1)
    promoted = accepted = 0
    for _ in range(10):
        batch = random_batch(rng, num_requests=200, vocab=30, max_nodes=5)
        result = run(batch)
        assert_equal(batch, result)
        promoted += sum(b.bit_count() for b in result.promoted.tolist())
        accepted += int((result.path >= 0).sum())
    assert promoted > 150
    assert accepted - promoted > 300


def test_negative_control_parents() -> None:
    """A walk along other parents must show."""
    batch = random_batch(random.Random(8), num_requests=20, vocab=30, max_nodes=6)
    assert_equal(batch, run(batch))
    star = torch.full((len(batch.parents),), -1, dtype=torch.int32, device=DEVICE)
    with pytest.raises(AssertionError):
        assert_equal(batch, run(batch, parents=star))


def test_largest_tree(device: torch.device) -> None:
    batch = random_batch(random.Random(2), num_requests=6, vocab=200, max_nodes=64)
    assert_equal(batch, run(batch))


@given(seed=st.integers(0, 2**32), vocab=st.sampled_from([5, 1000, 5000]))
@settings(max_examples=25, deadline=None)
def test_given_choices(seed: int, vocab: int) -> None:
    rng = random.Random(seed)
    batch = random_batch(rng, num_requests=4, vocab=vocab, max_nodes=8)
    choices = torch.tensor([rng.choice((t, rng.randrange(vocab))) if t >= 0 else 0 for t in batch.tokens])
    assert_equal(batch, run(batch, choices=choices.to(DEVICE)), choices)


@given(seed=st.integers(0, 2**32), vocab=st.sampled_from([5, 1000, 5000]))
@settings(max_examples=25, deadline=None)
def test_sampled(seed: int, vocab: int) -> None:
    batch = random_batch(random.Random(seed), num_requests=4, vocab=vocab, max_nodes=8, sampled=True)
    result = run(batch, sampled=True)
    assert_equal(batch, result)
    again = run(batch, sampled=True)
    assert torch.equal(result.emitted, again.emitted)


def test_noise_is_the_twins() -> None:
    """Flat logits: the choice is the noise's argmax, at any seed and position, whatever shares the batch."""
    rng = random.Random(3)
    batch = random_batch(rng, num_requests=30, vocab=9000, max_nodes=1, sampled=True)
    batch.logits.zero_()
    batch.rules = [MarginRule()] * len(batch.rules)  # everything would pass
    emitted = run(batch, sampled=True).emitted.tolist()
    for i, sampling in enumerate(batch.samplings):
        if batch.row_starts[i] == batch.row_starts[i + 1] or not sampling.temperature:
            continue
        noise = gumbel_noise(sampling.seed, sampling.root_position, 9000)
        assert noise[emitted[i][0]] > noise.max() - 1e-4


def chi_square(observed: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities.double() * observed.sum()
    return float(((observed - expected) ** 2 / expected).sum())


CRITICAL = 16.27
"""Chi-square with three degrees of freedom exceeds this once in a thousand times."""


def test_output_distribution() -> None:
    """First and second emitted token against the target's own distribution, on a tree that covers some of them."""
    vocab, draws = 4, 400
    tree = DraftTree((2, 0), (-1, -1))
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn((3, vocab), generator=generator)
    rows[0, 2] += 4
    batch = Batch(
        rows.repeat(draws, 1),
        list(range(0, 3 * draws + 1, 3)),
        [tree] * draws,
        [MarginRule()] * draws,
        [RowSampling(1.0, seed, 17) for seed in range(draws)],
        2,
    )
    emitted = run(batch, sampled=True).emitted.cpu()
    assert chi_square(torch.bincount(emitted[:, 0], minlength=vocab), rows[0].softmax(0)) < CRITICAL
    second = torch.bincount(emitted[emitted[:, 0] == 2, 1], minlength=vocab)
    assert chi_square(second, rows[1].softmax(0)) < CRITICAL
    assert chi_square(second, rows[2].softmax(0)) > CRITICAL  # negative control: another node's row


@pytest.mark.parametrize("given", [False, True])
def test_requests_without_rows(given: bool) -> None:
    """All of them, so that there is no row at all."""
    rules, samplings = [MarginRule()] * 2, [RowSampling()] * 2
    batch = Batch(torch.zeros((0, 10)), [0, 0, 0], [DraftTree((), ())] * 2, rules, samplings, 4)
    changes = {"choices": torch.zeros(0, dtype=torch.int64, device=DEVICE)} if given else {}
    assert_equal(batch, run(batch, **changes))


def test_impossible_tokens_never_pass() -> None:
    """Not even with a threshold that everything passes."""
    logits = torch.tensor([[1.0, -math.inf, 0.5], [0.0, 0.0, 0.0], [math.nan, 0.0, 0.0], [0.0, 0.0, 0.0]])
    trees = [DraftTree((1,), (-1,)), DraftTree((1,), (-1,))]
    batch = Batch(logits, [0, 2, 4], trees, [MarginRule()] * 2, [RowSampling()] * 2, 1)
    everything = torch.full((2,), -math.inf, device=DEVICE)
    assert run(batch, log_kappas=everything).num_emitted.tolist() == [1, 1]


def test_nodes_past_the_limit_are_left_out() -> None:
    batch = random_batch(random.Random(7), num_requests=6, vocab=30, max_nodes=8)
    limited = run(batch, max_nodes=3)
    assert int(limited.num_emitted.max()) <= 4
    assert limited.path.shape == (6, 3)


def test_no_requests() -> None:
    batch = Batch(torch.zeros((0, 10)), [0], [], [], [], 4)
    assert run(batch).num_emitted.shape == (0,)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logits", torch.zeros((3, 5), dtype=torch.float64)),
        ("logits", torch.zeros((3, 5, 1))),
        ("row_starts", torch.tensor([0, 3])),
        ("tokens", torch.zeros(4, dtype=torch.int64)),
        ("parents", torch.zeros(3, dtype=torch.int64)),
        ("log_kappas", torch.zeros(2)),
        ("max_nodes", 0),
        ("max_nodes", 65),
        ("max_promotions", torch.zeros(1)),
        ("protected", torch.zeros(3, dtype=torch.int64)),
        ("choices", torch.zeros(3)),
        ("temperatures", torch.ones(1)),
    ],
)
def test_bad_arguments(name: str, value: object, device: torch.device) -> None:
    arguments: dict[str, Any] = dict(
        logits=torch.zeros((3, 5)),
        row_starts=torch.tensor([0, 3], dtype=torch.int32),
        tokens=torch.zeros(3, dtype=torch.int64),
        parents=torch.tensor([-1, -1, 0], dtype=torch.int32),
        log_kappas=torch.zeros(1),
        max_nodes=2,
        max_promotions=torch.full((1,), -1, dtype=torch.int32),
        protected=torch.zeros((1, 0), dtype=torch.int64),
    )
    arguments[name] = value
    moved = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
    with pytest.raises(ValueError, match=name):
        margin_acceptance(**moved)
