#!/usr/bin/env python3
"""What kappa costs: acceptance length against the target's own opinion of the text, kappa by kappa.

One engine; every setting generates for the same held-out prompts, greedily, and the target then scores all outputs in
plain prefills. Nothing is timed. Writes bench/results/quality.json and quality.png (acceptance length against
log-probability).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from inprocess import header, prompt_ids, runner_of, start

SETTINGS: tuple[tuple[float, int | None], ...] = (
    (1.0, None),
    (0.7, None),
    (0.5, None),
    (0.3, None),
    (0.3, 1),
    (0.2, None),
    (0.1, None),
    (0.1, 1),
)
"""kappa, and promotions allowed in a step."""
RESAMPLES = 2000


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=int, default=8, help="of each kind")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    return parser.parse_args()


def interval(values: list[float], seed: int = 0) -> tuple[float, float]:
    """95% bootstrap interval of the mean over prompts."""
    rng = random.Random(seed)
    means = sorted(statistics.fmean(rng.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return means[int(0.025 * RESAMPLES)], means[int(0.975 * RESAMPLES)]


def target_log_probs(llm: Any, prompt: list[int], output: list[int]) -> list[float]:
    """Log-probability of every output token under the target, given what comes before it."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    scored = llm.generate([{"prompt_token_ids": prompt + output}], params, use_tqdm=False)[0].prompt_logprobs
    return [scored[len(prompt) + i][token].logprob for i, token in enumerate(output)]


def main() -> None:
    options = arguments()
    llm = start(
        dtype="float32",
        batch=options.batch,
        eager=True,
        num_speculative_tokens=8,
        margin_threshold_floor=min(kappa for kappa, _ in SETTINGS),
    )
    from vllm import SamplingParams

    runner = runner_of(llm)
    config = runner.adaptivespec
    prompts = prompt_ids(llm, options.prompts)
    rows: list[dict[str, Any]] = []
    lossless: list[list[int]] = []
    for kappa, promotions in SETTINGS:
        runner.adaptivespec = replace(config, max_promotions_per_step=promotions)
        before = runner.stats.as_dict()
        params = SamplingParams(
            temperature=0, max_tokens=options.max_tokens, extra_args={"adaptivespec_margin_threshold": kappa}
        )
        requests = [{"prompt_token_ids": p} for p in prompts]
        outputs = [list(o.outputs[0].token_ids) for o in llm.generate(requests, params, use_tqdm=False)]
        after = runner.stats.as_dict()
        counts = {k: after[k] - before[k] for k in ("verifications", "promoted", "emitted", "drafted", "accepted")}
        lossless = lossless or outputs
        means = [statistics.fmean(target_log_probs(llm, p, o)) for p, o in zip(prompts, outputs, strict=True) if o]
        row = {
            "kappa": kappa,
            "max_promotions_per_step": promotions,
            "acceptance_length": counts["emitted"] / counts["verifications"],
            "promoted_per_step": counts["promoted"] / counts["verifications"],
            "promoted_share": counts["promoted"] / counts["emitted"],
            "target_log_prob": statistics.fmean(means),
            "target_log_prob_interval": interval(means),
            "unchanged_outputs": sum(a == b for a, b in zip(outputs, lossless, strict=True)) / len(outputs),
            "counts": counts,
            "target_log_prob_by_prompt": means,
        }
        rows.append(row)
        low, high = row["target_log_prob_interval"]
        print(
            f"kappa {kappa:<5g} promotions {promotions or 'any'!s:4} "
            f"acceptance length {row['acceptance_length']:.2f}  "
            f"promoted/step {row['promoted_per_step']:.3f}  target log-prob {row['target_log_prob']:.3f} "
            f"({low:.3f} to {high:.3f})  unchanged {100 * row['unchanged_outputs']:.0f}%",
            flush=True,
        )
    options.out.mkdir(parents=True, exist_ok=True)
    content = {
        **header("quality.py", options),
        "num_prompts": len(prompts),
        "rows": rows,
    }
    (options.out / "quality.json").write_text(json.dumps(content, indent=1))
    plot(rows, options.out / "quality.png")


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    for promotions, label in ((None, "any number of promotions a step"), (1, "one promotion a step at most")):
        own = [r for r in rows if r["max_promotions_per_step"] == promotions or r["kappa"] == 1.0]
        axes.plot([r["target_log_prob"] for r in own], [r["acceptance_length"] for r in own], "o-", label=label)
        for row in own if promotions is None else []:
            axes.annotate(
                f"{row['kappa']:g}",
                (row["target_log_prob"], row["acceptance_length"]),
                textcoords="offset points",
                xytext=(5, 4),
            )
    axes.set_xlabel("mean log-probability of the output under the target (right: better)")
    axes.set_ylabel("acceptance length")
    axes.set_title("kappa: tokens per verification against quality")
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
