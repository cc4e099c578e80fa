#!/usr/bin/env python3
"""What one step costs, and which tree shapes pay: one engine, its policy switched from turn to turn.

Writes bench/results/steps-DTYPE-bB.json. Times are means per step, each without the parts inside it: the target's pass,
the draft's passes and logits, vLLM's first draft pass around them, and our own parts. `--eager` skips compilation.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from inprocess import header, prompt_ids, runner_of, start

from vllm_adaptivespec.cli.engines import native_dtype
from vllm_adaptivespec.config import AdaptiveSpecConfig
from vllm_adaptivespec.core.policy import AdaptivePolicy, StaticPolicy, TreePolicy, TreeShape

SHAPES: dict[str, Any] = {
    "chain 2": (2, 1, 2),
    "chain 3": (3, 1, 3),
    "(1, 3, 3)": (1, 3, 3),
    "(2, 2, 3)": (2, 2, 3),
    "(2, 3, 4)": (2, 3, 4),
    "(2, 3, 6)": (2, 3, 6),
    "(3, 3, 5)": (3, 3, 5),
    "(3, 4, 8)": (3, 4, 8),
    "adaptive (3, 4, 3)-(7, 1, 7)": ((3, 4, 3), (7, 1, 7)),  # the paper's
    "adaptive (3, 4, 6)-(7, 1, 7)": ((3, 4, 6), (7, 1, 7)),
    "adaptive (3, 4, 8)-(5, 3, 8)": ((3, 4, 8), (5, 3, 8)),
    "adaptive (2, 4, 6)-(5, 3, 8)": ((2, 4, 6), (5, 3, 8)),
}

# Part of a step -> the methods it is the sum of.
PARTS = {
    "target pass": ["runner:_model_forward"],
    "draft passes": ["drafter.model:forward", "drafter.model:combine_hidden_states"],
    "draft logits": ["drafter:_children"],
    "vLLM's first draft pass": ["drafter:propose"],
    "own: growth": ["drafter:_start", "drafter:_grow", "drafter:_finish"],
    "own: staging": ["runner:_get_slot_mappings", "runner:_split_by_path"],
    "own: acceptance": ["sampler:forward"],
    "own: commit": ["runner:_commit"],
}


class Clock:
    """Seconds spent in parts of a step, by wrapping methods of live objects; a part inside another counts once."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.inside: list[float] = []
        """Of each watched call in progress, the time spent in watched calls inside it."""

    def watch(self, part: str, owner: Any, name: str) -> None:
        method = getattr(owner, name)

        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self.inside.append(0.0)
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                total = time.perf_counter() - start
                self.seconds[part] += total - self.inside.pop()
                if self.inside:
                    self.inside[-1] += total

        setattr(owner, name, timed)

    def take(self) -> dict[str, float]:
        taken, self.seconds = dict(self.seconds), defaultdict(float)
        return taken


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dtype", default=native_dtype())
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=6, help="of each kind")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shapes", default="", help="comma-free names separated by ';', default all")
    parser.add_argument("--kappa", type=float, default=1.0)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--suffix", default="", help="goes to the end of the file's name")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    return parser.parse_args()


def policy(shape: Any) -> TreePolicy:
    if isinstance(shape[0], int):
        return StaticPolicy(TreeShape(*shape))
    low, high = shape
    return AdaptivePolicy(TreeShape(*low), TreeShape(*high), AdaptiveSpecConfig.confidence_scale)


