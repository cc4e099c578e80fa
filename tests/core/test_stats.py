"""Running totals of walks."""

from __future__ import annotations

import json
import math

import pytest

from vllm_adaptivespec.core.acceptance import MarginRule, Walk
from vllm_adaptivespec.core.stats import MARGIN_EDGES, SpecStats
from vllm_adaptivespec.core.tree import ROOT, DraftTree

#  root - 10 - 11
#     \ - 12
TREE = DraftTree((10, 11, 12), (ROOT, 0, ROOT))


def walked(tree: DraftTree, choices: list[int], ratios: list[float] | None = None, kappa: float = 1.0) -> Walk:
    walk = Walk(tree, MarginRule(kappa))
    for choice in choices:
        walk.advance(choice, ratios)
    assert walk.done
    return walk


def test_totals_by_hand() -> None:
    stats = SpecStats()
    stats.observe(walked(TREE, [10, 11, 5]))  # both accepted, and the bonus token
    stats.observe(walked(TREE, [7]))  # nothing accepted
    stats.observe(walked(TREE, [7, 5], [-3.0, -9.0, math.log(0.4)], kappa=0.3))  # 12 promoted over 7
    stats.observe(walked(DraftTree.chain([1, 2]), [1, 9]))
    assert stats.as_dict() == {
        "verifications": 4,
        "drafted": 11,
        "accepted": 4,
        "promoted": 1,
        "emitted": 8,
        "depth_sum": 8,
        "chains": 1,
        "shapes": [[2, 2, 1], [2, 3, 3]],
        "margins": [0, 0, 0, 0, 1, 0, 0, 0],
        "margin_edges": list(MARGIN_EDGES),
    }


def test_emitted_is_one_more_than_accepted() -> None:
    """vLLM's own acceptance length, 1 + accepted / drafts, is ``emitted / verifications``."""
    stats = SpecStats()
    for choices in ([10, 11, 5], [10, 5], [12, 5], [5]):
        stats.observe(walked(TREE, choices))
    assert stats.emitted == stats.accepted + stats.verifications


@pytest.mark.parametrize(
    ("ratio", "bin_index"),
    [(0.0, 0), (0.049, 0), (0.051, 1), (0.15, 2), (0.31, 4), (0.49, 4), (0.6, 5), (0.71, 6), (0.95, 7), (1.0, 7)],
)
def test_margin_histogram(ratio: float, bin_index: int) -> None:
    stats = SpecStats()
    log_ratio = math.log(ratio) if ratio else -math.inf
    # The best child counts, whichever it is; below the root ratios are not looked at.
    stats.observe(walked(TREE, [7], [-math.inf, 0.0, log_ratio]))
    assert stats.margins == [int(i == bin_index) for i in range(len(MARGIN_EDGES) + 1)]


def test_margin_of_the_first_mismatch_only() -> None:
    stats = SpecStats()
    stats.observe(walked(TREE, [7, 5], [math.log(0.8), math.log(0.1), -math.inf], kappa=0.5))
    assert stats.margins[6] == 1
    assert sum(stats.margins) == 1


def test_no_margin_without_a_mismatch_or_without_ratios() -> None:
    stats = SpecStats()
    stats.observe(walked(TREE, [10, 11, 5], [0.0, 0.0, 0.0]))  # ends at a leaf
    stats.observe(walked(TREE, [7]))
    assert sum(stats.margins) == 0


def test_nan_margin_is_no_crash() -> None:
    stats = SpecStats()
    stats.observe(walked(TREE, [7], [math.nan, math.nan, math.nan]))
    assert stats.verifications == 1


def test_as_dict_is_json_and_a_copy() -> None:
    stats = SpecStats()
    stats.observe(walked(TREE, [7], [0.0, 0.0, 0.0]))
    first = stats.as_dict()
    assert json.loads(json.dumps(first)) == first
    stats.observe(walked(TREE, [7], [0.0, 0.0, 0.0]))
    assert first["margins"] == [0] * 7 + [1]
