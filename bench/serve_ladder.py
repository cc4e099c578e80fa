#!/usr/bin/env python3
"""The ladder on a server: no speculation, stock EAGLE-3, then AdaptiveSpec step by step, by load and with accuracy.

On a machine with a GPU, in an environment with vLLM and this package:

    python bench/serve_ladder.py run --pair llama-3.1-8b          # speeds, at every load
    python bench/serve_ladder.py accuracy --pair llama-3.1-8b     # GSM8K, MATH-500, HumanEval with lm-eval
    python bench/serve_ladder.py plot --pair llama-3.1-8b

Every measured cell is a file of its own, so that a run that was cut off goes on where it stopped when started again.
Rounds are outermost: each method is measured once before any is measured again. Load comes from vLLM's own
``vllm bench serve``; nothing is timed here.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_adaptivespec.cli.models import demo_head, demo_target
from vllm_adaptivespec.cli.prompts import mixed_prompts
from vllm_adaptivespec.cli.record import git_revision, machine, portable, versions, write

RESULTS = Path(__file__).resolve().parent / "results" / "serve"
LOADS = (1, 2, 4, 8, 16, 32, 64)
BASELINE = "none"
TASKS = ("gsm8k_cot", "hendrycks_math500", "humaneval_instruct")
START_SECONDS = 1800


@dataclass(frozen=True)
class Pair:
    """A target and its public EAGLE-3 head, as `vllm serve` takes them."""

    target: str
    head: str


PAIRS = {
    "llama-3.1-8b": Pair("meta-llama/Llama-3.1-8B-Instruct", "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"),
    "qwen3-8b": Pair("Qwen/Qwen3-8B", "Tengyunw/qwen3_8b_eagle3"),
    "deepseek-r1-llama-8b": Pair(
        "deepseek-ai/DeepSeek-R1-Distill-Llama-8B", "yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B"
    ),
}


def pair_of(name: str) -> Pair:
    """A pair by name; `smollm2` is the demo's, on disk."""
    if name == "smollm2":
        return Pair(str(demo_target()), str(demo_head()))
    return PAIRS[name]


def methods(head: str) -> dict[str, dict[str, Any] | None]:
    """The ladder: speculative_config by name. All of AdaptiveSpec's share one cap of drafted nodes."""
    stock = {f"stock-k{k}": {"method": "eagle3", "model": head, "num_speculative_tokens": k} for k in (2, 3, 5)}
    chain = {"low_confidence_shape": [2, 1, 2], "high_confidence_shape": [5, 1, 5]}
    ours = {"method": "adaptivespec", "model": head, "num_speculative_tokens": 8}
    margin = {"margin_threshold": 0.3}
    return {
        BASELINE: None,
        **stock,
        "chain-strict": {**ours, **chain},
        "tree-strict": ours,
        "chain-margin": {**ours, **chain, **margin},
        "tree-margin": {**ours, **margin},
        # From vLLM 0.33 on, and not on CPUs: its own lossy rule.
        "fly-k3": {**stock["stock-k3"], "rejection_sample_method": "fly"},
    }


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@contextlib.contextmanager
def server(pair: Pair, config: dict[str, Any] | None, extra: Sequence[str], log: Path) -> Iterator[str]:
    """`vllm serve` while the block runs; yields its address.

    Raises:
        RuntimeError: it ended or did not answer; with the end of its log.
    """
    port = free_port()
    command = [vllm_command(), "serve", pair.target, "--port", str(port), "--served-model-name", "target", *extra]
    if config is not None:
        command += ["--speculative-config", json.dumps(config)]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"vllm serve did not start; {log} ends with\n{log.read_text()[-2000:]}")
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            time.sleep(1)
        yield url
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def vllm_command() -> str:
    """The `vllm` beside this Python."""
    return str(Path(sys.executable).parent / "vllm")


COUNTERS = {
    "drafts": "vllm:spec_decode_num_drafts_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
}


def counters(url: str) -> dict[str, float]:
    """VLLM's own counts of speculation; zero where there is none."""
    text = urllib.request.urlopen(f"{url}/metrics", timeout=30).read().decode()
    values = dict.fromkeys(COUNTERS, 0.0)
    for line in text.splitlines():
        for name, metric in COUNTERS.items():
            if line.startswith(metric + "{"):
                values[name] += float(line.rsplit(" ", 1)[1])
    return values


