"""Turns of `bench/load.py` and what follows from them: figures, ratios within a round, spread over rounds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import swing

from vllm_adaptivespec.cli import methods
from vllm_adaptivespec.cli.engines import Run
from vllm_adaptivespec.cli.measure import Spread, exact_match, speculation_figures, summarise, throughput, to_json
from vllm_adaptivespec.cli.record import run_to_json

BASELINE = methods.no_speculation().name
BIN_SECONDS = 1.0
MIXED, SWINGING = "mixed", "swinging"


@dataclass(frozen=True)
class Turn:
    """One engine's turn: what it generated, and what its requests saw."""

    run: Run
    figures: dict[str, float]
    concurrency: list[float] | None = None  # of an open loop, in bins of BIN_SECONDS

    def entry(self) -> dict[str, Any]:
        """The turn in the record; its tokens are counted there, not listed."""
        entry = {key: value for key, value in run_to_json(self.run).items() if key != "token_ids"} | self.figures
        if self.concurrency is not None:
            entry["concurrency"] = [round(level, 2) for level in self.concurrency]
        return entry


@dataclass
class Measured:
    """All that has been measured so far."""

    fixed: list[Turn] = field(default_factory=list)
    calibration: list[Turn] = field(default_factory=list)
    swinging: list[Turn] = field(default_factory=list)
    phases: list[swing.Phase] = field(default_factory=list)

    def service(self) -> dict[float, float]:
        """Requests per second of no speculation by concurrency, the median of its turns."""
        by_batch: dict[float, list[float]] = {}
        for turn in (*self.fixed, *self.calibration):
            if turn.run.engine == BASELINE:
                by_batch.setdefault(turn.run.batch, []).append(len(turn.run.token_ids) / turn.run.seconds)
        return {batch: statistics.median(rates) for batch, rates in sorted(by_batch.items())}


def turn_of(engine: str, source: str, batch: int, round_: int, arrived: Sequence[float], answer: Any) -> Turn:
    """An engine's answer as a turn; `arrived` is when its requests were due."""
    times = answer.pop("times")
    run = Run(engine, source, batch, round_, 0, **answer)
    figures = swing.figures(arrived, times, [len(ids) for ids in run.token_ids])
    if source != SWINGING:
        return Turn(run, figures)
    spans = [(begin, end) for begin, (_, _, end) in zip(arrived, times, strict=True)]
    return Turn(run, figures, swing.concurrency(spans, BIN_SECONDS))


def fixed_summary(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """One row per engine and batch: `measure.summarise`'s, the ratio of all rounds together, the true concurrency."""
    rows = []
    runs = [turn.run for turn in turns]
    for summary in summarise(runs, BASELINE):
        own, reference = (
            [turn for turn in turns if (turn.run.engine, turn.run.batch) == (engine, summary.batch)]
            for engine in (summary.engine, BASELINE)
        )
        row = to_json(summary)
        del row["prompt_ratio"]  # a round is one group of prompts here
        row["total_ratio"] = round(throughput(t.run for t in own) / throughput(t.run for t in reference), 4)
        row |= medians(own, ("mean_concurrency", "tpot_ms_mean", "latency_s_mean"))
        rows.append(row)
    return rows


def medians(turns: Sequence[Turn], names: Sequence[str]) -> dict[str, float]:
    """Medians over turns of some figures."""
    return {name: round(statistics.median(turn.figures[name] for turn in turns), 4) for name in names}


def swing_summary(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """One row per engine; ratios are of tokens per busy second, to no speculation in the same round."""
    by_engine: dict[str, dict[int, Turn]] = {}
    for turn in turns:
        by_engine.setdefault(turn.run.engine, {})[turn.run.round] = turn
    rows = []
    for engine, all_own in by_engine.items():
        # In a round that is not complete either of the two may be missing.
        rounds = sorted(all_own.keys() & by_engine.get(BASELINE, {}).keys())
        if not rounds:
            continue
        own, reference = ([by_engine[name][r] for r in rounds] for name in (engine, BASELINE))
        speed, reference_speed = ([t.figures["tokens_per_busy_second"] for t in side] for side in (own, reference))
        total, reference_total = (
            sum(t.run.tokens for t in side) / sum(t.figures["busy_s"] for t in side) for side in (own, reference)
        )
        row: dict[str, Any] = {
            "engine": engine,
            "rounds": len(rounds),
            "tokens_per_busy_second": rounded(Spread.of(speed)),
            "ratio": rounded(Spread.of(a / b for a, b in zip(speed, reference_speed, strict=True))),
            "total_ratio": round(total / reference_total, 4),
            "exact_match": round(exact_match([t.run for t in own], [t.run for t in reference]), 4),
        }
        for name, value in speculation_figures([t.run for t in own]).items():
            row[name] = None if value is None else round(value, 4)
        rows.append(row | medians(own, [name for name in own[0].figures if name not in row]))
    return rows


def rounded(spread: Spread) -> dict[str, float]:
    """A spread as plain values."""
    return {name: round(value, 4) for name, value in asdict(spread).items()}
