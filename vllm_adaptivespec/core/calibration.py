"""How likely a drafted token is to be accepted: a logistic model, learned online from what was and was not.

For a child of a node that the walk reaches,
``P(accepted) = sigmoid(w . x)`` with ``x`` = 1, the log-odds of its draft probability, the log of its rank among its
siblings, the log of its depth, the request's history, and how lossy the request may be (1 - kappa). A node's own
probability is the product along its path. With kappa < 1 promotions count as accepted, so they are in the estimate.

The weights are updated by one Newton step per verified batch on the outcomes of all children of the nodes that were
reached; old outcomes fade towards the prior.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

FEATURES = ("one", "log-odds", "log rank", "log depth", "history", "lossiness")
BEFORE_HISTORY = 4
PRIOR_MEAN = np.array([-0.2, 0.8, -0.3, 0.0, 0.5, 0.5])
PRIOR_DEVIATION = np.array([0.5, 0.3, 0.4, 0.3, 0.4, 0.7])
MEMORY = 4000.0
"""Outcomes after which an old one has faded to 1/e."""
SURPRISE_DECAY, SURPRISE_LIMIT = 0.98, 3.5
"""Of the running sum of outcomes less expectations, in standard deviations: past the limit conditions have changed."""
DOUBT = 0.75
"""Share of what was learned that is then given up."""
LOG_ODDS = (-7.0, 5.0)
"""Draft probabilities are trusted within these log-odds."""
_SURE = -math.log1p(math.exp(-LOG_ODDS[1]))
HISTORY_DECAY = 0.93
"""Weight that a request's earlier outcomes keep per verification."""
HISTORY_PRIOR = 2.0
"""Accepted tokens' worth of doubt in a request's history."""
BINS = 10


def log_odds(log_prob: float) -> float:
    """Log-odds of a draft log-probability, clipped."""
    if not log_prob > LOG_ODDS[0]:  # also NaN; so far down log-odds and log-probability are the same
        return LOG_ODDS[0]
    if log_prob > _SURE:
        return LOG_ODDS[1]
    return log_prob - math.log(-math.expm1(log_prob))


def features_of(log_prob: float, rank: int, depth: int, history: float, lossiness: float) -> list[float]:
    """``[len(FEATURES)]`` of one child.

    Args:
        log_prob: its draft log-probability.
        rank, depth: from 1.
        history: of its request.
        lossiness: ``1 - kappa``.
    """
    return [1.0, log_odds(log_prob), math.log(rank), math.log(depth), history, lossiness]


def sigmoid(values: np.ndarray) -> np.ndarray:
    """Logistic function; this form of it cannot overflow."""
    return 0.5 + 0.5 * np.tanh(0.5 * values)


@dataclass(eq=False)
class RequestHistory:
    """How a request's drafts fared against what was expected of them, newest counting most."""

    accepted: float = 0.0
    expected: float = 0.0
    verifications: int = 0

    @property
    def feature(self) -> float:
        """Log of accepted over expected, shrunk towards 0."""
        return math.log((HISTORY_PRIOR + self.accepted) / (HISTORY_PRIOR + self.expected))

    def observe(self, accepted: float, expected: float) -> None:
        """Add a verification: accepted children, and the sum of what the model without history expected of them."""
        self.accepted = HISTORY_DECAY * self.accepted + accepted
        self.expected = HISTORY_DECAY * self.expected + expected
        self.verifications += 1


@dataclass
class Reliability:
    """Predicted against observed: counts, predicted sums and accepted nodes by bin of the predicted probability."""

    counts: list[int] = field(default_factory=lambda: [0] * BINS)
    predicted: list[float] = field(default_factory=lambda: [0.0] * BINS)
    accepted: list[int] = field(default_factory=lambda: [0] * BINS)

    def observe(self, probability: float, accepted: bool) -> None:
        """Add a node that was drafted."""
        index = min(int(probability * BINS), BINS - 1)
        self.counts[index] += 1
        self.predicted[index] += probability
        self.accepted[index] += accepted

    def as_dict(self) -> dict[str, list[float]]:
        """Plain values: the bins' counts, mean predicted probability and observed share (0 where there is none)."""
        some = [max(count, 1) for count in self.counts]
        return {
            "counts": list(self.counts),
            "predicted": [round(p / n, 4) for p, n in zip(self.predicted, some, strict=True)],
            "accepted": [round(a / n, 4) for a, n in zip(self.accepted, some, strict=True)],
        }


class AcceptanceModel:
    """The logistic model; see the module."""

    def __init__(self) -> None:
        self.weights = PRIOR_MEAN.copy()
        self.prior_precision = np.diag(PRIOR_DEVIATION**-2.0)
        self.precision = self.prior_precision.copy()
        self.reliability = Reliability()
        self.outcomes = 0
        self.improvements = 0
        """How often drafts turned out to have become better than was believed."""
        self._surplus = self._variance = 0.0

    def probabilities(self, features: np.ndarray) -> np.ndarray:
        """``[n]`` of being accepted once the parent is."""
        return sigmoid(features @ self.weights)

    def without_history(self, features: np.ndarray) -> np.ndarray:
        """The same as if nothing were known of the request."""
        return sigmoid(features @ self.weights - features[:, BEFORE_HISTORY] * self.weights[BEFORE_HISTORY])

    def update(self, features: np.ndarray, outcomes: np.ndarray, weight: float = 1.0) -> None:
        """Learn from children whose parent was reached.

        Args:
            features: ``[n, len(FEATURES)]``.
            outcomes: ``[n]`` 1.0 where the walk went on there.
            weight: how many outcomes each of them stands for.
        """
        if not len(outcomes):
            return
        keep = math.exp(-weight * len(outcomes) / MEMORY)
        p = self.probabilities(features)
        fading = (1 - keep) * self.prior_precision
        self.precision = keep * self.precision + fading + (features.T * (weight * p * (1 - p))) @ features
        self._notice_change(p, outcomes)
        gradient = weight * (features.T @ (outcomes - p)) + fading @ (PRIOR_MEAN - self.weights)
        self.weights = self.weights + np.linalg.solve(self.precision, gradient)
        self.outcomes += len(outcomes)

    def _notice_change(self, expected: np.ndarray, outcomes: np.ndarray) -> None:
        """Doubt what was learned where outcomes persistently differ from it."""
        self._surplus = SURPRISE_DECAY * self._surplus + float((outcomes - expected).sum())
        self._variance = SURPRISE_DECAY * self._variance + float((expected * (1 - expected)).sum())
        if abs(self._surplus) > SURPRISE_LIMIT * math.sqrt(self._variance + 1.0):
            self.precision = (1 - DOUBT) * self.precision + DOUBT * self.prior_precision
            self.improvements += self._surplus > 0
            self._surplus = self._variance = 0.0
