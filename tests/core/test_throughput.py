"""The throughput policy on simulated engines: against every fixed policy, an oracle, and changing conditions.

What is stated of it, and holds after ``WARM_UP`` steps: within 3% of the best fixed policy in hindsight and 5% of an
oracle that knows the true costs and probabilities; after a change of load within 3% of where it ends up after
``REACTION`` steps; no more than ``SWITCHES`` decisions for and against drafting in 100 steps.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.core.simulated_engine import Acceptance, CostCurve, Oracle, Simulation
from vllm_adaptivespec.core import throughput
from vllm_adaptivespec.core.calibration import RequestHistory
from vllm_adaptivespec.core.costs import Batch
from vllm_adaptivespec.core.policy import TreeShape
from vllm_adaptivespec.core.throughput import ThroughputPolicy
from vllm_adaptivespec.core.tree import ROOT
from vllm_adaptivespec.core.valued_growth import DraftRequest, ValuedGrowth

WARM_UP = 400
REACTION = 120
SWITCHES = 5

FIXED = (
    None,
    *(TreeShape(k, 1, k) for k in (1, 2, 3, 5)),
    TreeShape(1, 3, 3),
    TreeShape(2, 2, 3),
    TreeShape(2, 4, 6),
    TreeShape(3, 4, 8),
    TreeShape(5, 3, 8),
)

# What a CPU without matrix units does; one with; a GPU.
ROWS_ARE_DEAR = CostCurve(row=0.003, free=1, jump=0.008, first_row=0.00015, level=0.003, level_row=0.0002)
NINE_ROWS_ARE_FREE = CostCurve(row=0.0006, free=9)
ROWS_ARE_CHEAP = CostCurve(
    base=0.01, row=2e-5, free=64, request=1e-4, jump=3e-4, first=6e-4, first_row=2e-6, level=5e-4, level_row=2e-6
)
GOOD, WEAK = Acceptance(1.0, 1.6, 0.2, 0.8), Acceptance(0.0, 1.2, -0.8, 0.6)


def best_fixed(curve: CostCurve, acceptance: Acceptance, batch: int, seed: int) -> float:
    steps = max(60, 600 // batch)
    return max(Simulation(curve, acceptance, batch, seed).run_fixed(shape, steps) for shape in FIXED)


def learned(curve: CostCurve, acceptance: Acceptance, batch: int, seed: int, outliers: float = 0.0) -> float:
    simulation, policy = Simulation(curve, acceptance, batch, seed, outliers=outliers), ThroughputPolicy()
    simulation.run(policy, WARM_UP)
    return simulation.run(policy, max(150, 1200 // batch))


curves = st.builds(
    CostCurve,
    base=st.floats(0.005, 0.2),
    row=st.floats(0.0, 0.004),
    free=st.sampled_from([1, 4, 9, 16, 64]),
    request=st.floats(0.0, 0.001),
    jump=st.floats(0.0, 0.01),
    first=st.floats(0.0005, 0.004),
    first_row=st.floats(0.0, 0.0002),
    level=st.floats(0.0005, 0.004),
    level_row=st.floats(0.0, 0.0002),
)
acceptances = st.builds(
    Acceptance,
    confidence=st.floats(-0.5, 1.5),
    spread=st.floats(0.5, 2.0),
    offset=st.floats(-1.5, 0.3),
    slope=st.floats(0.4, 1.0),
    between_requests=st.floats(0.0, 0.8),
)


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], database=None)
@given(curves, acceptances, st.sampled_from([1, 2, 4, 8, 16, 32]), st.integers(0, 1000))
def test_against_the_best_fixed_policy_and_an_oracle(
    curve: CostCurve, acceptance: Acceptance, batch: int, seed: int
) -> None:
    reached = learned(curve, acceptance, batch, seed)
    assert reached >= 0.97 * best_fixed(curve, acceptance, batch, seed)
    simulation, oracle = Simulation(curve, acceptance, batch, seed), Oracle(curve)
    simulation.run(oracle, 100)
    assert reached >= 0.95 * simulation.run(oracle, max(150, 1200 // batch))


@pytest.mark.parametrize("batch", [1, 8, 32])
@pytest.mark.parametrize("acceptance", [GOOD, WEAK], ids=["good", "weak"])
@pytest.mark.parametrize("curve", [ROWS_ARE_DEAR, NINE_ROWS_ARE_FREE, ROWS_ARE_CHEAP], ids=["dear", "nine", "cheap"])
def test_on_three_kinds_of_machines(curve: CostCurve, acceptance: Acceptance, batch: int) -> None:
    assert learned(curve, acceptance, batch, seed=1) >= 0.97 * best_fixed(curve, acceptance, batch, seed=1)


def test_a_noisy_neighbour_does_not_mislead_it() -> None:
    quiet, noisy = (learned(ROWS_ARE_DEAR, GOOD, 4, seed=2, outliers=share) for share in (0.0, 0.05))
    assert noisy >= 0.97 * quiet


def test_negative_control_costs_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blind to what rows cost, it falls far behind: the comparisons above have power."""
    flat = lambda self, batch, most, rng=None: np.full(most + 1, 0.03)  # noqa: E731
    monkeypatch.setattr("vllm_adaptivespec.core.costs.StepCosts.target_seconds", flat)
    assert learned(ROWS_ARE_DEAR, WEAK, 16, seed=1) < 0.9 * best_fixed(ROWS_ARE_DEAR, WEAK, 16, seed=1)


