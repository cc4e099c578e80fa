"""Throughput against load: arrivals, figures, and the whole script with engines that hold no vLLM."""

import json
import sys
from pathlib import Path

import pytest

from vllm_adaptivespec.cli import methods

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import load
import load_report
import load_turns
import swing

SERVICE = {1: 0.5, 8: 2.0, 32: 3.0}


@pytest.mark.parametrize(
    ("concurrency", "rate"), [(0, 0.0), (0.5, 0.25), (1, 0.5), (4.5, 1.25), (8, 2.0), (32, 3.0), (50, 3.0)]
)
def test_service_is_interpolated(concurrency, rate):
    assert swing.service_rate(SERVICE, concurrency) == pytest.approx(rate)


def test_phases_reach_the_peak_and_drain_it():
    quiet, busy, drain = swing.swinging(SERVICE, quiet=1, peak=32, seconds=20, cycles=1)
    assert (quiet.name, busy.name, drain.name) == ("quiet", "busy", "drain")
    assert quiet.rate == drain.rate == 0.5
    assert swing.level_after(SERVICE, quiet.rate, 100, 1.0) == pytest.approx(1.0, abs=0.05)
    assert swing.level_after(SERVICE, busy.rate, busy.seconds, 1.0) == pytest.approx(32, abs=0.1)
    assert swing.level_after(SERVICE, drain.rate, drain.seconds, 32.0) == pytest.approx(2.0, abs=0.1)


def test_a_quiet_phase_drains_even_where_concurrency_gains_nothing():
    service = {1: 1.0, 32: 1.1}
    phases = swing.swinging(service, quiet=1, peak=32, seconds=20, cycles=2)
    assert len(phases) == 6
    assert phases[0].rate == pytest.approx(0.55)
    assert phases[2].seconds < 5 * 20


def test_arrivals_are_those_of_the_seed_and_of_the_rates():
    phases = [swing.Phase("quiet", 100, 1.0), swing.Phase("busy", 100, 10.0)]
    times = swing.arrivals(phases, seed=3)
    assert times == swing.arrivals(phases, seed=3) != swing.arrivals(phases, seed=4)
    assert times == sorted(times)
    assert 0 < times[0] < times[-1] < 200
    assert 60 < sum(time < 100 for time in times) < 140
    assert 850 < sum(time >= 100 for time in times) < 1150


def test_busy_seconds_count_overlaps_once_and_gaps_never():
    assert swing.busy_seconds([(5, 6), (0, 2), (1, 3), (1.5, 2.5), (6, 7)]) == 5
    assert swing.highest([(5, 6), (0, 2), (1, 3), (1.5, 2.5), (6, 7)]) == 3


def test_concurrency_is_the_mean_of_each_bin():
    assert swing.concurrency([(0.5, 2.5), (1.0, 1.25)], 1.0) == pytest.approx([0.5, 1.25, 0.5])
    assert swing.concurrency([(0.0, 1.0)], 1.0) == pytest.approx([1.0, 0.0])


def test_latency_counts_from_when_a_request_was_due():
    """A request that had to wait for its submission has waited."""
    found = swing.figures([1.0, 2.0], [[1.0, 2.0, 3.0], [5.0, 6.0, 8.0]], [11, 21])
    assert found["latency_s_mean"] == 4.0
    assert found["ttft_s_mean"] == 2.5
    assert found["tpot_ms_mean"] == 100.0
    assert found["latency_s_p90"] == pytest.approx(5.6)
    assert (found["makespan_s"], found["busy_s"]) == (7.0, 7.0)
    assert found["tokens_per_busy_second"] == pytest.approx(32 / 7, abs=1e-4)
    assert found["mean_concurrency"] == pytest.approx(8 / 7, abs=1e-4)


def test_idle_seconds_are_not_busy():
    found = swing.figures([0.0, 10.0], [[0.0, 0.5, 1.0], [10.0, 10.5, 11.0]], [5, 5])
    assert (found["tokens_per_second"], found["tokens_per_busy_second"]) == (pytest.approx(10 / 11, abs=1e-4), 5.0)


def turn(engine, seconds, round_=0, batch=1, source=load_turns.MIXED):
    answer = {"seconds": seconds, "token_ids": [[1, 2, 3, 4]], "counters": {}, "peak_rss_mib": 1.0}
    answer["times"] = [[0.0, seconds / 2, seconds]]
    return load_turns.turn_of(engine, source, batch, round_, [0.0], answer)