def main() -> None:
    options = arguments()
    llm = start(
        dtype=options.dtype,
        batch=options.batch,
        eager=options.eager,
        num_speculative_tokens=16,
        margin_threshold=options.kappa,
        tree_policy="adaptive",
    )
    from vllm import SamplingParams

    runner = runner_of(llm)
    places = {
        "runner": runner,
        "drafter": runner.drafter,
        "drafter.model": runner.drafter.model,
        "sampler": runner.rejection_sampler,
    }
    clock = Clock()
    for part, methods in PARTS.items():
        for method in methods:
            place, name = method.split(":")
            clock.watch(part, places[place], name)
    names = options.shapes.split(";") if options.shapes else list(SHAPES)
    policies = {name: policy(SHAPES[name]) for name in names}
    prompts = [{"prompt_token_ids": ids} for ids in prompt_ids(llm, options.prompts)]
    groups = [prompts[i : i + options.batch] for i in range(0, len(prompts), options.batch)]
    sampling = SamplingParams(temperature=0, max_tokens=options.max_tokens)
    llm.generate(groups[0], sampling, use_tqdm=False)  # warm
    turns: list[dict[str, Any]] = []
    for turn in range(options.rounds):
        order = names if turn % 2 == 0 else names[::-1]
        for group_index, group in enumerate(groups):
            for name in order:
                runner.policy = policies[name]
                llm.reset_prefix_cache()
                before = runner.stats.as_dict()
                clock.take()
                begin = time.perf_counter()
                outputs = llm.generate(group, sampling, use_tqdm=False)
                seconds = time.perf_counter() - begin
                after = runner.stats.as_dict()
                delta = {
                    k: after[k] - before[k] for k in ("verifications", "drafted", "accepted", "promoted", "emitted")
                }
                tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
                turns.append(
                    {
                        "shape": name,
                        "round": turn,
                        "group": group_index,
                        "seconds": seconds,
                        "tokens": tokens,
                        "parts": clock.take(),
                        **delta,
                    }
                )
                print(".", end="", flush=True)
    print()
    report(options, names, turns)


def own_time(turns: list[dict[str, Any]], steps: float) -> float:
    """Milliseconds per step in the plugin's own work, the models' passes and vLLM's own left out."""
    return 1000 * sum(v for t in turns for part, v in t["parts"].items() if part.startswith("own")) / steps


def report(options: argparse.Namespace, names: list[str], turns: list[dict[str, Any]]) -> None:
    rows = []
    for name in names:
        own = [t for t in turns if t["shape"] == name]
        total = {
            k: sum(t[k] for t in own) for k in ("verifications", "drafted", "promoted", "emitted", "tokens", "seconds")
        }
        rates = [
            sum(t["tokens"] for t in own if t["round"] == r) / sum(t["seconds"] for t in own if t["round"] == r)
            for r in range(options.rounds)
        ]
        steps = total["verifications"] / options.batch
        rows.append(
            {
                "shape": name,
                "tokens_per_second": {"median": statistics.median(rates), "min": min(rates), "max": max(rates)},
                "acceptance_length": total["emitted"] / total["verifications"],
                "nodes_per_verification": total["drafted"] / total["verifications"],
                "promoted_per_verification": total["promoted"] / total["verifications"],
                "ms_per_step": 1000 * total["seconds"] / steps,
                "own_ms_per_step": own_time(own, steps),
                "parts_ms_per_step": {
                    part: 1000 * sum(t["parts"].get(part, 0.0) for t in own) / steps for part in PARTS
                },
            }
        )
    for row in rows:
        parts = " ".join(f"{p}={v:.1f}" for p, v in row["parts_ms_per_step"].items())
        print(
            f"{row['shape']:28s} {row['tokens_per_second']['median']:6.1f} tok/s  AL {row['acceptance_length']:.2f}  "
            f"nodes {row['nodes_per_verification']:.1f}  {row['ms_per_step']:.1f} ms/step  "
            f"own {row['own_ms_per_step']:.1f}  {parts}"
        )
    result = {
        **header("steps.py", options),
        "preload": Path(os.environ.get("LD_PRELOAD", "")).name or None,
        "rows": rows,
        "turns": turns,
    }
    options.out.mkdir(parents=True, exist_ok=True)
    mode = ("-eager" if options.eager else "") + options.suffix
    path = options.out / f"steps-{options.dtype}-b{options.batch}{mode}.json"
    path.write_text(json.dumps(result, indent=1))
    print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
