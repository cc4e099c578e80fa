"""The arithmetic of the tables."""

import pytest

from vllm_adaptivespec.cli.measure import Spread, exact_match, speculation_figures, summarise, throughput, to_json


def test_spread():
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)


def test_throughput_is_all_tokens_by_all_seconds(make_run):
    """Not the mean of the single speeds: a long answer weighs more than a short one."""
    runs = [make_run("a", 1.0, [[1] * 10]), make_run("a", 3.0, [[1] * 10, [1] * 20])]
    assert throughput(runs) == 10.0


def test_exact_match_counts_prompts_of_the_same_turn(make_run):
    baseline = [make_run("none", 1.0, [[1, 2], [3, 4]]), make_run("none", 1.0, [[5], [6]], group=1)]
    same = [make_run("a", 1.0, [[5], [6]], group=1), make_run("a", 1.0, [[1, 2], [3, 4]])]
    assert exact_match(same, baseline) == 1.0
    one_off = [make_run("a", 1.0, [[1, 2], [3, 4]]), make_run("a", 1.0, [[5], [7]], group=1)]
    assert exact_match(one_off, baseline) == 0.75
    prefix = [make_run("a", 1.0, [[1], [3, 4]])]
    assert exact_match(prefix, baseline) == 0.5, "a shorter answer is a different answer"


def test_figures_of_stock_speculation(make_run):
    counters = {"drafts": 10, "drafted": 30, "accepted": 7}
    figures = speculation_figures([make_run("a", 1.0, counters=counters), make_run("a", 1.0, counters=counters)])
    assert figures == {"acceptance_length": 1.7, "drafted_per_step": 3.0}


def test_figures_of_our_own_counters(make_run):
    counters = {
        "drafts": 10,
        "drafted": 80,
        "accepted": 12,
        "own_verifications": 10,
        "own_promoted": 2,
        "own_emitted": 25,
        "own_depth_sum": 30,
    }
    figures = speculation_figures([make_run("a", 1.0, counters=counters)])
    assert figures == {
        "acceptance_length": 2.2,
        "drafted_per_step": 8.0,
        "promoted_share": 0.08,
        "tree_depth": 3.0,
    }


def test_no_speculation_has_no_such_figures(make_run):
    assert speculation_figures([make_run("none", 1.0)]) == {}
    assert speculation_figures([make_run("a", 1.0, counters={"drafts": 0, "drafted": 0, "accepted": 0})]) == {}


def test_ratio_is_taken_within_a_round(make_run):
    """The machine slows down by half between two rounds; the ratio does not see it."""
    runs = [
        make_run("none", 2.0, round=0),
        make_run("fast", 1.0, round=0),
        make_run("none", 4.0, round=1),
        make_run("fast", 2.0, round=1),
    ]
    none, fast = summarise(runs, "none")
    assert (none.ratio, fast.ratio) == (Spread(1.0, 1.0, 1.0), Spread(2.0, 2.0, 2.0))
    assert fast.tokens_per_second == Spread(3.0, 2.0, 4.0)
    assert (fast.rounds, fast.tokens) == (2, 8)


def test_ratio_by_prompt_shows_the_prompts(make_run):
    runs = [
        make_run("none", 1.0, group=0),
        make_run("none", 1.0, group=1),
        make_run("fast", 0.5, group=0),
        make_run("fast", 2.0, group=1),
    ]
    fast = summarise(runs, "none")[1]
    assert fast.prompt_ratio == Spread(1.25, 0.5, 2.0)
    assert fast.ratio.median == pytest.approx(0.8)


def test_cells_are_kept_apart(make_run):
    runs = [
        make_run(engine, seconds, source=source, batch=batch)
        for source, batch, seconds in (("chat", 1, 1.0), ("chat", 4, 2.0), ("humaneval", 1, 4.0))
        for engine in ("none", "fast")
    ]
    summaries = summarise(runs, "none")
    assert [(s.source, s.batch, s.engine, s.tokens_per_second.median) for s in summaries] == [
        ("chat", 1, "none", 4.0),
        ("chat", 1, "fast", 4.0),
        ("chat", 4, "none", 2.0),
        ("chat", 4, "fast", 2.0),
        ("humaneval", 1, "none", 1.0),
        ("humaneval", 1, "fast", 1.0),
    ]


def test_summary_as_json_is_plain_and_rounded(make_run):
    (none,) = summarise([make_run("none", 3.0)], "none")
    plain = to_json(none)
    assert plain["tokens_per_second"] == {"median": 1.3333, "low": 1.3333, "high": 1.3333}
    assert plain["acceptance_length"] is None