def test_fixed_summary_has_ratios_of_rounds_and_of_totals():
    turns = [turn("none", 2.0), turn("fast", 1.0), turn("none", 2.0, 1), turn("fast", 2.0, 1)]
    none, fast = load_turns.fixed_summary(turns)
    assert none["ratio"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert fast["ratio"] == {"median": 1.5, "low": 1.0, "high": 2.0}
    assert fast["total_ratio"] == pytest.approx(4 / 3, abs=1e-4)
    assert fast["exact_match"] == 1.0
    assert fast["mean_concurrency"] == 1.0


def test_swing_summary_leaves_out_a_round_without_its_baseline():
    source = load_turns.SWINGING
    turns = [turn("fast", 1.0, source=source), turn("none", 2.0, source=source), turn("fast", 1.0, 1, source=source)]
    assert load_turns.swing_summary(turns[:1]) == []
    fast, none = load_turns.swing_summary(turns)
    assert (fast["engine"], fast["rounds"], fast["ratio"]["median"], fast["total_ratio"]) == ("fast", 1, 2.0, 2.0)
    assert none["tokens_per_busy_second"]["median"] == 2.0


def test_service_is_measured_on_the_baseline_only():
    measured = load_turns.Measured(
        [turn("none", 2.0), turn("none", 4.0, 1), turn("fast", 1.0)], [turn("none", 1.0, batch=8)]
    )
    assert measured.service() == {1: pytest.approx(0.375), 8: 1.0}


def test_groups_take_the_next_prompts_and_start_again():
    prompts = [load.Prompt("chat", text) for text in "abcde"]
    assert [load.group(prompts, turn, 2) for turn in range(3)] == [["a", "b"], ["c", "d"], ["e", "a"]]


def test_methods_by_name(tmp_path):
    assert methods.by_name(tmp_path, "none") == methods.no_speculation()
    assert methods.by_name(tmp_path, "stock-k3") == methods.stock_eagle3(tmp_path, 3)
    tree = methods.by_name(tmp_path, "tree-2-3-4")
    assert tree.name == "tree-2-3-4"
    assert tree.speculative_config["static_shape"] == [2, 3, 4]
    assert tree.speculative_config["num_speculative_tokens"] == 4
    assert methods.by_name(tmp_path, "throughput").speculative_config["tree_policy"] == "throughput"
    for wrong in ("", "stock", "stock-3", "tree-2-3", "tree-a-b-c", "eagle"):
        with pytest.raises(ValueError, match="no method"):
            methods.by_name(tmp_path, wrong)


@pytest.mark.usefixtures("stand_in")
def test_from_the_command_to_the_files(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(load, "SETTLE_SECONDS", 0)
    monkeypatch.setattr(load, "demo_target", lambda: tmp_path)
    out = tmp_path / "out" / "load.json"
    small = ["--batches", "1,2", "--rounds", "2", "--peak", "4", "--phase", "5", "--cycles", "1", "--swing-rounds", "2"]
    load.main(["--methods", "none,stock-k2,throughput", "--out", str(out), *small])
    record = json.loads(out.read_text())
    names = ["none", "stock-k2", "throughput"]
    assert [engine["name"] for engine in record["engines"]] == names
    assert {(row["engine"], row["batch"]) for row in record["summary"]} == {(n, b) for n in names for b in (1, 2)}
    assert len(record["runs"]) == 2 * 2 * 3, "warm-up turns are not recorded"
    assert [run["engine"] for run in record["runs"][:6]] == [*names, "stock-k2", "throughput", "none"]
    assert [run["batch"] for run in record["calibration"]] == [4]
    assert record["settings"]["warmups"] == 1
    assert [row["engine"] for row in record["swing_summary"]] == names
    assert len(record["swing_runs"]) == 2 * 3
    assert {run["tokens"] for run in record["swing_runs"] if run["round"] == 0} == {record["swing_runs"][0]["tokens"]}
    assert record["swing_runs"][0]["concurrency"]
    assert str(tmp_path) not in out.read_text()
    picture = out.with_suffix(".png")
    picture.unlink()
    capsys.readouterr()
    load.main(["--plot", str(out)])
    assert picture.is_file()
    assert "swinging load" in capsys.readouterr().out


def test_only_swinging_load_warms_everyone_up_first(monkeypatch, tmp_path):
    class Fake:
        def __init__(self, name):
            self.spec, self.turns = methods.EngineSpec(name, name), []

        def serve(self, texts, max_tokens, arrivals, limit=None):
            self.turns.append(limit)
            ids = [[0] * max_tokens] * len(texts)
            times = [[a, a + 0.1, a + 0.2] for a in arrivals]
            return {"seconds": 1.0, "token_ids": ids, "counters": {}, "peak_rss_mib": 1.0, "times": times}

    monkeypatch.setattr(load, "SETTLE_SECONDS", 0)
    args = load.parser().parse_args(["--rounds", "0", "--peak", "8"])
    fakes, measured = [Fake("none"), Fake("other")], load_turns.Measured()
    load.calibrate(fakes, measured, [load.Prompt("chat", "x")], args)
    assert fakes[0].turns == [1, 1, 2, 2, 8, 8]
    assert fakes[1].turns == [1, 2, 8]
    assert list(measured.service()) == [1, 2, 8]


def test_a_run_needs_the_baseline(capsys):
    with pytest.raises(SystemExit):
        load.main(["--methods", "stock-k2"])
    assert "'none'" in capsys.readouterr().err


def test_colours_tell_kinds_apart():
    found = load_report.colors(["none", "stock-k1", "stock-k2", "tree-2-3-4", "throughput", "something"])
    assert len(set(found.values())) == 6
