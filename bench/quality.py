#!/usr/bin/env python3
"""What kappa costs: acceptance length against the target's own opinion of the text, and the presets that follow.

One engine; every setting generates for the same held-out prompts, greedily. Nothing is timed. An output's score is the
mean log-probability of its tokens under the target, as the verification reports it; a few outputs of the last setting
are scored again in plain prefills, and the largest difference is recorded. The loss of a setting is the lossless
output's score minus its own, prompt by prompt, in nats per token.

Every second prompt of each kind belongs to the tuning half, the others to the report half. A preset is the smallest
kappa of the grid whose mean loss on the tuning half is at most the preset's limit; what it is worth is read off the
report half, which had no part in the choice. Writes bench/results/quality.json and quality.png.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inprocess import header, prompt_ids, runner_of, start

from vllm_adaptivespec.cli.prompts import SOURCES

GRID = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
LIMITS = {"near-lossless": 0.02, "balanced": 0.06}
"""Largest mean loss of a preset on the tuning half, nats per token: 2% and 6% of perplexity."""
HALVES = ("tuning", "report")
RESAMPLES = 2000
CHECKED = 8
"""Outputs scored a second time."""
COUNTERS = ("verifications", "promoted", "emitted", "drafted", "accepted")

Group = tuple[str, str]
"""Half and kind of prompt."""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=int, default=48, help="of each kind")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    return parser.parse_args()


@dataclass(frozen=True)
class Measured:
    """What one setting made of one group of prompts."""

    outputs: list[list[int]]
    scores: list[float]
    counts: dict[str, int]


def interval(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """95% bootstrap interval of the mean over prompts."""
    rng = random.Random(seed)
    means = sorted(statistics.fmean(rng.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return means[int(0.025 * RESAMPLES)], means[int(0.975 * RESAMPLES)]


def measure(llm: Any, prompts: list[list[int]], kappa: float, max_tokens: int) -> Measured:
    from vllm import SamplingParams

    stats = runner_of(llm).stats
    before = stats.as_dict()
    params = SamplingParams(
        temperature=0,
        max_tokens=max_tokens,
        logprobs=0,  # of the emitted tokens alone
        extra_args={"adaptivespec_margin_threshold": kappa},
    )
    requests = [{"prompt_token_ids": p} for p in prompts]
    completions = [r.outputs[0] for r in llm.generate(requests, params, use_tqdm=False)]
    after = stats.as_dict()
    return Measured(
        [list(c.token_ids) for c in completions],
        [mean_log_prob(c.token_ids, c.logprobs) for c in completions],
        {k: after[k] - before[k] for k in COUNTERS},
    )


def mean_log_prob(tokens: Sequence[int], logprobs: Sequence[Any]) -> float:
    return statistics.fmean(row[token].logprob for token, row in zip(tokens, logprobs, strict=True))


def prefill_difference(llm: Any, prompts: list[list[int]], measured: Measured) -> float:
    """Largest difference between scores as generated and as a plain prefill of prompt and output gives them."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    requests = [{"prompt_token_ids": p + o} for p, o in zip(prompts, measured.outputs, strict=True)]
    scored = [r.prompt_logprobs for r in llm.generate(requests[:CHECKED], params, use_tqdm=False)]
    return max(
        abs(mean_log_prob(output, logprobs[len(prompt) :]) - score)
        for prompt, output, score, logprobs in zip(prompts, measured.outputs, measured.scores, scored, strict=False)
    )


def joined(parts: Sequence[Measured]) -> Measured:
    counts = {k: sum(part.counts[k] for part in parts) for k in COUNTERS}
    return Measured([o for p in parts for o in p.outputs], [s for p in parts for s in p.scores], counts)


def figures(own: Measured, lossless: Measured) -> dict[str, Any]:
    losses = [exact - score for exact, score in zip(lossless.scores, own.scores, strict=True)]
    return {
        "acceptance_length": own.counts["emitted"] / own.counts["verifications"],
        "promoted_share": own.counts["promoted"] / own.counts["emitted"],
        "target_log_prob": statistics.fmean(own.scores),
        "loss": statistics.fmean(losses),
        "loss_interval": interval(losses),
        "unchanged_outputs": statistics.fmean(a == b for a, b in zip(own.outputs, lossless.outputs, strict=True)),
    }


