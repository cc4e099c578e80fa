#!/usr/bin/env python3
"""What kappa costs: acceptance length against the target's own opinion of the text, kappa by kappa.

One engine; every setting generates for the same held-out prompts, greedily, and the target then scores all outputs in
plain prefills. Nothing is timed. Writes bench/results/quality.json and quality.png (acceptance length against
log-probability).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_adaptivespec.cli.models import demo_head, demo_target
from vllm_adaptivespec.cli.prompts import SOURCES, load_prompts
from vllm_adaptivespec.cli.record import git_revision, machine, portable, versions

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


def start(options: argparse.Namespace) -> Any:
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1")
    os.environ.update(VLLM_NO_USAGE_STATS="1")
    from vllm import LLM

    return LLM(
        model=str(demo_target()),
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=options.batch,
        max_num_batched_tokens=1024,
        kv_cache_memory_bytes=1 << 30,
        enforce_eager=True,
        distributed_executor_backend="uni",
        speculative_config={
            "method": "adaptivespec",
            "model": str(demo_head()),
            "num_speculative_tokens": 8,
            "margin_threshold_floor": min(kappa for kappa, _ in SETTINGS),
        },
    )


def target_log_probs(llm: Any, prompt: list[int], output: list[int]) -> list[float]:
    """Log-probability of every output token under the target, given what comes before it."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    scored = llm.generate([{"prompt_token_ids": prompt + output}], params, use_tqdm=False)[0].prompt_logprobs
    return [scored[len(prompt) + i][token].logprob for i, token in enumerate(output)]


def main() -> None:
    options = arguments()
    llm = start(options)
    from vllm import SamplingParams

    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    config = runner.adaptivespec
    tokenizer = llm.get_tokenizer()
    prompts = [
        list(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": p.text}], add_generation_prompt=True, return_dict=False
            )
        )
        for source in SOURCES
        for p in load_prompts(source, options.prompts)
    ]
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
        "command": portable(["bench/quality.py", *sys.argv[1:]]),
        "git": git_revision(),
        "versions": versions(),
        "machine": machine(),
        "options": {k: v for k, v in vars(options).items() if k != "out"},
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