def load_command(
    url: str, pair: Pair, dataset: Path, load: int, num_prompts: int, max_tokens: int, out: Path
) -> list[str]:
    """`vllm bench serve` for one cell: greedy, as many requests at once as the load says."""
    return [
        vllm_command(),
        *("bench", "serve", "--backend", "openai-chat", "--endpoint", "/v1/chat/completions"),
        *("--base-url", url, "--model", "target", "--tokenizer", pair.target),
        *("--dataset-name", "custom", "--dataset-path", str(dataset), "--custom-output-len", str(max_tokens)),
        *("--num-prompts", str(num_prompts), "--max-concurrency", str(load), "--temperature", "0", "--seed", "0"),
        *("--num-warmups", str(load), "--disable-tqdm", "--save-result"),
        *("--result-dir", str(out.parent), "--result-filename", out.name),
    ]


def cell_file(out: Path, method: str, round_: int, load: int) -> Path:
    """Where a cell's figures are."""
    return out / "cells" / f"{method}-round{round_}-load{load}.json"


KEPT = (
    "output_throughput",
    "mean_ttft_ms",
    "median_ttft_ms",
    "mean_tpot_ms",
    "median_tpot_ms",
    "p99_tpot_ms",
    "duration",
    "completed",
    "total_output_tokens",
)
"""Of what ``vllm bench serve`` writes."""


def run(args: argparse.Namespace) -> None:
    """Measure all cells that are not there yet, then write the record and the plot."""
    out, pair = args.out / args.pair, pair_of(args.pair)
    ladder = {name: config for name, config in methods(pair.head).items() if name in args.methods}
    dataset = out / "prompts.jsonl"
    dataset.parent.mkdir(parents=True, exist_ok=True)
    most = max(args.prompts, 2 * max(args.loads))
    prompts = mixed_prompts(min(most, 120))
    dataset.write_text("".join(json.dumps({"prompt": prompt.text}) + "\n" for prompt in prompts))
    for round_ in range(args.rounds):
        for name, config in ladder.items():
            missing = [load for load in args.loads if not cell_file(out, name, round_, load).exists()]
            if not missing:
                continue
            print(f"round {round_}: {name}, loads {missing}", flush=True)
            with server(pair, config, args.serve_args, out / "logs" / f"{name}.log") as url:
                for load in missing:
                    measure(args, out, pair, dataset, url, name, round_, load)
    collect(args)


def measure(
    args: argparse.Namespace, out: Path, pair: Pair, dataset: Path, url: str, name: str, round_: int, load: int
) -> None:
    """One cell. Its file appears only when it is complete."""
    path = cell_file(out, name, round_, load)
    raw = path.with_suffix(".raw")
    path.parent.mkdir(parents=True, exist_ok=True)
    num_prompts = max(args.prompts, 2 * load)
    before = counters(url)
    subprocess.run(load_command(url, pair, dataset, load, num_prompts, args.max_tokens, raw), check=True)
    after = counters(url)
    result = json.loads(raw.read_text())
    if result["completed"] != num_prompts:
        raise RuntimeError(f"{name} at load {load}: {result['completed']} of {num_prompts} requests came back")
    drafts, accepted = (after[k] - before[k] for k in COUNTERS)
    cell = {
        "method": name,
        "round": round_,
        "load": load,
        **{key: result[key] for key in KEPT if key in result},
        "acceptance_length": 1 + accepted / drafts if drafts else None,
    }
    raw.unlink()
    path.write_text(json.dumps(cell))


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and extremes."""
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def summary(cells: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By method and load: throughput, its ratio to no speculation in the same round, acceptance length."""
    base = {(c["round"], c["load"]): c["output_throughput"] for c in cells if c["method"] == BASELINE}
    rows = []
    for method, load in dict.fromkeys((c["method"], c["load"]) for c in cells):
        own = [c for c in cells if (c["method"], c["load"]) == (method, load)]
        ratios = [c["output_throughput"] / base[c["round"], load] for c in own if (c["round"], load) in base]
        lengths = [c["acceptance_length"] for c in own if c["acceptance_length"] is not None]
        rows.append(
            {
                "method": method,
                "load": load,
                "rounds": len(own),
                "tokens_per_second": spread([c["output_throughput"] for c in own]),
                "ratio": spread(ratios) if ratios else None,
                "acceptance_length": statistics.median(lengths) if lengths else None,
                "median_tpot_ms": spread([c["median_tpot_ms"] for c in own]),
            }
        )
    return rows


