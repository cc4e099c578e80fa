"""The walk and the margin rule: against brute force, and against the distribution they must not change."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.core.trees import Path, small_vocabulary_trees, token_path
from vllm_adaptivespec.core.acceptance import EXACT, MarginRule, Walk, log_ratios, walk_tree
from vllm_adaptivespec.core.tree import ROOT, DraftTree

VOCAB = 4

Target = Callable[[Path], int]
"""The target's own token after a path of tokens."""

trees = small_vocabulary_trees(VOCAB)
seeds = st.integers(0, 2**32)
kappas = st.sampled_from([1.0, 0.9, 0.5, 0.3, 0.05])
special_ratios = st.sampled_from([0.0, -0.5, -1.0, math.log(0.3), math.log(0.5), -5.0, -math.inf, math.nan])


def random_target(seed: int) -> Target:
    return lambda path: random.Random(f"{seed} {path}").randrange(VOCAB)


def chooser(target: Target) -> Callable[[int, Sequence[int]], int]:
    """What ``walk_tree`` asks."""
    return lambda _, tokens: target(tuple(tokens))


@st.composite
def tree_and_ratios(draw: st.DrawFn) -> tuple[DraftTree, list[float]]:
    tree = draw(trees)
    return tree, draw(st.lists(special_ratios, min_size=len(tree), max_size=len(tree)))


def expected_walk(
    tree: DraftTree, target: Target, ratios: Sequence[float], rule: MarginRule
) -> tuple[list[int], Path, int]:
    """Emitted tokens, accepted path and promotions, in terms of token paths only."""
    ratio_of = {token_path(tree, node): ratios[node] for node in range(len(tree))}
    path: Path = ()
    promoted = 0
    while True:
        choice = target(path)
        drafted = [p for p in ratio_of if p[:-1] == path and len(p) == len(path) + 1]
        if (*path, choice) in drafted:
            path = (*path, choice)
            continue
        passing = [
            p
            for p in drafted
            if rule.kappa < 1
            and math.exp(ratio_of[p]) >= rule.kappa * (1 - 1e-12)
            and choice not in rule.protected
            and p[-1] not in rule.protected
        ]
        if not passing or promoted == rule.max_promotions:
            return [*path, choice], path, promoted
        path = max(passing, key=lambda p: ratio_of[p])
        promoted += 1


class TestWalk:
    @given(
        tree_and_ratios(),
        seeds,
        st.builds(
            MarginRule,
            kappa=kappas,
            max_promotions=st.none() | st.integers(0, 2),
            protected=st.frozensets(st.integers(0, VOCAB - 1), max_size=2),
        ),
    )
    def test_equals_brute_force(self, drafted: tuple[DraftTree, list[float]], seed: int, rule: MarginRule) -> None:
        tree, ratios = drafted
        target = random_target(seed)
        walk = walk_tree(tree, chooser(target), rule, ratios)
        assert (walk.emitted, tuple(tree.tokens[n] for n in walk.path), walk.promoted) == expected_walk(
            tree, target, ratios, rule
        )
        assert list(walk.path) == list(tree.path(walk.node))

    @given(tree_and_ratios(), seeds, st.booleans())
    def test_exact_is_the_targets_own_continuation(
        self, drafted: tuple[DraftTree, list[float]], seed: int, with_ratios: bool
    ) -> None:
        """Whatever was drafted, and however good a ratio claims to be."""
        tree, ratios = drafted
        target = random_target(seed)
        walk = walk_tree(tree, chooser(target), MarginRule(EXACT), ratios if with_ratios else None)
        own: list[int] = []
        for _ in walk.emitted:
            own.append(target(tuple(own)))
        assert walk.emitted == own
        assert walk.promoted == 0

    @given(trees, seeds)
    def test_goes_as_far_as_the_tree_does(self, tree: DraftTree, seed: int) -> None:
        target = random_target(seed)
        walk = walk_tree(tree, chooser(target), MarginRule(), None)
        drafted = {token_path(tree, node) for node in range(len(tree))} | {()}
        assert tuple(walk.emitted[:-1]) in drafted
        assert tuple(walk.emitted) not in drafted

    @given(trees, seeds)
    def test_each_row_is_asked_once(self, tree: DraftTree, seed: int) -> None:
        """A seeded request draws its noise once per emitted token, as without speculation."""
        asked: list[tuple[int, Path]] = []
        target = random_target(seed)

        def choose(node: int, tokens: Sequence[int]) -> int:
            asked.append((node, tuple(tokens)))
            return target(tuple(tokens))

        walk = walk_tree(tree, choose, MarginRule(), None)
        assert [node for node, _ in asked] == [ROOT, *walk.path]
        assert [tokens for _, tokens in asked] == [tuple(walk.emitted[:n]) for n in range(len(walk.emitted))]

    def test_empty_tree(self) -> None:
        walk = walk_tree(DraftTree((), ()), lambda node, tokens: 3, MarginRule(0.05), [])
        assert (walk.emitted, walk.path, walk.done, walk.first_mismatch) == ([3], [], True, None)

    def test_first_mismatch_is_kept(self) -> None:
        tree = DraftTree((0, 1, 2), (ROOT, ROOT, 1))
        walk = Walk(tree, MarginRule(0.3))
        walk.advance(3, [-2.0, -0.5, -4.0])
        assert (walk.node, walk.promoted, walk.first_mismatch) == (1, 1, -0.5)
        walk.advance(3, [-2.0, -0.5, -4.0])
        assert (walk.done, walk.emitted, walk.first_mismatch) == (True, [1, 3], -0.5)


