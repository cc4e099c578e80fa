"""The cost curves: what they learn, and what they do not let themselves be told."""

from __future__ import annotations

import math

import numpy as np
import pytest

from vllm_adaptivespec.core import costs
from vllm_adaptivespec.core.costs import KNOTS, Batch, Curve, CurvePrior, StepCosts

ROWS = np.arange(1, 65)


def hinge(rows: np.ndarray) -> np.ndarray:
    """Ten rows are free, each further one costs 3%; the first draft costs 10%."""
    return 0.02 * (1 + 0.03 * np.maximum(rows - 10, 0) + 0.1 * (rows > 1))


def taught(noise: float, outliers: float = 0.0, steps: int = 600, seed: int = 0) -> Curve:
    rng = np.random.default_rng(seed)
    curve = Curve(CurvePrior(level=(-3.5, 3.0)))
    for rows in rng.integers(1, 65, steps):
        seconds = hinge(rows) * math.exp(rng.normal(0, noise))
        if rng.random() < outliers:
            seconds *= 20
        curve.observe(math.log(seconds), int(rows))
    return curve


def worst(curve: Curve) -> float:
    """Largest relative error at any number of rows."""
    return float(np.abs(np.exp(curve.predict(1, len(ROWS))) / hinge(ROWS) - 1).max())


class TestCurve:
    def test_learns_a_bent_curve(self) -> None:
        assert worst(taught(noise=0.03)) < 0.05

    def test_first_observation_sets_the_scale(self) -> None:
        """Whatever the machine: nanoseconds or minutes."""
        for seconds in (1e-6, 1.0, 60.0):
            curve = Curve(CurvePrior(level=(-3.5, 3.0)))
            curve.observe(math.log(seconds), 1)
            assert math.exp(float(curve.predict(1, 1)[0])) == pytest.approx(seconds, rel=0.1)

    def test_outliers_do_not_bend_it(self) -> None:
        assert worst(taught(noise=0.03, outliers=0.05)) < 0.08

    def test_negative_control_outliers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The same timings with every one believed."""
        monkeypatch.setattr(costs, "OUTLIER", 1e9)
        assert worst(taught(noise=0.03, outliers=0.05)) > 0.15

    def test_what_is_not_seen_follows_what_is(self) -> None:
        """Seen at 1 and 4 rows only, eight rows are expected to cost more than four, but not absurdly so."""
        curve = Curve(CurvePrior(level=(-3.5, 3.0)))
        for _ in range(50):
            curve.observe(math.log(0.030), 1)
            curve.observe(math.log(0.042), 4)
        eight = math.exp(float(curve.predict(8, 1)[0]))
        assert 0.042 < eight < 0.075

    def test_a_slower_machine_shifts_all_of_it(self) -> None:
        """Observed at one number of rows, the change is expected at all others too."""
        curve = taught(noise=0.02)
        before = curve.predict(1, 64)
        for _ in range(200):
            curve.observe(math.log(1.3 * float(hinge(np.array([4]))[0])), 4)
        shift = np.exp(curve.predict(1, 64) - before)
        assert shift[3] == pytest.approx(1.3, abs=0.04)
        assert shift == pytest.approx(np.full(64, 1.3), abs=0.12)

    def test_noise_is_learned_within_bounds(self) -> None:
        assert taught(noise=0.1, steps=2000).noise == pytest.approx(0.1, rel=0.35)
        assert taught(noise=0.0).noise < 0.03

    def test_draws_differ_where_nothing_is_known(self) -> None:
        curve, rng = taught(noise=0.03), np.random.default_rng(0)
        drawn = np.array([curve.draw(rng, 1, 512) for _ in range(50)])
        assert drawn[:, :64].std(axis=0).max() < 0.05
        assert drawn[:, 500].std() > 0.1

    def test_stays_sane_for_a_long_time(self) -> None:
        """Knots that are never observed do not run away while others are."""
        curve = Curve(CurvePrior(level=(-3.5, 3.0)))
        for _ in range(20000):
            curve.observe(math.log(0.03), 2)
        assert np.all(np.isfinite(curve.mean))
        assert np.linalg.eigvalsh(curve.covariance).min() > -1e-9
        assert 0.02 < math.exp(float(curve.predict(8, 1)[0])) < 0.09

    def test_rows_beyond_the_table(self) -> None:
        curve = taught(noise=0.03)
        assert np.isfinite(curve.predict(KNOTS[-2] - 1, 4)).all()
        assert curve.predict(5000, 1) == pytest.approx(curve.predict(KNOTS[-1], 1))


class TestStepCosts:
    def test_seconds_never_fall(self) -> None:
        costs_ = StepCosts()
        rng = np.random.default_rng(0)
        for rows in rng.integers(4, 40, 300):
            costs_.observe_target(Batch(4, 800), int(rows), 0.03 * math.exp(rng.normal(0, 0.2)))
        seconds = costs_.target_seconds(Batch(4, 800), 60)
        assert seconds.shape == (61,)
        assert (np.diff(seconds) >= 0).all()
        assert (np.diff(costs_.level_seconds(16)) >= 0).all()

    def test_draft_costs_follow_the_machine(self) -> None:
        """Not observed for a while, a level is expected to have slowed down with the target."""
        costs_ = StepCosts()
        for _ in range(300):
            costs_.observe_target(Batch(1, 100), 1, 0.03)
            costs_.observe_level(1, 0.003)
        assert float(costs_.level_seconds(1)[0]) == pytest.approx(0.003, rel=0.05)
        for _ in range(300):
            costs_.observe_target(Batch(1, 100), 1, 0.06)
        assert float(costs_.level_seconds(1)[0]) == pytest.approx(0.006, rel=0.1)

    def test_nothing_is_learned_of_the_draft_before_there_is_a_unit(self) -> None:
        costs_ = StepCosts()
        costs_.observe_level(1, 5.0)
        assert not costs_.known
        assert costs_.level.observations == 0

    def test_a_jump_with_the_first_draft(self) -> None:
        """Steps without drafts take another way through the engine than those with some."""
        costs_, batch = StepCosts(), Batch(8, 800)
        for step in range(600):
            rows = 8 if step % 2 else 8 + step % 7
            costs_.observe_target(batch, rows, 0.05 + (0.004 if rows > 8 else 0.0) + 0.0005 * (rows - 8))
        seconds = costs_.target_seconds(batch, 3)
        assert seconds[1] - seconds[0] == pytest.approx(0.0045, abs=0.0015)
        assert seconds[2] - seconds[1] < 0.0015

    def test_steps_with_prompts_teach_too(self) -> None:
        """A server that never has a step without prompt tokens gets to know its scale all the same."""
        costs_ = StepCosts()
        for rows in range(40, 240):
            costs_.observe_target(Batch(8, 800), rows, 0.02 + 0.001 * rows, with_prompts=True)
        assert costs_.known
        assert float(costs_.target_seconds(Batch(8, 800), 0)[0]) == pytest.approx(0.028, rel=0.6)
        noise = costs_.target.noise
        costs_.observe_target(Batch(8, 800), 5000, 9.0, with_prompts=True)  # beyond all knots
        assert costs_.target.observations == 200
        assert costs_.target.noise == noise