def accelerator() -> str | None:
    """The GPU's name, None where there is none."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def collect(args: argparse.Namespace) -> None:
    """Make one record of all cells, and draw it."""
    out, pair = args.out / args.pair, pair_of(args.pair)
    cells = [json.loads(p.read_text()) for p in sorted((out / "cells").glob("*.json"))]
    content = {
        "kind": "serve-ladder",
        "pair": portable({"target": pair.target, "head": pair.head}),
        "revision": git_revision(),
        "versions": versions(),
        "machine": {**machine(), "accelerator": accelerator()},
        "methods": portable(methods(pair.head)),
        "serve_args": args.serve_args,
        "max_tokens": args.max_tokens,
        "summary": summary(cells),
        "cells": cells,
    }
    write(content, out / "ladder.json")
    plot(args)


def plot(args: argparse.Namespace) -> None:
    """Draw the record: ratio to no speculation over load, and acceptance length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    path = args.out / args.pair / "ladder.json"
    content = json.loads(path.read_text())
    figure, (ratio, length) = pyplot.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for method in dict.fromkeys(row["method"] for row in content["summary"]):
        rows = sorted((r for r in content["summary"] if r["method"] == method and r["ratio"]), key=lambda r: r["load"])
        loads = [r["load"] for r in rows]
        medians = [r["ratio"]["median"] for r in rows]
        errors = [
            [m - r["ratio"]["low"] for m, r in zip(medians, rows, strict=True)],
            [r["ratio"]["high"] - m for m, r in zip(medians, rows, strict=True)],
        ]
        ratio.errorbar(loads, medians, yerr=errors, marker="o", capsize=2, label=method)
        lengths = [r["acceptance_length"] or 1.0 for r in rows]
        length.plot(loads, lengths, marker="o")
    for axis, title in ((ratio, "output tokens/s, times no speculation"), (length, "acceptance length")):
        axis.set_xscale("log", base=2)
        axis.set_xlabel("requests at once")
        axis.set_title(title, fontsize=10)
    ratio.legend(fontsize=8)
    where = content["machine"]
    figure.suptitle(
        f"{content['pair']['target']}, vLLM {content['versions'].get('vllm', '?')}, "
        f"{where['accelerator'] or where['cpu']}",
        fontsize=9,
    )
    figure.savefig(path.with_suffix(".png"), dpi=140)
    print(path.with_suffix(".png"))


def accuracy_command(url: str, tasks: Sequence[str], limit: int | None, out: Path) -> list[str]:
    """lm-eval against the server, greedy."""
    model = f"model=target,base_url={url}/v1/chat/completions,num_concurrent=32,max_retries=3,tokenized_requests=False"
    command = [
        *(sys.executable, "-m", "lm_eval", "--model", "local-chat-completions", "--model_args", model),
        *("--tasks", ",".join(tasks), "--apply_chat_template", "--gen_kwargs", "temperature=0"),
        *("--output_path", str(out), "--log_samples", "--confirm_run_unsafe_code"),
    ]
    return command if limit is None else [*command, "--limit", str(limit)]


def accuracy(args: argparse.Namespace) -> None:
    """Run lm-eval on every method that has no results yet."""
    out, pair = args.out / args.pair, pair_of(args.pair)
    for name, config in methods(pair.head).items():
        done = out / "accuracy" / name
        if name not in args.methods or (done / "complete").exists():
            continue
        with server(pair, config, args.serve_args, out / "logs" / f"{name}-accuracy.log") as url:
            environment = {**os.environ, "HF_ALLOW_CODE_EVAL": "1"}
            subprocess.run(accuracy_command(url, args.tasks, args.limit, done), check=True, env=environment)
        (done / "complete").touch()


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("what", choices=("run", "accuracy", "plot"))
    made.add_argument("--pair", choices=("smollm2", *PAIRS), required=True)
    made.add_argument("--out", type=Path, default=RESULTS)
    made.add_argument("--methods", nargs="+", default=[n for n in methods("") if n != "fly-k3"], choices=methods(""))
    made.add_argument("--loads", nargs="+", type=int, default=LOADS)
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--prompts", type=int, default=32, help="requests per cell, or twice the load where that is more")
    made.add_argument("--max-tokens", type=int, default=256)
    made.add_argument("--tasks", nargs="+", default=TASKS)
    made.add_argument("--limit", type=int, help="questions of each task; all if not given")
    made.add_argument("--serve-args", nargs=argparse.REMAINDER, default=[], help="last: further options of vllm serve")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    args = parser().parse_args(arguments)
    args.out = args.out.resolve()
    {"run": run, "accuracy": accuracy, "plot": plot}[args.what](args)


if __name__ == "__main__":
    main()
