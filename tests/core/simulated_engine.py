"""A simulated engine: steps with known costs and known acceptance, on a clock of its own.

Policies see noisy timings and drawn outcomes. What they are judged by is exact: true seconds, and the tokens that are
expected of what they drafted; so a few hundred steps tell 1% apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from vllm_adaptivespec.core.acceptance import Walk
from vllm_adaptivespec.core.calibration import AcceptanceModel, RequestHistory
from vllm_adaptivespec.core.costs import Batch
from vllm_adaptivespec.core.growth import TreeGrowth
from vllm_adaptivespec.core.policy import TreeShape
from vllm_adaptivespec.core.throughput import ThroughputPolicy
from vllm_adaptivespec.core.valued_growth import DraftedNodes, DraftRequest, ValuedGrowth

CHILDREN = 5


@dataclass(frozen=True)
class CostCurve:
    """True seconds: ``base + row * rows`` beyond ``free`` rows, a jump for any draft, and the draft's own."""

    base: float = 0.03
    row: float = 0.001
    free: int = 8
    request: float = 0.0005
    jump: float = 0.001
    first: float = 0.002
    first_row: float = 0.00005
    level: float = 0.002
    level_row: float = 0.0001

    def target(self, batch: int, drafted: int) -> float:
        rows = batch + drafted
        over = max(rows - self.free, 0)
        return self.base + self.request * batch + self.row * over + (self.jump if drafted else 0.0)

    def first_pass(self, rows: int) -> float:
        return self.first + self.first_row * rows

    def draft_level(self, rows: int) -> float:
        return self.level + self.level_row * rows


@dataclass(frozen=True)
class Acceptance:
    """True acceptance: draft log-odds of the best child are normal; what is accepted follows them by a logistic law."""

    confidence: float = 0.5
    spread: float = 1.6
    offset: float = -0.2
    slope: float = 0.7
    between_requests: float = 0.5

    def offer(self, rng: np.random.Generator) -> list[float]:
        """Draft log-probabilities of a node's children, best first."""
        best = 1 / (1 + math.exp(-rng.normal(self.confidence, self.spread)))
        best = max(best, 0.05)
        probs, rest = [best], 1 - best
        for _ in range(CHILDREN - 1):
            probs.append(min(rest * 0.4, probs[-1]))
            rest -= probs[-1]
        return [math.log(max(p, 1e-6)) for p in probs]

    def accepted(self, log_probs: list[float], shift: float) -> list[float]:
        """True probability of each child."""
        true = []
        left = 1.0
        for log_prob in log_probs:
            p = math.exp(log_prob)
            odds = math.log(p / max(1 - p, 1e-6))
            share = 1 / (1 + math.exp(-(self.offset + self.slope * odds + shift)))
            true.append(min(share, left))
            left -= true[-1]
        return true


@dataclass
class Request:
    shift: float
    history: RequestHistory = field(default_factory=RequestHistory)
    unseen: int = 0


class Told(AcceptanceModel):
    """Gives the true probabilities where it has been told them."""

    told: list[float] | None = None

    def probabilities(self, features: np.ndarray) -> np.ndarray:
        if self.told is not None:
            told, self.told = np.array(self.told), None
            return told
        return super().probabilities(features)


class Oracle(ThroughputPolicy):
    """The same decisions with the true costs and probabilities."""

    def __init__(self, curve: CostCurve) -> None:
        super().__init__()
        self.curve = curve
        self.acceptance: Told = Told()
        self.costs = self  # type: ignore[assignment]
        self.known = True

    def target_seconds(self, batch: Batch, most: int, rng: object = None) -> np.ndarray:
        return np.array([self.curve.target(batch.requests, n) for n in range(most + 1)])

    def first_pass_seconds(self, rows: int) -> float:
        return self.curve.first_pass(rows)

    def level_seconds(self, most: int) -> np.ndarray:
        return np.array([self.curve.draft_level(rows) for rows in range(1, most + 1)])

    def observe_target(self, *_: object) -> None: ...
    def observe_first_pass(self, *_: object) -> None: ...
    def observe_level(self, *_: object) -> None: ...


def expected(parents: list[int], shares: list[float]) -> float:
    """Nodes of a tree that are expected to be accepted, given each one's true share of its parent."""
    reached: list[float] = []
    for parent, share in zip(parents, shares, strict=True):
        reached.append(share * (1.0 if parent < 0 else reached[parent]))
    return sum(reached)