def test_negative_control_probabilities_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "vllm_adaptivespec.core.calibration.AcceptanceModel.probabilities",
        lambda self, features: np.full(len(features), 0.9),
    )
    curve = NINE_ROWS_ARE_FREE
    assert learned(curve, GOOD, 8, seed=1) < 0.95 * best_fixed(curve, GOOD, 8, seed=1)


class TestChange:
    @pytest.mark.parametrize(("before", "after"), [(1, 32), (32, 1), (2, 16), (16, 2)])
    def test_of_load(self, before: int, after: int) -> None:
        """Soon after the batch has grown or shrunk it does as well as a policy that knows that load."""
        simulation, policy = Simulation(ROWS_ARE_DEAR, GOOD, before, seed=3), ThroughputPolicy()
        simulation.run(policy, WARM_UP)
        simulation.resize(after)
        simulation.run(policy, REACTION)
        reached = simulation.run(policy, 400)
        assert reached >= 0.97 * learned(ROWS_ARE_DEAR, GOOD, after, seed=3)

    def test_of_a_load_that_swings(self) -> None:
        """Between loads where drafting pays and where it does not, it is not behind plain decoding by 3%."""
        rng = np.random.default_rng(0)
        simulation, policy = Simulation(ROWS_ARE_DEAR, GOOD, 1, seed=4), ThroughputPolicy()
        plain_seconds = 0.0
        for load in (int(n) for n in rng.integers(1, 33, 120)):
            simulation.resize(load)
            before = simulation.tokens
            simulation.run(policy, 20)
            plain_seconds += (simulation.tokens - before) / load * ROWS_ARE_DEAR.target(load, 0)
        assert simulation.seconds <= plain_seconds / 0.97

    @pytest.mark.parametrize("batch", [1, 2])
    def test_of_acceptance_while_asleep(self, batch: int) -> None:
        """Probing finds out that drafts have become good: after at most two of the longest intervals."""
        simulation, policy = Simulation(ROWS_ARE_DEAR, replace(WEAK, offset=-2.0), batch, seed=5), ThroughputPolicy()
        simulation.run(policy, WARM_UP)
        assert not any(simulation.drafting[-100:])
        simulation.acceptance = replace(GOOD, offset=1.0)
        simulation.run(policy, 2 * throughput.PROBE_INTERVAL[1])
        assert sum(simulation.drafting[-50:]) >= 45  # the others are the plain steps between

    def test_of_costs_while_awake(self) -> None:
        """Rows become dear: drafting stops or shrinks, and what is left pays."""
        simulation, policy = Simulation(ROWS_ARE_CHEAP, WEAK, 8, seed=6), ThroughputPolicy()
        simulation.run(policy, WARM_UP)
        before = np.mean(simulation.rows[-50:])
        simulation.curve = replace(ROWS_ARE_CHEAP, row=0.001, free=1)
        simulation.run(policy, WARM_UP)
        assert np.mean(simulation.rows[-50:]) < before / 4
        plain = Simulation(simulation.curve, WEAK, 8, seed=6).run_fixed(None, 200)
        assert simulation.run(policy, 200) >= 0.97 * plain


@pytest.mark.parametrize("batch", [1, 4, 8, 16])
def test_does_not_go_to_and_fro(batch: int) -> None:
    """Also where drafting neither pays nor costs."""
    simulation, policy = Simulation(ROWS_ARE_DEAR, replace(GOOD, offset=-0.4), batch, seed=7), ThroughputPolicy()
    simulation.run(policy, WARM_UP)
    before = policy.switches
    simulation.run(policy, 400)
    assert policy.switches - before <= 4 * SWITCHES


