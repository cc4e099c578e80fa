"""The acceptance model: calibrated after a few hundred outcomes, by request where requests differ."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_adaptivespec.core.calibration import (
    FEATURES,
    AcceptanceModel,
    Reliability,
    RequestHistory,
    features_of,
    log_odds,
    sigmoid,
)


def samples(
    rng: np.random.Generator, count: int, history: float = 0.0, lossiness: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Children with their true probabilities: an over-confident draft, better where it may be lossy."""
    odds = rng.normal(0, 2, count)
    rank = rng.integers(1, 5, count)
    rows = zip(np.log(sigmoid(odds)), rank, rng.integers(1, 5, count), strict=True)
    features = np.array([features_of(p, int(r), int(d), history, lossiness) for p, r, d in rows])
    return features, sigmoid(-0.6 + 0.5 * features[:, 1] - 0.4 * np.log(rank) + history + 0.8 * lossiness)


def trained(steps: int = 300, lossiness: float = 0.0) -> tuple[AcceptanceModel, np.random.Generator]:
    rng = np.random.default_rng(0)
    model = AcceptanceModel()
    for _ in range(steps):
        features, p = samples(rng, 8, float(rng.normal(0, 0.5)), lossiness)
        model.update(features, (rng.random(8) < p).astype(float))
    return model, rng


@pytest.mark.parametrize("lossiness", [0.0, 0.7])
def test_probabilities_become_right(lossiness: float) -> None:
    model, rng = trained(lossiness=lossiness)
    features, p = samples(rng, 500, lossiness=lossiness)
    assert np.abs(model.probabilities(features) - p).mean() < 0.04
    assert np.abs(AcceptanceModel().probabilities(features) - p).mean() > 0.06  # what the prior says


def test_a_request_that_fares_better_is_believed_more() -> None:
    model, rng = trained(2000)
    features, p = samples(rng, 500, history=0.8)
    assert np.abs(model.probabilities(features) - p).mean() < 0.06
    assert (model.probabilities(features) > model.without_history(features)).all()


def test_old_outcomes_fade() -> None:
    model, rng = trained(3000)
    for _ in range(3000):
        features, _ = samples(rng, 8)
        model.update(features, np.zeros(8))
    features, _ = samples(rng, 500)
    assert model.probabilities(features).mean() < 0.02


def test_nothing_observed_changes_nothing() -> None:
    model = AcceptanceModel()
    before = model.weights.copy()
    model.update(np.empty((0, len(FEATURES))), np.empty(0))
    assert (model.weights == before).all()


def test_log_odds() -> None:
    assert log_odds(np.log(0.5)) == pytest.approx(0.0, abs=1e-12)
    assert log_odds(np.log(0.9)) == pytest.approx(np.log(9))
    values = [log_odds(x) for x in (0.0, -1e-300, -1e-12, -0.0067, -0.01, -1.0, -6.99, -7.0, -1e9, -np.inf)]
    assert np.isfinite(values).all()
    assert (np.diff(values) <= 0).all()
    assert log_odds(np.nan) == values[-1]


def test_history_by_hand() -> None:
    history = RequestHistory()
    assert history.feature == 0.0
    history.observe(3.0, 1.0)
    assert history.feature == pytest.approx(np.log(5 / 3))
    for _ in range(100):
        history.observe(0.0, 1.0)
    assert history.feature < -1.5


def test_reliability_counts() -> None:
    reliability = Reliability()
    for probability, accepted in ((0.05, False), (0.95, True), (1.0, True), (0.91, False)):
        reliability.observe(probability, accepted)
    values = reliability.as_dict()
    assert values["counts"] == [1, 0, 0, 0, 0, 0, 0, 0, 0, 3]
    assert values["predicted"][9] == pytest.approx((0.95 + 1.0 + 0.91) / 3, abs=1e-3)
    assert values["accepted"][9] == pytest.approx(2 / 3, abs=1e-3)