STAR = DraftTree((0, 1, 2), (ROOT, ROOT, ROOT))
OTHER = 3
"""A choice that no child of the star carries."""


class TestMarginRule:
    def test_likeliest_passing_child(self) -> None:
        rule = MarginRule(0.3)
        assert rule.promoted_child(STAR, ROOT, OTHER, [-1.0, -0.2, -0.9]) == 1
        assert rule.promoted_child(STAR, ROOT, OTHER, [-1.0, -3.0, -1.1]) == 0
        assert rule.promoted_child(STAR, ROOT, OTHER, [-2.0, -3.0, -9.0]) is None

    def test_only_children_of_the_node(self) -> None:
        tree = DraftTree((0, 1), (ROOT, 0))
        assert MarginRule(0.3).promoted_child(tree, ROOT, OTHER, [-9.0, 0.0]) is None
        assert MarginRule(0.3).promoted_child(tree, 0, OTHER, [-9.0, 0.0]) == 1

    @pytest.mark.parametrize("kappa", [0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 0.999])
    def test_threshold_is_inclusive(self, kappa: float) -> None:
        tree, rule = DraftTree.chain([0]), MarginRule(kappa)
        threshold = math.log(kappa)
        assert rule.promoted_child(tree, ROOT, OTHER, [threshold]) == 0
        assert rule.promoted_child(tree, ROOT, OTHER, [math.nextafter(threshold, -1e9)]) is None

    def test_exact_promotes_nothing(self) -> None:
        """Not even an equal token: argmax has chosen between them, as without speculation."""
        assert MarginRule(1.0).is_exact
        assert MarginRule(1.0).promoted_child(STAR, ROOT, OTHER, [0.0, 0.0, 0.0]) is None
        assert not MarginRule(0.999).is_exact

    @given(st.lists(special_ratios | st.floats(max_value=0), min_size=3, max_size=3))
    def test_passing_children_grow_as_kappa_falls(self, ratios: list[float]) -> None:
        ladder = [1.0, *(k / 100 for k in range(99, 4, -1))]
        before: set[int] = set()
        for kappa in ladder:
            rule = MarginRule(kappa)
            passing = {
                token
                for token, ratio in enumerate(ratios)
                if rule.promoted_child(DraftTree.chain([token]), ROOT, OTHER, [ratio]) is not None
            }
            assert before <= passing
            chosen = rule.promoted_child(STAR, ROOT, OTHER, ratios)
            assert (chosen is not None) == bool(passing)
            assert chosen is None or chosen == max(passing, key=lambda child: ratios[child])
            before = passing
        assert before == {child for child, ratio in enumerate(ratios) if ratio >= math.log(0.05)}

    @pytest.mark.parametrize("masked", [-math.inf, math.nan])
    @pytest.mark.parametrize("kappa", [0.999, 0.05, 1e-300])
    def test_masked_tokens_never_pass(self, masked: float, kappa: float) -> None:
        rule = MarginRule(kappa)
        assert rule.promoted_child(STAR, ROOT, OTHER, [masked] * 3) is None
        for good in range(3):
            ratios = [masked] * 3
            ratios[good] = -1e-9
            assert rule.promoted_child(STAR, ROOT, OTHER, ratios) == good

    def test_stop_ids_are_promoted_neither_to_nor_away_from(self) -> None:
        rule = MarginRule(0.05, protected=frozenset({1, OTHER}))
        assert rule.promoted_child(STAR, ROOT, 9, [-1.0, 0.0, -2.0]) == 0  # 1 is the likeliest, but it stops
        assert rule.promoted_child(STAR, ROOT, OTHER, [0.0, 0.0, 0.0]) is None
        # A drafted stop that the target itself chooses is accepted.
        walk = Walk(STAR, rule)
        walk.advance(1, [0.0, 0.0, 0.0])
        assert (walk.emitted, walk.promoted) == ([1], 0)

    @pytest.mark.parametrize(("limit", "emitted"), [(0, [9]), (1, [0, 9]), (2, [0, 1, 9]), (None, [0, 1, 2, 9])])
    def test_max_promotions(self, limit: int | None, emitted: list[int]) -> None:
        tree = DraftTree.chain([0, 1, 2])
        walk = walk_tree(tree, lambda node, tokens: 9, MarginRule(0.5, limit), [-0.1, -0.1, -0.1])
        assert walk.emitted == emitted
        assert walk.promoted == len(emitted) - 1

    def test_accepted_tokens_use_up_no_promotions(self) -> None:
        tree = DraftTree.chain([0, 1, 2])
        choices = iter([0, 1, 9, 9])
        walk = walk_tree(tree, lambda node, tokens: next(choices), MarginRule(0.5, 1), [-0.1, -0.1, -0.1])
        assert (walk.emitted, walk.promoted) == ([0, 1, 2, 9], 1)


