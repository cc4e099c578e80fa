"""Load that swings: arrival rates from measured speeds, the schedule of requests, and the figures of having served it.

Nothing here runs an engine. Rates follow from how many requests per second the baseline finishes with so many at
once, taken for a fluid: `d(unfinished)/dt = rate of arrivals - rate of service at that concurrency`.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

STEP_SECONDS = 0.05
# A drained queue is this many requests above the quiet level: a fluid reaches the level itself only in the limit.
DRAINED_ABOVE = 1.0
DRAINABLE = 0.5

Span = tuple[float, float]  # arrival and end of a request, in seconds
Service = Mapping[float, float]  # concurrency -> requests finished per second


@dataclass(frozen=True)
class Phase:
    """A stretch of time with one rate of arrivals (requests per second)."""

    name: str
    seconds: float
    rate: float


def service_rate(service: Service, concurrency: float) -> float:
    """Requests per second at a concurrency: linear between measured ones and from zero, constant above the last."""
    below, rate = 0.0, 0.0
    for measured in sorted(service):
        if concurrency <= measured:
            share = (concurrency - below) / (measured - below)
            return rate + share * (service[measured] - rate)
        below, rate = measured, service[measured]
    return rate


def level_after(service: Service, rate: float, seconds: float, start: float) -> float:
    """Unfinished requests after some seconds at this rate of arrivals."""
    level = start
    for _ in range(round(seconds / STEP_SECONDS)):
        level = max(level + STEP_SECONDS * (rate - service_rate(service, level)), 0.0)
    return level


def rate_to_reach(service: Service, peak: float, seconds: float, start: float) -> float:
    """Rate of arrivals that takes the unfinished requests from `start` to `peak` in these seconds."""
    low, high = 0.0, max(service.values()) + peak / seconds
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if level_after(service, middle, seconds, start) < peak else (low, middle)
    return high


def seconds_to_drain(service: Service, rate: float, start: float, end: float, longest: float) -> float:
    """Seconds until the unfinished requests have fallen from `start` to `end`, or `longest`."""
    level, seconds = start, 0.0
    while level > end and seconds < longest:
        level += STEP_SECONDS * (rate - service_rate(service, level))
        seconds += STEP_SECONDS
    return seconds


def swinging(service: Service, *, quiet: float, peak: float, seconds: float, cycles: int) -> list[Phase]:
    """Quiet phases around `quiet` requests at once and busy ones that end at `peak`, for an engine of this speed.

    A busy phase is followed by the time to drain what it left, at the quiet rate, and then by a quiet phase.
    """
    # Where concurrency hardly speeds up service, a queue would never drain at the rate of `quiet` requests at once.
    quiet_rate = min(service_rate(service, quiet), DRAINABLE * max(service.values()))
    busy_rate = rate_to_reach(service, peak, seconds, quiet)
    drain = seconds_to_drain(service, quiet_rate, peak, quiet + DRAINED_ABOVE, 5 * seconds)
    phases = []
    for _ in range(cycles):
        phases.append(Phase("quiet", seconds, quiet_rate))
        phases.append(Phase("busy", seconds, busy_rate))
        phases.append(Phase("drain", drain, quiet_rate))
    return phases


def arrivals(phases: Iterable[Phase], seed: int) -> list[float]:
    """Poisson arrivals: the same for every engine that is given the same seed."""
    dice = random.Random(seed)
    times, begin = [], 0.0
    for phase in phases:
        end = begin + phase.seconds
        now = begin + dice.expovariate(phase.rate)
        while now < end:
            times.append(now)
            now += dice.expovariate(phase.rate)
        begin = end
    return times


def busy_seconds(spans: Iterable[Span]) -> float:
    """Seconds in which at least one request was unfinished."""
    busy, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        busy += max(end - max(begin, until), 0.0)
        until = max(until, end)
    return busy


def concurrency(spans: Sequence[Span], bin_seconds: float) -> list[float]:
    """Mean number of unfinished requests in every bin of time from zero to the last end."""
    bins = [0.0] * (int(max(end for _, end in spans) / bin_seconds) + 1)
    for begin, end in spans:
        for index in range(int(begin / bin_seconds), int(end / bin_seconds) + 1):
            overlap = min(end, (index + 1) * bin_seconds) - max(begin, index * bin_seconds)
            bins[index] += max(overlap, 0.0) / bin_seconds
    return bins


def highest(spans: Iterable[Span]) -> int:
    """Most unfinished requests at one moment; who ends at it makes room for who arrives."""
    changes = sorted((moment, change) for begin, end in spans for moment, change in ((begin, 1), (end, -1)))
    level = most = 0
    for _, change in changes:
        level += change
        most = max(most, level)
    return most


def percentile_90(values: Sequence[float]) -> float:
    """The 90th percentile, interpolated."""
    return statistics.quantiles(values, n=10, method="inclusive")[-1] if len(values) > 1 else values[0]


def figures(arrived: Sequence[float], times: Sequence[Sequence[float]], tokens: Sequence[int]) -> dict[str, float]:
    """What one engine made of a schedule.

    Args:
        arrived: when each request was due, which is what its latency counts from.
        times: of each request submission, first token and end, on the same clock.
        tokens: of each request's answer.

    Returns:
        Seconds from the first arrival to the last end, tokens per second of those and of the busy ones among them;
        mean and 90th percentile of latency, time to the first token and time per later token; concurrency.
    """
    spans = [(begin, end) for begin, (_, _, end) in zip(arrived, times, strict=True)]
    makespan = max(end for _, end in spans) - min(arrived)
    busy = busy_seconds(spans)
    each = {
        "latency_s": [end - begin for begin, end in spans],
        "ttft_s": [first - begin for begin, (_, first, _) in zip(arrived, times, strict=True)],
        "tpot_ms": [
            1000 * (end - first) / max(count - 1, 1) for (_, first, end), count in zip(times, tokens, strict=True)
        ],
    }
    found = {
        "makespan_s": makespan,
        "busy_s": busy,
        "tokens_per_second": sum(tokens) / makespan,
        "tokens_per_busy_second": sum(tokens) / busy,
        "mean_concurrency": sum(each["latency_s"]) / busy,
        "highest_concurrency": float(highest(spans)),
    }
    for name, values in each.items():
        found |= {f"{name}_mean": statistics.fmean(values), f"{name}_p90": percentile_90(values)}
    return {name: round(value, 4) for name, value in found.items()}
