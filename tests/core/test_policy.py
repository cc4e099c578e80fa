"""Tree policies, with numbers worked out by hand from the formula (design notes; arXiv 2609.02897)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_adaptivespec.config import AdaptiveSpecConfig
from vllm_adaptivespec.core.policy import (
    HISTORY_START,
    AcceptanceHistory,
    AdaptivePolicy,
    HistoryBatch,
    StaticPolicy,
    TreeShape,
)

PAPER = AdaptivePolicy(low=TreeShape(3, 4, 3), high=TreeShape(7, 1, 7), scale=0.5)
"""The published constants: (3, 4, 4) to (7, 1, 8) in a count that includes the root, d = 0.5."""


def history(rate: float = HISTORY_START, misses: int = 0) -> AcceptanceHistory:
    return AcceptanceHistory(decay=0.3, reset_after=5, rate=rate, misses=misses)


class TestAdaptivePolicy:
    @pytest.mark.parametrize(
        ("confidence", "rate", "shape"),
        [
            # s = confidence * rate / 0.5
            (0.0, 0.5, (3, 4, 3)),
            (1.0, 0.0, (3, 4, 3)),
            (0.25, 0.5, (4, 3, 4)),  # s = 0.25: 3 + 1, 4 - 0.75, 3 + 1
            (0.5, 0.5, (5, 3, 5)),  # s = 0.5: 3 + 2, 4 - 1.5 rounded half up, 3 + 2
            (0.75, 0.5, (6, 2, 6)),  # s = 0.75: 3 + 3, 4 - 2.25, 3 + 3
            (0.9, 0.5, (7, 1, 7)),  # s = 0.9: 3 + 3.6, 4 - 2.7, 3 + 3.6
            (0.8, 0.3, (5, 3, 5)),  # s = 0.48: 3 + 1.92, 4 - 1.44, 3 + 1.92
            (1.0, 0.5, (7, 1, 7)),  # s = 1
            (1.0, 1.0, (7, 1, 7)),  # s = 2, clamped
        ],
    )
    def test_formula(self, confidence: float, rate: float, shape: tuple[int, int, int]) -> None:
        assert PAPER.shape(confidence, history(rate)) == TreeShape(*shape)

    def test_scale(self) -> None:
        policy = AdaptivePolicy(TreeShape(1, 1, 1), TreeShape(11, 11, 11), scale=2.0)
        assert policy.shape(1.0, history(1.0)) == TreeShape(6, 6, 6)

    @given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
    def test_between_its_ends_and_monotone_in_confidence(self, low: float, high: float, rate: float) -> None:
        low, high = sorted((low, high))
        less, more = PAPER.shape(low, history(rate)), PAPER.shape(high, history(rate))
        for shape in (less, more):
            assert 3 <= shape.depth <= 7
            assert 1 <= shape.width <= 4
            assert 3 <= shape.nodes <= 7
        assert less.depth <= more.depth
        assert less.width >= more.width
        assert less.nodes <= more.nodes

    @given(st.floats(0, 1), st.floats(0, 1), st.integers(0, 4))
    def test_pure(self, confidence: float, rate: float, misses: int) -> None:
        """Every tensor-parallel rank must decide alike, so nothing but the signals may count."""
        signals = history(rate, misses)
        first = PAPER.shape(confidence, signals)
        assert PAPER.shape(confidence, signals) == first
        assert AdaptivePolicy(PAPER.low, PAPER.high, PAPER.scale).shape(confidence, history(rate)) == first
        assert signals == history(rate, misses)

    def test_from_the_configuration(self) -> None:
        config = AdaptiveSpecConfig.from_dict(
            {
                "num_speculative_tokens": 8,
                "tree_policy": "adaptive",
                "low_confidence_shape": [3, 4, 3],
                "high_confidence_shape": [7, 1, 7],
                "confidence_scale": 0.5,
                "history_decay": 0.3,
                "reset_after": 5,
            }
        )
        assert config.policy() == PAPER
        assert config.history() == history()


class TestStaticPolicy:
    @given(st.floats(0, 1), st.floats(0, 1))
    def test_always_the_same(self, confidence: float, rate: float) -> None:
        assert StaticPolicy(TreeShape(3, 4, 8)).shape(confidence, history(rate)) == TreeShape(3, 4, 8)


class TestTreeShape:
    def test_clipped(self) -> None:
        shape = TreeShape(depth=3, width=4, nodes=8)
        assert shape.clipped(depth=2, width=9, nodes=9) == TreeShape(2, 4, 8)
        assert shape.clipped(depth=9, width=1, nodes=9) == TreeShape(3, 1, 8)
        assert shape.clipped(depth=9, width=9, nodes=0) == TreeShape(3, 4, 0)


class TestAcceptanceHistory:
    def test_moving_average_by_hand(self) -> None:
        rates = history()
        seen = []
        for accepted, depth in [(3, 3), (1, 4), (0, 3), (2, 2)]:
            rates.observe(accepted, depth)
            seen.append(rates.rate)
        # 0.7 * 0.5 + 0.3; 0.7 * 0.65 + 0.3 / 4; 0.7 * 0.53; 0.7 * 0.371 + 0.3
        assert seen == pytest.approx([0.65, 0.53, 0.371, 0.5597])

    def test_five_misses_in_a_row_start_anew(self) -> None:
        rates = history(0.8)
        seen = []
        for _ in range(7):
            rates.observe(0, 3)
            seen.append(rates.rate)
        falling = [0.8 * 0.7**n for n in range(1, 5)]
        assert seen == pytest.approx([*falling, HISTORY_START, HISTORY_START * 0.7, HISTORY_START * 0.49])

    def test_accepted_step_breaks_the_row(self) -> None:
        rates = history(0.8)
        for accepted in (0, 0, 0, 0, 1, 0, 0, 0, 0):
            rates.observe(accepted, 2)
        assert rates.misses == 4
        assert rates.rate != HISTORY_START
        rates.observe(0, 2)
        assert (rates.rate, rates.misses) == (HISTORY_START, 0)

    @given(st.lists(st.integers(1, 16).flatmap(lambda d: st.tuples(st.integers(0, d), st.just(d))), max_size=40))
    def test_rate_stays_a_rate(self, steps: list[tuple[int, int]]) -> None:
        rates = history()
        for accepted, depth in steps:
            rates.observe(accepted, depth)
            assert 0 <= rates.rate <= 1
            assert 0 <= rates.misses < 5


@given(
    signals=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=20),
    low=st.tuples(st.integers(1, 8), st.integers(1, 8), st.integers(8, 32)),
    high=st.tuples(st.integers(1, 8), st.integers(1, 8), st.integers(8, 32)),
    scale=st.floats(0.05, 2),
)
def test_batch_chooses_what_each_request_alone_would(
    signals: list[tuple[float, float]], low: tuple[int, int, int], high: tuple[int, int, int], scale: float
) -> None:
    adaptive = AdaptivePolicy(TreeShape(*low), TreeShape(*high), scale)
    confidence, rates = torch.tensor(signals, dtype=torch.float64).T
    for policy in (adaptive, StaticPolicy(TreeShape(*low))):
        shapes = torch.stack(policy.shapes(confidence, rates), dim=1).tolist()
        expected = [policy.shape(c, AcceptanceHistory(0.3, 5, rate=r)) for c, r in signals]
        assert [TreeShape(*shape) for shape in shapes] == expected
        largest = policy.largest
        assert all(s.clipped(depth=largest.depth, width=largest.width, nodes=largest.nodes) == s for s in expected)


@given(
    steps=st.lists(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=3, max_size=3), max_size=12),
    decay=st.floats(0.01, 1),
    reset_after=st.integers(1, 4),
)
def test_batch_history(steps: list[list[tuple[int, int]]], decay: float, reset_after: int) -> None:
    alone = [AcceptanceHistory(decay, reset_after) for _ in range(5)]
    together = HistoryBatch(
        decay, reset_after, torch.full((5,), HISTORY_START, dtype=torch.float64), torch.zeros(5, dtype=torch.int32)
    )
    requests = [3, 0, 4]  # the others stay as they are
    for step in steps:
        accepted, depth = torch.tensor([(min(a, d), d) for a, d in step]).T
        together.observe(torch.tensor(requests), accepted, depth)
        for request, a, d in zip(requests, accepted.tolist(), depth.tolist(), strict=True):
            if d:
                alone[request].observe(a, d)
    assert together.rates.tolist() == pytest.approx([h.rate for h in alone])
    assert together.misses.tolist() == [h.misses for h in alone]