def half_of(half: str, own: dict[Group, Measured], lossless: dict[Group, Measured]) -> dict[str, Any]:
    """A setting's figures on one half, together and by kind of prompt."""
    groups = [(half, source) for source in SOURCES]
    return {
        **figures(joined([own[g] for g in groups]), joined([lossless[g] for g in groups])),
        "by_kind": {
            source: {
                **figures(own[half, source], lossless[half, source]),
                "counts": own[half, source].counts,
                "target_log_prob_by_prompt": own[half, source].scores,
            }
            for source in SOURCES
        },
    }


def choose(rows: Sequence[dict[str, Any]], limit: float) -> float:
    """The smallest kappa within the limit on the tuning half."""
    return min(r["kappa"] for r in rows if r["tuning"]["loss"] <= limit)


def main() -> None:
    options = arguments()
    content = header("quality.py", options)  # now: the revision that runs
    llm = start(
        dtype="float32",
        batch=options.batch,
        eager=True,
        kv_cache_bytes=4 << 30,  # branch blocks for every request of the batch
        num_speculative_tokens=8,
        tree_policy="adaptive",
        margin_threshold_floor=min(GRID),
    )
    ids = iter(prompt_ids(llm, options.prompts))
    by_source = {source: [next(ids) for _ in range(options.prompts)] for source in SOURCES}
    groups = {
        (half, source): by_source[source][i :: len(HALVES)] for i, half in enumerate(HALVES) for source in SOURCES
    }
    rows: list[dict[str, Any]] = []
    lossless: dict[Group, Measured] = {}
    for kappa in (1.0, *GRID):
        own = {group: measure(llm, prompts, kappa, options.max_tokens) for group, prompts in groups.items()}
        lossless = lossless or own
        row: dict[str, Any] = {"kappa": kappa}
        row |= {half: half_of(half, own, lossless) for half in HALVES}
        rows.append(row)
        for half in HALVES:
            f = row[half]
            print(
                f"kappa {kappa:<4g} {half:6}  "
                f"acceptance length {f['acceptance_length']:.2f}  promoted {100 * f['promoted_share']:.1f}%  "
                f"loss {f['loss']:+.3f} ({f['loss_interval'][0]:+.3f} to {f['loss_interval'][1]:+.3f})  "
                f"unchanged {100 * f['unchanged_outputs']:.0f}%",
                flush=True,
            )
    chosen = {"lossless": 1.0} | {name: choose(rows, limit) for name, limit in LIMITS.items()}
    print(chosen)
    checked = HALVES[0], SOURCES[-1]
    content |= {
        "rule": "a preset is the smallest kappa of the grid whose mean loss on the tuning half is at most its limit "
        "(loss: the lossless output's mean log-probability under the target minus the setting's, nats per token); "
        "the report half had no part in the choice",
        "grid": GRID,
        "limits": LIMITS,
        "presets": chosen,
        "prefill_difference": prefill_difference(llm, groups[checked], own[checked]),
        "prompts_by_half": {half: {source: len(groups[half, source]) for source in SOURCES} for half in HALVES},
        "rows": rows,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "quality.json").write_text(json.dumps(content, indent=1))
    plot(content, options.out / "quality.png")


def plot(content: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 6), layout="constrained")
    rows = content["rows"]
    tuning = [r["tuning"] for r in rows]
    axes.plot(
        [f["loss"] for f in tuning], [f["acceptance_length"] for f in tuning], "o--", color="0.7", label="tuning half"
    )
    report = [r["report"] for r in rows]
    losses, lengths = [f["loss"] for f in report], [f["acceptance_length"] for f in report]
    sides = [[abs(f["loss"] - f["loss_interval"][side]) for f in report] for side in (0, 1)]
    axes.errorbar(losses, lengths, xerr=sides, fmt="o-", elinewidth=0.6, capsize=2, label="report half, 95% intervals")
    names = {kappa: name for name, kappa in content["presets"].items()}
    for row, loss, length in zip(rows, losses, lengths, strict=True):
        axes.annotate(f"{row['kappa']:g}", (loss, length), textcoords="offset points", xytext=(5, 4))
    marked = [i for i, row in enumerate(rows) if row["kappa"] in names]
    axes.plot([losses[i] for i in marked], [lengths[i] for i in marked], "s", ms=9, color="C3", label="presets")
    for i in marked:
        axes.annotate(
            names[rows[i]["kappa"]],
            (losses[i], lengths[i]),
            textcoords="offset points",
            xytext=(-7, -13),
            ha="right",
            color="C3",
            weight="bold",
        )
    axes.set_xlabel("loss of log-probability under the target, nats per token (to the left: better)")
    axes.set_ylabel("acceptance length")
    axes.set_title("kappa: tokens per verification against quality")
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
