"""A throughput policy that sleeps and wakes by chance, so that tests do not depend on this machine's speed."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tests.engine.engines import Engine
from vllm_adaptivespec.core.costs import Batch
from vllm_adaptivespec.core.throughput import ThroughputPolicy
from vllm_adaptivespec.core.valued_growth import DraftRequest


class Scripted(ThroughputPolicy):
    """Wakes requests at random, each for itself; drafts whatever it likes best then, at random prices.

    Args:
        share: of the steps in which a request is drafted for.
    """

    def __init__(self, share: float, seed: int = 0) -> None:
        super().__init__()
        self.share, self.random = share, random.Random(seed)
        self.pending: list[int] = []

    def participants(self, batch: Batch, requests: Sequence[DraftRequest]) -> list[int]:
        super().participants(batch, requests)
        if not requests or not self.costs.known:
            return []
        self.is_probe = True
        # Where drafting is dear, as in tests, shapes would hardly change.
        discount = self.random.choice((0.0, 0.02, 0.1, 1.0))
        self.row_prices, self.level_prices = discount * self.row_prices, discount * self.level_prices
        taken = [i for i in range(len(requests)) if self.random.random() < self.share]
        self.pending += [requests[i].pending for i in taken]
        return taken


def script(engine: Engine, monkeypatch: pytest.MonkeyPatch, share: float, seed: int = 0) -> Scripted:
    policy = Scripted(share, seed)
    drafter = engine.runner.throughput
    policy.costs = drafter.policy.costs
    monkeypatch.setattr(drafter, "policy", policy)
    return policy
