"""What a step costs: curves of seconds over rows, learned from the steps themselves.

A curve is ``log seconds``, piecewise linear in ``log rows`` between fixed knots, plus a few linear terms. Its values at
the knots are the state of a Kalman filter: the prior says that time grows with some power of the rows, every timed pass
corrects it, and a common drift of all knots absorbs a machine that as a whole gets slower or faster. A pass far from
what was expected counts little, so that a neighbour's burst or a garbage collection does not bend the curve.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

KNOTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 4096)
"""Rows at which a curve may bend."""

DRIFT = 0.005
"""Standard deviation of the common drift of a curve, per timed pass, relative."""
SHAPE_DRIFT = 0.001
"""The same of every knot for itself."""
NOISE_START, NOISE_LEAST, NOISE_MOST = 0.05, 0.02, 0.3
"""Relative standard deviation of one timing: assumed at first, and the bounds of what is learned."""
NOISE_DECAY = 0.02
OUTLIER = 3.0
"""Standard deviations from which a timing counts less the farther away it is."""
BIAS_DECAY, BIAS_LIMIT = 0.1, 1.5
"""Of the running mean of errors, in standard deviations: past the limit it is no noise, and the curve is doubted."""
DOUBT = 0.25
"""Share of the prior's variance that is then added."""

PROMPT_DOUBT = 4.0
"""Times the noise of a step is taken to be with prompt tokens in it."""

_LOG_KNOTS = np.log(KNOTS)


def _weights(rows: np.ndarray) -> np.ndarray:
    """``[len(rows), len(KNOTS)]`` weights of the knots in the values at ``rows``; constant beyond the last."""
    x = np.log(np.clip(rows, KNOTS[0], KNOTS[-1]))
    right = np.clip(np.searchsorted(_LOG_KNOTS, x, side="left"), 1, len(KNOTS) - 1)
    share = (x - _LOG_KNOTS[right - 1]) / (_LOG_KNOTS[right] - _LOG_KNOTS[right - 1])
    weights = np.zeros((len(rows), len(KNOTS)))
    index = np.arange(len(rows))
    weights[index, right - 1] = 1 - share
    weights[index, right] = share
    return weights


_TABLE = _weights(np.arange(1, KNOTS[-2] + 1))


def _rows_weights(first: int, count: int) -> np.ndarray:
    """The weights for ``count`` consecutive row counts."""
    if first + count - 1 <= len(_TABLE):
        return _TABLE[first - 1 : first - 1 + count]
    return _weights(np.arange(first, first + count))


@dataclass(frozen=True)
class CurvePrior:
    """What is assumed of a curve before the first timing; standard deviations in brackets.

    Args:
        level: log seconds (or log of a ratio) at one row.
        power: time grows with ``rows ** power``.
        bend: deviation from that power law, per e-fold of rows.
        terms: means and deviations of the linear terms.
    """

    level: tuple[float, float]
    power: tuple[float, float] = (0.25, 0.25)
    bend: float = 0.2
    terms: tuple[tuple[float, float], ...] = ()


class Curve:
    """One learned curve; see the module."""

    def __init__(self, prior: CurvePrior) -> None:
        knots, terms = len(KNOTS), len(prior.terms)
        self.mean = np.concatenate([prior.level[0] + prior.power[0] * _LOG_KNOTS, [mean for mean, _ in prior.terms]])
        self.covariance = np.zeros((knots + terms, knots + terms))
        self.covariance[:knots, :knots] = (
            prior.level[1] ** 2
            + prior.power[1] ** 2 * np.outer(_LOG_KNOTS, _LOG_KNOTS)
            + prior.bend**2 * np.minimum.outer(_LOG_KNOTS, _LOG_KNOTS)
        )
        index = np.arange(knots, knots + terms)
        self.covariance[index, index] = [sd**2 for _, sd in prior.terms]
        self.noise = NOISE_START
        self.observations = 0
        self._prior = self.covariance.copy()
        self._bias = 0.0
        self._knots = knots

    def predict(self, first: int, count: int, terms: np.ndarray | None = None) -> np.ndarray:
        """``[count]`` log values at ``first``, ``first + 1``, ... rows.

        Args:
            terms: ``[count, number of linear terms]``; None for all zero.
        """
        return self._read(self.mean, first, count, terms)

    def draw(self, rng: np.random.Generator, first: int, count: int, terms: np.ndarray | None = None) -> np.ndarray:
        """Like ``predict`` for a curve drawn from what the timings leave open."""
        jitter = 1e-12 * np.eye(len(self.mean))
        state = self.mean + np.linalg.cholesky(self.covariance + jitter) @ rng.standard_normal(len(self.mean))
        return self._read(state, first, count, terms)

    def _read(self, state: np.ndarray, first: int, count: int, terms: np.ndarray | None) -> np.ndarray:
        values = _rows_weights(first, count) @ state[: self._knots]
        return values if terms is None else values + terms @ state[self._knots :]

    def observe(self, log_value: float, rows: int, terms: np.ndarray | None = None, doubt: float = 1.0) -> None:
        """Learn from one timing.

        Args:
            log_value: log of what was measured.
            terms: ``[number of linear terms]``.
            doubt: times its noise is assumed to be that of others; above 1 the noise is not learned from it.
        """
        x = np.zeros(len(self.mean))
        x[: self._knots] = _rows_weights(rows, 1)[0]
        if terms is not None:
            x[self._knots :] = terms
        covariance = self.covariance
        covariance[: self._knots, : self._knots] += DRIFT**2
        diagonal = np.einsum("ii->i", covariance)
        diagonal += np.where(diagonal < self._prior.diagonal(), SHAPE_DRIFT**2, 0.0)
        gain = covariance @ x
        expected_variance = float(x @ gain)
        error = log_value - float(x @ self.mean)
        noise = doubt * self.noise
        surprise = error / math.sqrt(expected_variance + noise**2)
        noise *= max(1.0, abs(surprise) / OUTLIER)
        variance = expected_variance + noise**2
        self.mean = self.mean + gain * (error / variance)
        self.covariance = covariance - np.outer(gain, gain / variance)
        self.observations += 1
        if doubt > 1.0:
            return
        self._bias += BIAS_DECAY * (min(max(surprise, -OUTLIER), OUTLIER) - self._bias)
        if abs(self._bias) > BIAS_LIMIT:
            self.covariance = self.covariance + DOUBT * self._prior
            self._bias = 0.0
        # The filter's own uncertainty is no noise of the machine.
        seen = min(max(error**2 - expected_variance, 0.0), (OUTLIER * self.noise) ** 2)
        square = (1 - NOISE_DECAY) * self.noise**2 + NOISE_DECAY * seen
        self.noise = min(max(math.sqrt(square), NOISE_LEAST), NOISE_MOST)


