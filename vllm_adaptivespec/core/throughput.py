"""The throughput policy: the nodes, levels and requests that are expected to pay, over the whole batch, every step.

Let ``B`` requests decode, ``T(n)`` be the seconds of a step that verifies ``n`` drafted rows, and ``P(v)`` the
probability that node ``v`` is accepted. A second is worth ``rate`` tokens: ``B / T(0)``, what plain decoding makes of
it, times the gain over that of the last steps. Then

* nodes of all requests compete: in order of ``P``, the first ``n`` that maximise ``sum P(v) - rate * (T(n) - T(0))``;
* a draft level is run over the frontier that maximises what its children are expected to add, less their rows' price,
  less ``rate`` times the level's seconds, if that is above zero;
* requests are drafted for at all if a tree like those of late, grown at these prices, is expected to add more than
  ``rate`` times the draft's first pass over the tokens it has not seen.

Maximising ``tokens - rate * seconds`` at the rate that is reached maximises tokens per second (Dinkelbach 1967).
``P`` and ``T`` are learned (``calibration.py``, ``costs.py``). What is not drafted teaches nothing, so a sleeping batch
is probed, ever more seldom, and some drafted steps take their costs from a draw instead of the likeliest curve.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .acceptance import Walk
from .calibration import BEFORE_HISTORY, AcceptanceModel, RequestHistory, features_of, sigmoid
from .costs import Batch, StepCosts
from .tree import ROOT, DraftTree
from .valued_growth import DraftedNodes, DraftRequest, ValuedGrowth

WIDTH = 4
"""Children considered per node; a fifth is hardly ever accepted."""
MOST_ROWS = 256
"""Drafted rows considered for one step."""
GAIN_MEMORY = 32.0
"""Steps over which the gain over plain decoding is averaged."""
ROOT_SAMPLES = 64
CHILD_SAMPLES = 16
CHILD_BUCKETS = 5
"""Samples of what the draft offered: at roots, and below nodes by their own conditional probability."""
SCENARIOS = 16
LOOK_AHEAD = 5
"""Levels of the trees that are imagined before anything is drafted."""
HORIZON = 32
"""Steps over which the price of reading tokens the draft has not seen is spread, if the request may last so long."""
NEWEST = 2
"""Tokens a request has to read at every step while it is drafted for."""
REVIEW_STEPS = 4
"""Steps between two decisions for whom to draft, while the batch stays the same."""
WAKE_GAIN = 0.03
"""Gain over plain decoding, relative, that must be expected before a sleeping batch is drafted for."""
SLEEP_LOSS = 0.0
"""The same, below which a batch that is drafted for is put to sleep."""
VALUE_WEIGHT = 0.3
"""Weight of the newest of the values that decide it."""
PROBE_STEPS = 3
PROBE_INTERVAL = (4, 512)
"""Steps without drafts before the first probe, and at most; doubled by every probe."""
PLAIN_INTERVAL = (2, 64)
"""Steps with drafts before a plain one, at first and at most: what plain decoding costs must be known, not imagined."""
PROBE_WEIGHT = 8
"""Times that what a probe sees counts: it stands for all the steps in which nothing could be seen."""
PROBE_SURPLUS = 0.5
"""Tokens accepted beyond what was believed, at which a probe goes on for another step."""
PROBE_SHARE = 8
"""One in so many requests takes part in a probe, but two at least."""
EXPLORE_EVERY = 16
PRIOR_ROOTS = ((1.5, -2.0, -2.8, -3.3), (0.0, -1.2, -2.0, -2.6), (-1.0, -1.7, -2.2, -2.7), (3.0, -3.0, -3.8, -4.2))
"""Log-odds of the children of four roots, assumed until real ones replace them."""


@dataclass(frozen=True)
class _Ranked:
    """Candidates of several trees, best first: whose they are, which, how likely; how many pay, and by how much."""

    growths: np.ndarray
    candidates: np.ndarray
    values: np.ndarray
    count: int
    value: float


@dataclass
class _Probing:
    """Of one octave of batch sizes: steps since the last draft, steps to wait, steps of the probe that runs.

    ``drafted`` and ``plain_interval`` are the same for plain steps while drafting.
    """

    idle: int = 0
    interval: int = PROBE_INTERVAL[0]
    left: int = 0
    drafted: int = 0
    plain_interval: int = PLAIN_INTERVAL[0]

    def plain_is_due(self) -> bool:
        """Count a drafted step; whether the next is to be a plain one."""
        self.drafted += 1
        if self.drafted < self.plain_interval:
            return False
        self.drafted, self.plain_interval = 0, min(2 * self.plain_interval, PLAIN_INTERVAL[1])
        return True


class ThroughputPolicy:
    """Decides for one engine; keeps what it learns for the life of the process.

    In every step call ``participants``, ``open`` for each of them, ``assess`` after every expansion, ``select`` at the
    end; and, whenever they are known, ``observe_walks`` and the ``costs``' own ``observe_*``.
    """

    def __init__(self, seed: int = 0) -> None:
        self.costs = StepCosts()
        self.acceptance = AcceptanceModel()
        self.rng = np.random.default_rng(seed)
        self.roots = np.tile(np.array(PRIOR_ROOTS), (ROOT_SAMPLES // len(PRIOR_ROOTS), 1))
        base = np.array([0.55, 0.15, 0.07, 0.04])
        share = (np.arange(CHILD_BUCKETS) + 2) / (CHILD_BUCKETS + 1)
        self.children = np.tile((share[:, None] * base)[:, None, :], (1, CHILD_SAMPLES, 1))
        self._root_at = 0
        self._child_at = [0] * CHILD_BUCKETS
        self.gain_tokens = self.gain_seconds = 1.0
        self.batch = Batch(1, 0)
        self.rate = 0.0
        self.probing: dict[int, _Probing] = {}
        self.is_probe = False
        self.drafted_steps = 0
        self.switches = 0
        self._awake = False
        self._members: tuple[RequestHistory, ...] = ()
        self._participants: list[int] = []
        self._review_in = 0
        self._value = 0.0
        self._value_of = 0
        self._level_price = 0.0
        self._first_pass_price = 0.0
        self._expectation = 0.0
        self._imagined = self._planned = 1.0
        self._ranked: _Ranked | None = None

    # ---- prices ----

    @property
    def gain(self) -> float:
        """Tokens per second of the last steps over plain decoding's, as planned; at least 1."""
        return max(self.gain_tokens / self.gain_seconds, 1.0)

    def _set_prices(self, batch: Batch, most_rows: int) -> None:
        """Express all costs of this step in tokens."""
        self.batch = batch
        seconds = self.costs.target_seconds(batch, most_rows)
        self.plain_seconds = float(seconds[0])
        self.rate = batch.requests / self.plain_seconds * self.gain
        self.row_prices = self.rate * (seconds - seconds[0])
        self.level_prices = self.rate * self.costs.level_seconds(max(most_rows, 1))

    def _settle(self, tokens: float, seconds: float) -> None:
        """Take a planned step into the gain: expected tokens and seconds."""
        weight = 1.0 / GAIN_MEMORY
        self.gain_tokens += weight * (tokens / self.batch.requests - self.gain_tokens)
        self.gain_seconds += weight * (seconds / self.plain_seconds - self.gain_seconds)

    # ---- for whom ----

    def participants(self, batch: Batch, requests: Sequence[DraftRequest]) -> list[int]:
        """Indices of the requests to draft for; empty where drafting is not expected to pay.

        Args:
            requests: those that decode in the next step, in batch order.
        """
        able = [i for i, request in enumerate(requests) if request.limits.depth > 0]
        members = tuple(request.history for request in requests)
        self.is_probe = False
        if not able or not self.costs.known:
            self._members, self._participants, self._review_in = members, [], 0
            return []
        self._set_prices(batch, min(sum(requests[i].limits.nodes for i in able), MOST_ROWS))
        probing = self.probing.setdefault(batch.requests.bit_length(), _Probing())
        if self._review_in <= 0 or members != self._members:
            chosen = self._review(requests, able)
            self.switches += bool(chosen) != self._awake
            self._awake = bool(chosen)
            self._participants, self._members, self._review_in = chosen, members, REVIEW_STEPS
        self._review_in -= 1
        if self._participants:
            probing.idle = probing.left = 0
            probing.interval = PROBE_INTERVAL[0]
            if not probing.plain_is_due():
                return [i for i in self._participants if requests[i].limits.depth > 0]
            self._settle(batch.requests, self.plain_seconds)
            return []
        if probing.left == 0:
            probing.idle += 1
            if probing.idle >= probing.interval:
                probing.left = PROBE_STEPS
                probing.idle = 0
                probing.interval = min(2 * probing.interval, PROBE_INTERVAL[1])
        if probing.left > 0:
            probing.left -= 1
            self.is_probe = True
            # The same ones throughout a probe: they have the least to catch up with.
            able.sort(key=lambda i: requests[i].pending)
            return sorted(able[: max(2, len(able) // PROBE_SHARE)])
        self._settle(batch.requests, self.plain_seconds)
        return []

    def _review(self, requests: Sequence[DraftRequest], able: list[int]) -> list[int]:
        """The requests for which drafting is expected to pay most, the promising ones first."""
        shift = self._shift([requests[i] for i in able])
        pending = np.array([requests[i].pending for i in able])
        # What was not read is read once, for the steps in which the request will be drafted for.
        horizon = np.array([min(HORIZON, max(requests[i].remaining, 1)) for i in able])
        newest = np.minimum(pending, NEWEST)
        whole = self.costs.first_pass_seconds(int(pending.sum())) - self.costs.first_pass_seconds(int(newest.sum()))
        per_token = self.rate * whole / max(int((pending - newest).sum()), 1)
        once = per_token * (pending - newest) / horizon
        order = np.argsort(once - shift, kind="stable")
        best_value, best = -np.inf, 0
        size = 1
        while True:
            size = min(size, len(able))
            taking = order[:size]
            steady = self.rate * self.costs.first_pass_seconds(int(newest[taking].sum()))
            expectation = self._expected(shift[taking])
            value = expectation * self._realism - steady - float(once[taking].sum())
            if value > best_value:
                best_value, best, self._expectation = value, size, expectation
            if size == len(able):
                break
            size *= 2
        # Imagined trees are drawn, so one value is noisy; and it is dear to go to and fro.
        if self._value_of != self.batch.requests:
            self._value_of, self._value = self.batch.requests, best_value
        self._value += VALUE_WEIGHT * (best_value - self._value)
        least = SLEEP_LOSS if self._awake else WAKE_GAIN
        return sorted(able[k] for k in order[:best]) if self._value > least * self.batch.requests else []

    def _shift(self, requests: Sequence[DraftRequest]) -> np.ndarray:
        """``[len(requests)]`` what is known of each moves the log-odds of its drafts by."""
        history, lossiness = self.acceptance.weights[-2:]
        return np.array([history * r.history.feature + lossiness * r.lossiness for r in requests])

    @property
    def _realism(self) -> float:
        """What imagined trees have been worth once the draft had been looked at."""
        return min(max(self._planned / self._imagined, 0.25), 1.5)

    def _expected(self, shift: np.ndarray) -> float:
        """Tokens that drafting is expected to add, less rows and levels, for requests with these shifts of log-odds."""
        count = len(shift)
        scenarios = max(SCENARIOS // count, 1)
        roots = self.roots[self.rng.integers(ROOT_SAMPLES, size=(scenarios, count))]
        first = sigmoid(roots + shift[None, :, None])  # [scenarios, count, WIDTH]

        def below(nodes: np.ndarray) -> np.ndarray:
            bucket = np.minimum((nodes * CHILD_BUCKETS).astype(int), CHILD_BUCKETS - 1)
            return self.children[bucket, self.rng.integers(CHILD_SAMPLES, size=nodes.shape)]

        levels = [first]
        path, conditional = first[..., 0], first[..., 0]
        for depth in range(2, LOOK_AHEAD + 1):
            kids = below(conditional)
            level = path[..., None] * kids
            if depth == 2:
                second = first[..., 1:2] * below(first[..., 1])[..., :1]
                level = np.concatenate([level, second], axis=-1)
            levels.append(level)
            path, conditional = path * kids[..., 0], kids[..., 0]
        best = np.zeros(scenarios)
        nodes = np.empty((scenarios, 0))
        price = 0.0
        for level in levels:
            nodes = np.concatenate([nodes, level.reshape(scenarios, -1)], axis=1)
            ranked = -np.sort(-nodes, axis=1)[:, : len(self.row_prices) - 1]
            value = np.cumsum(ranked, axis=1) - self.row_prices[1 : 1 + ranked.shape[1]]
            best = np.maximum(best, value.max(axis=1) - price)
            price += float(self.level_prices[min(count, len(self.level_prices)) - 1])
        return float(best.mean())

    # ---- what ----

    def open(self, requests: Sequence[DraftRequest]) -> list[ValuedGrowth]:
        """Start the participants' trees."""
        self.drafted_steps += 1
        self._level_price = 0.0
        rows = sum(request.pending for request in requests)
        self._first_pass_price = self.rate * self.costs.first_pass_seconds(rows)
        if self.is_probe:
            self._expectation = self._expected(self._shift(requests))
        if self.drafted_steps % EXPLORE_EVERY == 0:
            seconds = self.costs.target_seconds(self.batch, len(self.row_prices) - 1, self.rng)
            self.row_prices = self.rate * (seconds - seconds[0])
        return [ValuedGrowth(request) for request in requests]

    def assess(self, growths: Sequence[ValuedGrowth]) -> None:
        """Estimate the candidates just added, and set every tree's frontier for the next level.

        Args:
            growths: all of this step, also those that are no longer growing: their nodes compete too.
        """
        features = []
        for growth in growths:
            history, lossiness = growth.request.history.feature, growth.request.lossiness
            features += [
                features_of(growth.log_probs[c], growth.ranks[c], growth.depths[c], history, lossiness)
                for c in growth.fresh
            ]
        if not features:
            return
        matrix = np.array(features)
        conditional = self.acceptance.probabilities(matrix)
        base = matrix[:, :BEFORE_HISTORY] @ self.acceptance.weights[:BEFORE_HISTORY]
        start = 0
        for growth in growths:
            first, end = growth.fresh.start, start + len(growth.fresh)
            if end == start:
                continue
            growth.assess(matrix[start:end], conditional[start:end])
            self._sample_offers(growth, first, base[start:end], conditional[start:end])
            start = end
        self._set_frontiers(growths)

    def _sample_offers(self, growth: ValuedGrowth, first: int, base: np.ndarray, conditional: np.ndarray) -> None:
        """Remember what the draft offered below roots and nodes, for what has yet to be imagined.

        Args:
            first: the first of the candidates just assessed.
            base: ``[number of them]`` log-odds as if nothing were known of the request.
            conditional: ``[number of them]`` probabilities.
        """
        starts = [k for k in range(len(base)) if growth.ranks[first + k] == 1]
        for start, end in zip(starts, [*starts[1:], len(base)], strict=True):
            parent = growth.parents[first + start]
            end = min(end, start + WIDTH)
            if parent == ROOT:
                for _ in range(PROBE_WEIGHT if self.is_probe else 1):
                    self.roots[self._root_at] = -9.0
                    self.roots[self._root_at, : end - start] = base[start:end]
                    self._root_at = (self._root_at + 1) % ROOT_SAMPLES
            else:
                bucket = min(int(growth.conditional[parent] * CHILD_BUCKETS), CHILD_BUCKETS - 1)
                at = self._child_at[bucket]
                self.children[bucket, at] = 0.0
                self.children[bucket, at, : end - start] = conditional[start:end]
                self._child_at[bucket] = (at + 1) % CHILD_SAMPLES

    def _set_frontiers(self, growths: Sequence[ValuedGrowth]) -> None:
        """Choose what the next level expands, over all requests; leaves the frontiers empty where no level pays."""
        open_levels = [(i, g) for i, g in enumerate(growths) if g.newest.stop and g.level < g.shape.depth]
        newest = [g.newest for _, g in open_levels]
        for growth in growths:
            growth.newest = slice(0, 0)  # what is not expanded now never is: only the last hidden states are there
        self._ranked = None
        if not open_levels:
            return
        ranked = self._ranked = self._rank(growths)
        count = ranked.count
        ahead = min(count + 4, len(self.row_prices) - 1)
        if ahead > count:
            price = float(self.row_prices[ahead] - self.row_prices[count]) / (ahead - count)
        else:
            price = float(ranked.values[count - 1])
        # In a tree that is full a new node takes the place of the worst one.
        prices = [price] * len(open_levels)
        taken = np.bincount(ranked.growths[:count], minlength=len(growths)).tolist()
        for k, (i, growth) in enumerate(open_levels):
            if taken[i] >= growth.shape.nodes:
                worst = np.flatnonzero(ranked.growths[:count] == i)[-1]
                prices[k] = max(price, float(ranked.values[worst]))
        sizes = [s.stop - s.start for s in newest]
        path = np.concatenate([g.probabilities[s] for (_, g), s in zip(open_levels, newest, strict=True)])
        conditional = np.concatenate([g.conditional[s] for (_, g), s in zip(open_levels, newest, strict=True)])
        bucket = np.minimum((conditional * CHILD_BUCKETS).astype(int), CHILD_BUCKETS - 1)
        added = path[:, None, None] * self.children[bucket] - np.repeat(prices, sizes)[:, None, None]
        gain = np.maximum(added, 0.0).sum(axis=(1, 2)) / CHILD_SAMPLES
        order = np.argsort(-gain, kind="stable")
        value = np.cumsum(gain[order])
        value -= self.level_prices[np.minimum(np.arange(len(order)), len(self.level_prices) - 1)]
        best = int(np.argmax(value))
        if value[best] <= 0.0:
            return
        candidates = [(g, c) for (_, g), s in zip(open_levels, newest, strict=True) for c in range(s.start, s.stop)]
        rows = 0
        for k in order[: best + 1].tolist():
            growth, candidate = candidates[k]
            if len(growth.frontier) < growth.shape.width:
                growth.frontier.append(candidate)
                rows += 1
        self._level_price += float(self.level_prices[min(rows, len(self.level_prices)) - 1])

    def _rank(self, growths: Sequence[ValuedGrowth]) -> _Ranked:
        """Candidates of all trees in the order in which they are worth a row, and how many of them are."""
        owner = np.repeat(np.arange(len(growths)), [len(g.probabilities) for g in growths])
        candidate = np.concatenate([np.arange(len(g.probabilities)) for g in growths])
        values = np.concatenate([g.probabilities for g in growths])
        order = np.argsort(-values, kind="stable")  # a parent before an equal child
        owner, candidate, values = owner[order], candidate[order], values[order]
        # At most as many of each tree as its limits allow.
        by_owner = np.argsort(owner, kind="stable")
        sizes = np.bincount(owner, minlength=len(growths))
        place = np.empty(len(owner), dtype=np.int64)
        place[by_owner] = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        within = place < np.array([g.shape.nodes for g in growths])[owner]
        owner, candidate, values = owner[within], candidate[within], values[within]
        most = len(self.row_prices) - 1
        owner, candidate, values = owner[:most], candidate[:most], values[:most]
        net = np.cumsum(values) - self.row_prices[1 : len(values) + 1]
        best = int(np.argmax(net))
        value = max(float(net[best]), 0.0)
        return _Ranked(owner, candidate, values, best + 1 if value > 0.0 or self.is_probe else 0, value)

    def select(self, growths: Sequence[ValuedGrowth]) -> None:
        """Choose every tree's nodes: those that are worth their rows, over all requests."""
        ranked = self._ranked or self._rank(growths)
        count = ranked.count
        for i, candidate in zip(ranked.growths[:count].tolist(), ranked.candidates[:count].tolist(), strict=True):
            growths[i].chosen.append(candidate)
        value = ranked.value - self._level_price
        weight = (PROBE_WEIGHT if self.is_probe else 1) / GAIN_MEMORY
        self._imagined += weight * (self._expectation - self._imagined)
        self._planned += weight * (max(value, 0.0) - self._planned)
        if not self.is_probe:
            seconds = float(self.row_prices[count]) + self._level_price + self._first_pass_price
            self._settle(
                self.batch.requests + float(ranked.values[:count].sum()), self.plain_seconds + seconds / self.rate
            )

    # ---- what became of it ----

    def observe_walks(self, walks: Sequence[tuple[RequestHistory, DraftedNodes, Walk]]) -> None:
        """Learn from verified trees."""
        features, outcomes = [], []
        for history, drafted, walk in walks:
            reached = _children_reached(walk.tree, walk.path)
            accepted = set(walk.path)
            rows = drafted.features[reached]
            hits = np.array([float(node in accepted) for node in reached])
            features.append(rows)
            outcomes.append(hits)
            history.observe(float(hits.sum()), float(self.acceptance.without_history(rows).sum()))
            for node, probability in enumerate(drafted.probabilities.tolist()):
                self.acceptance.reliability.observe(probability, node in accepted)
        if features:
            rows, hits = np.concatenate(features), np.concatenate(outcomes)
            if self.is_probe and float((hits - self.acceptance.probabilities(rows)).sum()) > PROBE_SURPLUS:
                self.probing[self.batch.requests.bit_length()].left += 1
            improvements = self.acceptance.improvements
            self.acceptance.update(rows, hits, PROBE_WEIGHT if self.is_probe else 1)
            if self.acceptance.improvements > improvements:
                for probing in self.probing.values():
                    probing.interval = PROBE_INTERVAL[0]

    def as_dict(self) -> dict[str, object]:
        """What was learned, as plain values for JSON and RPC."""
        return {
            "gain": round(self.gain, 4),
            "drafted_steps": self.drafted_steps,
            "switches": self.switches,
            "acceptance_weights": self.acceptance.weights.round(4).tolist(),
            "acceptance_outcomes": self.acceptance.outcomes,
            "reliability": self.acceptance.reliability.as_dict(),
            "step_observations": self.costs.target.observations,
        }


def _children_reached(tree: DraftTree, path: Sequence[int]) -> list[int]:
    """Nodes whose parent the walk reached: the root's children and those of all accepted nodes."""
    return [node for parent in (ROOT, *path) for node in tree.children[parent]]