def test_sleep_costs_almost_nothing() -> None:
    """Drafts that are never accepted: once that is known, less than 1% is lost to finding out again."""
    simulation, policy = Simulation(ROWS_ARE_DEAR, replace(WEAK, offset=-4.0), 8, seed=8), ThroughputPolicy()
    simulation.run(policy, WARM_UP)
    plain = Simulation(ROWS_ARE_DEAR, WEAK, 8, seed=8).run_fixed(None, 200)
    assert simulation.run(policy, 2000) >= 0.99 * plain


def test_reliability_is_good() -> None:
    """What it believes of nodes is what becomes of them, in every bin with enough of them."""
    simulation, policy = Simulation(ROWS_ARE_CHEAP, GOOD, 8, seed=9), ThroughputPolicy()
    simulation.run(policy, WARM_UP)
    values = policy.acceptance.reliability.as_dict()
    filled = [i for i, count in enumerate(values["counts"]) if count > 300]
    assert len(filled) >= 5
    for i in filled:
        assert values["predicted"][i] == pytest.approx(values["accepted"][i], abs=0.06)


def test_same_seed_same_decisions() -> None:
    runs = []
    for _ in range(2):
        simulation, policy = Simulation(ROWS_ARE_DEAR, GOOD, 4, seed=10), ThroughputPolicy()
        simulation.run(policy, 200)
        runs.append((simulation.rows, simulation.drafting))
    assert runs[0] == runs[1]


class TestDecision:
    """One step at known prices."""

    def policy(self, curve: CostCurve = ROWS_ARE_CHEAP) -> ThroughputPolicy:
        policy = Oracle(curve)
        policy._awake = True
        return policy

    def request(self, depth: int = 8, width: int = 4, nodes: int = 8, pending: int = 1) -> DraftRequest:
        return DraftRequest(RequestHistory(), 0.0, TreeShape(depth, width, nodes), pending)

    def grow(
        self, policy: ThroughputPolicy, requests: list[DraftRequest], rng: np.random.Generator
    ) -> list[ValuedGrowth]:
        taken = policy.participants(Batch(len(requests), 100), requests)
        if not taken:  # a plain step
            return []
        growths = policy.open([requests[i] for i in taken])
        while growing := [g for g in growths if g.frontier]:
            for growth in growing:
                offers = [GOOD.offer(rng) for _ in growth.frontier]
                growth.expand(offers, [[int(t) for t in rng.integers(0, 9, 5)] for _ in offers])
            policy.assess(growths)
        policy.select(growths)
        return growths

    @pytest.mark.parametrize("seed", range(20))
    def test_trees_are_well_formed_and_within_limits(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        limits = [(8, 4, 8), (1, 4, 8), (3, 1, 3), (8, 4, 1), (2, 2, 5)]
        policy = self.policy()
        requests = [self.request(*limit) for limit in limits]
        growths = self.grow(policy, requests, rng) or self.grow(policy, requests, rng)
        assert growths
        for growth in growths:
            tree, shape, drafted = growth.tree(), growth.shape, growth.drafted()
            assert len(tree) <= shape.nodes
            assert tree.depth <= shape.depth
            assert all(len(children) <= shape.width for children in tree.children)
            assert len(drafted.probabilities) == len(drafted.features) == len(tree)
            for node, parent in enumerate(tree.parents):
                before = 1.0 if parent == ROOT else drafted.probabilities[parent]
                assert drafted.probabilities[node] <= before + 1e-12
            assert (np.diff(drafted.probabilities) <= 1e-12).all()

    def test_confident_requests_get_what_others_do_not_use(self) -> None:
        policy = self.policy(ROWS_ARE_DEAR)
        requests = [self.request(), self.request()]
        for _ in range(30):
            requests[0].history.observe(2.0, 1.0)
            requests[1].history.observe(0.0, 1.0)
        rng = np.random.default_rng(0)
        counts = np.zeros(2)
        for _ in range(30):
            for growth in self.grow(policy, requests, rng):
                counts[requests.index(growth.request)] += len(growth.chosen)
        assert counts[0] > 1.5 * counts[1]

    def test_nothing_may_be_drafted(self) -> None:
        policy = self.policy()
        assert policy.participants(Batch(2, 10), [self.request(depth=0), self.request(depth=0)]) == []

    def test_nobody_before_the_first_step(self) -> None:
        policy = ThroughputPolicy()
        assert policy.participants(Batch(1, 10), [self.request()]) == []

    def test_a_long_backlog_is_weighed(self) -> None:
        """Requests with much to catch up with come last."""
        policy = Oracle(replace(ROWS_ARE_DEAR, first_row=0.01))
        policy._awake = True
        requests = [self.request(pending=100000), self.request(pending=1)]
        assert 0 not in policy.participants(Batch(2, 10), requests)
