"""From raw turns to the figures of a table: ratios within a round, medians and spread over rounds."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .engines import Run


@dataclass(frozen=True)
class Spread:
    """Median and range of a few values of the same thing."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Median, smallest, largest."""
        numbers = list(values)
        return cls(statistics.median(numbers), min(numbers), max(numbers))


@dataclass(frozen=True)
class Summary:
    """One engine on one source of prompts at one batch size.

    `ratio` is to the baseline engine in the same round; `prompt_ratio` is the same of single groups of prompts: its
    range is the difference between prompts, where that of `ratio` is the noise of the machine. The last five are
    None without speculation (acceptance length, drafted nodes) or without AdaptiveSpec (promoted share, depth).
    """

    engine: str
    source: str
    batch: int
    rounds: int
    tokens: int
    tokens_per_second: Spread
    ratio: Spread
    prompt_ratio: Spread
    exact_match: float
    peak_rss_mib: float
    acceptance_length: float | None = None
    drafted_per_step: float | None = None
    promoted_share: float | None = None
    tree_depth: float | None = None


def throughput(runs: Iterable[Run]) -> float:
    """Tokens per second over several turns: all tokens by all seconds."""
    turns = list(runs)
    return sum(run.tokens for run in turns) / sum(run.seconds for run in turns)


def total_counters(runs: Iterable[Run]) -> dict[str, int]:
    """Sum of the counters of several turns."""
    totals: dict[str, int] = defaultdict(int)
    for run in runs:
        for key, value in run.counters.items():
            totals[key] += value
    return dict(totals)


def exact_match(runs: Sequence[Run], baseline: Sequence[Run]) -> float:
    """Share of prompts (over all rounds) with the very tokens that the baseline generated in the same turn."""
    reference = {(run.round, run.group): run.token_ids for run in baseline}
    pairs = [
        (ids, expected)
        for run in runs
        for ids, expected in zip(run.token_ids, reference[run.round, run.group], strict=True)
    ]
    return sum(ids == expected for ids, expected in pairs) / len(pairs)


def speculation_figures(runs: Sequence[Run]) -> dict[str, float | None]:
    """Acceptance length, nodes and depth per verification, promoted share: from counters, None where there are none.

    Acceptance length is vLLM's: 1 (the token the target adds itself) + accepted / verifications with a draft.
    """
    totals = total_counters(runs)
    figures: dict[str, float | None] = {}
    if drafts := totals.get("drafts"):
        figures["acceptance_length"] = 1 + totals["accepted"] / drafts
        figures["drafted_per_step"] = totals["drafted"] / drafts
    if verifications := totals.get("own_verifications"):
        figures["promoted_share"] = totals["own_promoted"] / totals["own_emitted"]
        figures["tree_depth"] = totals["own_depth_sum"] / verifications
    return figures


def summarise(runs: Sequence[Run], baseline: str) -> list[Summary]:
    """One summary per (source, batch, engine), in order of appearance; all in one cell ran the same turns."""
    cells: dict[tuple[str, int], dict[str, list[Run]]] = {}
    for run in runs:
        cells.setdefault((run.source, run.batch), {}).setdefault(run.engine, []).append(run)
    summaries = []
    for (source, batch), by_engine in cells.items():
        reference = by_engine[baseline]
        rounds = sorted({run.round for run in reference})
        reference_speed = {(run.round, run.group): throughput([run]) for run in reference}
        reference_round = {r: throughput(run for run in reference if run.round == r) for r in rounds}
        for engine, turns in by_engine.items():
            speed = {r: throughput(run for run in turns if run.round == r) for r in rounds}
            summaries.append(
                Summary(
                    engine=engine,
                    source=source,
                    batch=batch,
                    rounds=len(rounds),
                    tokens=sum(run.tokens for run in turns),
                    tokens_per_second=Spread.of(speed.values()),
                    ratio=Spread.of(speed[r] / reference_round[r] for r in rounds),
                    prompt_ratio=Spread.of(throughput([run]) / reference_speed[run.round, run.group] for run in turns),
                    exact_match=exact_match(turns, reference),
                    peak_rss_mib=max(run.peak_rss_mib for run in turns),
                    **speculation_figures(turns),
                )
            )
    return summaries


def to_json(summary: Summary) -> dict[str, Any]:
    """A summary as plain values, rounded to what a measurement of seconds can tell."""
    return {
        key: {name: round(number, 4) for name, number in value.items()}
        if isinstance(value, dict)
        else round(value, 4)
        if isinstance(value, float)
        else value
        for key, value in asdict(summary).items()
    }