@dataclass(frozen=True)
class Batch:
    """What the cost of a decoding step depends on besides the drafted rows.

    Args:
        requests: requests that decode.
        context: tokens they attend to, in all.
    """

    requests: int
    context: int

    def terms(self, rows: np.ndarray) -> np.ndarray:
        """``[len(rows), 3]`` linear terms of the target's curve: drafts at all, share of roots, context."""
        terms = np.empty((len(rows), 3))
        terms[:, 0] = rows > self.requests
        terms[:, 1] = self.requests / rows
        terms[:, 2] = math.log1p(self.context / (1024 * max(self.requests, 1)))
        return terms


class StepCosts:
    """Seconds of the parts of a step: the rest with the target's pass, the draft's first pass, a draft level.

    The draft's curves are kept as ratios to one row of the target, so that they follow the machine while they are not
    observed. The priors fit a head of one layer under a target of some thirty.
    """

    def __init__(self) -> None:
        self.target = Curve(CurvePrior(level=(-3.5, 3.0), terms=((0.03, 0.05), (0.0, 0.1), (0.0, 0.1))))
        self.first_pass = Curve(CurvePrior(level=(math.log(0.07), 0.5), power=(0.15, 0.15)))
        self.level = Curve(CurvePrior(level=(math.log(0.06), 0.5), power=(0.1, 0.15)))

    @property
    def known(self) -> bool:
        """Whether there has been a step to learn from."""
        return self.target.observations > 0

    @property
    def unit(self) -> float:
        """Log seconds of the target's curve at one row, the draft's unit."""
        return float(self.target.mean[0])

    def target_seconds(self, batch: Batch, most: int, rng: np.random.Generator | None = None) -> np.ndarray:
        """``[most + 1]`` seconds of a step that verifies 0, 1, ... ``most`` drafted rows; they never fall.

        Args:
            rng: draw the curve instead of taking the likeliest (to explore).
        """
        rows = np.arange(batch.requests, batch.requests + most + 1)
        terms = batch.terms(rows)
        curve = self.target
        if rng is None:
            values = curve.predict(batch.requests, most + 1, terms)
        else:
            values = curve.draw(rng, batch.requests, most + 1, terms)
        return np.exp(np.maximum.accumulate(values))

    def first_pass_seconds(self, rows: int) -> float:
        """Seconds of the draft's first pass over ``rows`` tokens, with the logits at its roots."""
        return math.exp(float(self.first_pass.predict(max(rows, 1), 1)[0]) + self.unit)

    def level_seconds(self, most: int) -> np.ndarray:
        """``[most]`` seconds of a draft level over 1, 2, ... ``most`` frontier rows; they never fall."""
        return np.exp(np.maximum.accumulate(self.level.predict(1, most)) + self.unit)

    def observe_target(self, batch: Batch, rows: int, seconds: float, with_prompts: bool = False) -> None:
        """Learn from a step of ``rows`` rows: roots, drafts and prompt tokens.

        Args:
            with_prompts: prompt tokens are among them, which cost a little less than rows whose logits are needed;
                on a busy server there may be few steps without.
        """
        if seconds > 0 and 0 < rows <= KNOTS[-1]:
            terms = batch.terms(np.array([rows]))[0]
            self.target.observe(math.log(seconds), rows, terms, PROMPT_DOUBT if with_prompts else 1.0)

    def observe_first_pass(self, rows: int, seconds: float) -> None:
        """Learn from a first pass of the draft."""
        if self.known and seconds > 0 and rows > 0:
            self.first_pass.observe(math.log(seconds) - self.unit, rows)

    def observe_level(self, rows: int, seconds: float) -> None:
        """Learn from a draft level."""
        if self.known and seconds > 0 and rows > 0:
            self.level.observe(math.log(seconds) - self.unit, rows)