class TestLogRatios:
    @pytest.mark.parametrize("with_argmax", [False, True])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_equals_differences_of_log_probabilities(self, with_argmax: bool, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        logits = (4 * torch.randn(5, 50, generator=generator)).to(dtype)
        rows = torch.randint(5, (40,), generator=generator)
        tokens = torch.randint(50, (40,), generator=generator)
        ratios = log_ratios(logits, rows, tokens, logits.argmax(dim=-1) if with_argmax else None)
        log_probs = logits.double().log_softmax(dim=-1)
        expected = log_probs[rows, tokens] - log_probs.amax(dim=-1)[rows]
        assert ratios.dtype == torch.float32
        torch.testing.assert_close(ratios.double(), expected, rtol=0, atol=2e-6)
        assert ratios.max() <= 0

    def test_best_token_has_zero(self) -> None:
        logits = torch.tensor([[1.0, 3.0, 2.0], [0.5, 0.5, -1.0]])
        ratios = log_ratios(logits, torch.tensor([0, 1, 1, 0]), torch.tensor([1, 0, 1, 0]))
        assert ratios.tolist() == [0.0, 0.0, 0.0, -2.0]

    @pytest.mark.parametrize("with_argmax", [False, True])
    def test_masked_and_placeholder_tokens(self, with_argmax: bool) -> None:
        logits = torch.tensor([[5.0, -math.inf, 4.0]])
        argmax = torch.tensor([0]) if with_argmax else None
        ratios = log_ratios(logits, torch.zeros(3, dtype=torch.int64), torch.tensor([1, -1, 2]), argmax)
        assert ratios.tolist() == [-math.inf, -math.inf, -1.0]

    def test_row_without_any_allowed_token_promotes_nothing(self) -> None:
        """-inf minus -inf is NaN, which must not pass either."""
        ratios = log_ratios(torch.full((1, 4), -math.inf), torch.zeros(3, dtype=torch.int64), torch.tensor([0, 1, 2]))
        assert MarginRule(0.05).promoted_child(STAR, ROOT, OTHER, ratios.tolist()) is None

    def test_no_nodes(self) -> None:
        empty = torch.tensor([], dtype=torch.int64)
        assert log_ratios(torch.zeros(1, 4), empty, empty).shape == (0,)


# Two tokens of a target over three, sampled at temperature 1: nine outputs.
FIRST = (0.5, 0.3, 0.2)
SECOND = {0: (0.1, 0.3, 0.6), 1: (0.45, 0.1, 0.45), 2: (0.7, 0.2, 0.1)}
CRITICAL = 26.12
"""chi-square, 8 degrees of freedom, p = 0.001."""


def distribution(path: Path) -> tuple[float, ...]:
    """The target's next-token distribution; only the first two tokens are looked at, so it may end there."""
    return FIRST if not path else SECOND[path[0]]


def two_tokens(rng: random.Random, tree_of: Callable[[Path], DraftTree], rule: MarginRule) -> Path:
    """Speculative steps, each with a tree of its own, until two tokens are there."""
    output: list[int] = []
    while len(output) < 2:
        tree = tree_of(tuple(output))
        emitted = tuple(output)
        ratios = []
        for node in range(len(tree)):
            *before, token = (*emitted, *token_path(tree, node))
            row = distribution(tuple(before))
            ratios.append(math.log(row[token] / max(row)))

        def choose(node: int, tokens: Sequence[int], emitted: Path = emitted) -> int:
            return rng.choices(range(3), distribution((*emitted, *tokens)))[0]

        output += walk_tree(tree, choose, rule, ratios).emitted
    return output[0], output[1]


def chi_square(tree_of: Callable[[Path], DraftTree], rule: MarginRule, samples: int = 6000) -> float:
    rng = random.Random(1)
    counts = Counter(two_tokens(rng, tree_of, rule) for _ in range(samples))
    expected = {(a, b): samples * FIRST[a] * SECOND[a][b] for a, b in itertools.product(range(3), repeat=2)}
    assert set(counts) <= set(expected)
    return sum((counts[output] - e) ** 2 / e for output, e in expected.items())


BRANCHING = DraftTree((0, 1, 2, 1), (ROOT, ROOT, 0, 0))
"""Two children at the root, two below its best: a mismatch can happen at either level."""


def branching_trees(path: Path) -> DraftTree:
    return DraftTree((1, 0), (ROOT, ROOT)) if path else BRANCHING


class TestDistribution:
    """Sample-and-match on a branching root leaves the target's distribution alone."""

    @pytest.mark.parametrize(
        "tree_of",
        [branching_trees, lambda path: DraftTree.chain([2, 0]), lambda path: DraftTree((0, 1, 2), (ROOT,) * 3)],
        ids=["branching", "chain", "every token drafted"],
    )
    def test_exact(self, tree_of: Callable[[Path], DraftTree]) -> None:
        assert chi_square(tree_of, MarginRule(EXACT)) < CRITICAL

    def test_without_any_draft(self) -> None:
        assert chi_square(lambda path: DraftTree((), ()), MarginRule(EXACT)) < CRITICAL

    def test_margin_rule_shows(self) -> None:
        """The test can fail: promotions at kappa = 0.3 already change the distribution far beyond chance."""
        assert chi_square(branching_trees, MarginRule(0.3)) > 10 * CRITICAL

    def test_rare_promotions_show(self) -> None:
        assert chi_square(branching_trees, MarginRule(0.9)) > CRITICAL