class Simulation:
    """One engine with ``batch`` requests that never end; ``run`` lets it work for some steps.

    Args:
        noise: relative deviation of every timing; outliers: share of steps that take five times as long.
    """

    def __init__(
        self,
        curve: CostCurve,
        acceptance: Acceptance,
        batch: int,
        seed: int,
        noise: float = 0.03,
        outliers: float = 0.0,
    ) -> None:
        self.curve, self.acceptance = curve, acceptance
        self.rng = np.random.default_rng(seed)
        self.noise, self.outliers = noise, outliers
        self.seconds = 0.0
        self.tokens = 0.0
        self.requests: list[Request] = []
        self.drafting: list[bool] = []
        self.rows: list[int] = []
        self.resize(batch)

    def resize(self, batch: int) -> None:
        while len(self.requests) < batch:
            self.requests.append(Request(self.rng.normal(0, self.acceptance.between_requests)))
        del self.requests[batch:]

    def _timed(self, seconds: float) -> float:
        self.seconds += seconds
        seconds *= math.exp(self.rng.normal(0, self.noise))
        return seconds * 5 if self.rng.random() < self.outliers else seconds

    def _walk(self, growth_parents: list[int], true: list[float]) -> list[int]:
        """Accepted candidates from the root down."""
        node, path = -1, []
        while True:
            draw = self.rng.random()
            children = [c for c, parent in enumerate(growth_parents) if parent == node]
            for child in children:
                draw -= true[child]
                if draw < 0:
                    node = child
                    path.append(child)
                    break
            else:
                return path

    def run_fixed(self, shape: TreeShape | None, steps: int) -> float:
        """Tokens per second of a fixed shape (None: no speculation) over ``steps`` steps."""
        tokens, seconds = self.tokens, self.seconds
        batch = len(self.requests)
        for _ in range(steps):
            if shape is None:
                self._timed(self.curve.target(batch, 0))
                self.tokens += batch
                continue
            self._timed(self.curve.first_pass(sum(max(r.unseen, 1) for r in self.requests)))
            growths = [TreeGrowth(shape) for _ in self.requests]
            true: list[dict[tuple[int, int], float]] = [{} for _ in growths]
            first = True
            while growing := [i for i, g in enumerate(growths) if g.frontier]:
                if not first:
                    self._timed(self.curve.draft_level(sum(len(growths[i].frontier) for i in growing)))
                first = False
                for i in growing:
                    growth = growths[i]
                    offers = [self.acceptance.offer(self.rng) for _ in growth.frontier]
                    frontier, at = list(growth.frontier), len(growth.tokens)
                    growth.expand(offers, [list(range(CHILDREN))] * len(frontier))
                    for parent, offer in zip(frontier, offers, strict=True):
                        for rank, p in enumerate(self.acceptance.accepted(offer, self.requests[i].shift)):
                            true[i][parent, rank] = p
                    assert len(growth.tokens) > at
            drafted = 0
            for request, growth, known in zip(self.requests, growths, true, strict=True):
                best = growth._best()
                node_of = {-1: -1, **{c: n for n, c in enumerate(best)}}
                parents = [node_of[growth.parents[c]] for c in best]
                drafted += len(best)
                shares = [known[growth.parents[c], growth.tokens[c]] for c in best]
                self.tokens += 1 + expected(parents, shares)
                request.unseen = 1 + len(self._walk(parents, shares))
            self._timed(self.curve.target(batch, drafted))
        return (self.tokens - tokens) / (self.seconds - seconds)

    def run(self, policy: ThroughputPolicy, steps: int, each: Callable[[int], None] | None = None) -> float:
        """Tokens per second under a throughput policy over ``steps`` steps."""
        tokens, seconds = self.tokens, self.seconds
        for step in range(steps):
            if each is not None:
                each(step)
            self._step(policy)
        return (self.tokens - tokens) / (self.seconds - seconds)

    def _step(self, policy: ThroughputPolicy) -> None:
        batch = Batch(len(self.requests), 100 * len(self.requests))
        views = [DraftRequest(r.history, 0.0, TreeShape(8, 4, 8), max(r.unseen, 1)) for r in self.requests]
        taking = policy.participants(batch, views)
        growths: list[ValuedGrowth] = []
        true: dict[int, dict[tuple[int, int], float]] = {}
        if taking:
            rows = sum(views[i].pending for i in taking)
            policy.costs.observe_first_pass(rows, self._timed(self.curve.first_pass(rows)))
            growths = policy.open([views[i] for i in taking])
            first = True
            while growing := [(k, g) for k, g in enumerate(growths) if g.frontier]:
                if not first:
                    rows = sum(len(g.frontier) for _, g in growing)
                    policy.costs.observe_level(rows, self._timed(self.curve.draft_level(rows)))
                first = False
                for k, growth in growing:
                    frontier = list(growth.frontier)
                    offers = [self.acceptance.offer(self.rng) for _ in frontier]
                    growth.expand(offers, [list(range(CHILDREN))] * len(frontier))
                    known = true.setdefault(k, {})
                    for parent, offer in zip(frontier, offers, strict=True):
                        for rank, p in enumerate(self.acceptance.accepted(offer, self.requests[taking[k]].shift)):
                            known[parent, rank] = p
                if isinstance(policy, Oracle):
                    policy.acceptance.told = [
                        true[k][g.parents[c], g.tokens[c]] for k, g in enumerate(growths) for c in g.fresh
                    ]
                policy.assess(growths)
            policy.select(growths)
        walks: list[tuple[RequestHistory, DraftedNodes, Walk]] = []
        drafted = 0
        paths: dict[int, list[int]] = {}
        for k, growth in enumerate(growths):
            if not growth.chosen:
                continue
            tree = growth.tree()
            drafted += len(tree)
            probabilities = [true[k][growth.parents[c], growth.tokens[c]] for c in growth.chosen]
            path = self._walk(list(tree.parents), probabilities)
            self.tokens += expected(list(tree.parents), probabilities)
            paths[taking[k]] = path
            walk = Walk(tree)
            walk.path = path
            walks.append((self.requests[taking[k]].history, growth.drafted(), walk))
        seconds = self._timed(self.curve.target(len(self.requests), drafted))
        policy.costs.observe_target(batch, len(self.requests) + drafted, seconds)
        policy.observe_walks(walks)
        for i, request in enumerate(self.requests):
            emitted = 1 + len(paths.get(i, []))
            self.tokens += 1
            request.unseen = emitted + (0 if i in taking else request.unseen)
        self.drafting.append(bool(taking) and not policy.is_probe)
        self.rows.append(drafted)
