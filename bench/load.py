#!/usr/bin/env python3
"""Throughput against load: engines taking turns at fixed numbers of concurrent requests, then at a load that swings.

    python bench/load.py                        # measures; writes load.json and load.png
    python bench/load.py --plot load.json       # draws the record again

*Fixed load* is a closed loop: so many clients, each sending its next request when its last one is done. Every answer
is `--max-tokens` long, so every engine emits as many tokens in a turn; prefill counts. What a policy has learned
stays with its engine from turn to turn, as in a server.

*Swinging load* is an open loop: requests arrive when they do, quiet and busy phases taking turns, at rates that keep no
speculation at `--quiet` requests in a quiet phase and bring it to `--peak` by the end of a busy one, by the speeds
that were measured here. All engines get the same schedule.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import swing
from load_report import plot, tables
from load_turns import BASELINE, BIN_SECONDS, MIXED, SWINGING, Measured, Turn, fixed_summary, swing_summary, turn_of
from rich.console import Console

from vllm_adaptivespec.cli import methods
from vllm_adaptivespec.cli.engines import (
    SETTLE_SECONDS,
    Engine,
    EngineSettings,
    EngineSpec,
    native_dtype,
    running,
    turn_order,
)
from vllm_adaptivespec.cli.models import demo_head, demo_target
from vllm_adaptivespec.cli.prompts import Prompt, mixed_prompts
from vllm_adaptivespec.cli.record import record, write

RESULTS = Path(__file__).resolve().parent / "results" / "load"
METHODS = "none,stock-k1,stock-k2,stock-k3,stock-k5,tree-2-3-4,tree-3-4-8,adaptive,throughput"
PROMPTS = 120  # all there are of chat, and as many of HumanEval


def group(prompts: Sequence[Prompt], turn: int, size: int) -> list[str]:
    """Texts of one turn: the next `size` prompts, from the first again after the last."""
    return [prompts[(turn * size + index) % len(prompts)].text for index in range(size)]


def fixed_turn(engine: Engine, batch: int, round_: int, prompts: Sequence[Prompt], args: argparse.Namespace) -> Turn:
    """A closed loop of `batch` clients."""
    time.sleep(SETTLE_SECONDS)
    texts = group(prompts, round_, args.waves * batch)
    answer = engine.serve(texts, args.max_tokens, [0.0] * len(texts), limit=batch)
    submitted = [begin for begin, _, _ in answer["times"]]
    return turn_of(engine.spec.name, MIXED, batch, round_, submitted, answer)


def warm_up(engines: Sequence[Engine], batch: int, prompts: Sequence[Prompt], args: argparse.Namespace) -> None:
    """Unrecorded full turns on prompts of later rounds."""
    for turn in range(args.warmups):
        for engine in turn_order(engines, turn):
            fixed_turn(engine, batch, args.rounds + turn, prompts, args)


def fixed_load(
    engines: Sequence[Engine], batch: int, prompts: Sequence[Prompt], args: argparse.Namespace
) -> Iterator[Turn]:
    """Turns of all engines at one number of concurrent requests."""
    warm_up(engines, batch, prompts, args)
    for round_ in range(args.rounds):
        for engine in turn_order(engines, round_):
            yield fixed_turn(engine, batch, round_, prompts, args)


def calibrate(
    engines: Sequence[Engine], measured: Measured, prompts: Sequence[Prompt], args: argparse.Namespace
) -> None:
    """Measure what rates of arrivals need and fixed load has not told: no speculation, alone, quiet and at the peak.

    Without fixed load no engine has seen any load yet: then all are warmed up there.
    """
    baseline = next(engine for engine in engines if engine.spec.name == BASELINE)
    known = measured.service()
    wanted = {args.peak} if known else {1, max(args.peak // 4, 1), args.peak}
    for batch in sorted(wanted - known.keys()):
        warm_up([baseline] if known else engines, batch, prompts, args)
        measured.calibration.append(fixed_turn(baseline, batch, 0, prompts, args))


def swinging_load(
    engines: Sequence[Engine], measured: Measured, prompts: Sequence[Prompt], args: argparse.Namespace
) -> Iterator[Turn]:
    """Turns of all engines on the same arrivals, other ones in every round."""
    for round_ in range(args.swing_rounds):
        due = swing.arrivals(measured.phases, seed=args.seed + round_)
        texts = group(prompts, round_, len(due))
        for engine in turn_order(engines, round_):
            time.sleep(SETTLE_SECONDS)
            answer = engine.serve(texts, args.max_tokens, due)
            yield turn_of(engine.spec.name, SWINGING, args.peak, round_, due, answer)


def save(
    args: argparse.Namespace,
    settings: EngineSettings,
    engines: Sequence[Engine],
    prompts: Sequence[Prompt],
    measured: Measured,
) -> dict[str, Any]:
    """Write what there is so far and draw it."""
    chosen = ("batches", "rounds", "warmups", "waves", "max_tokens", "swing_rounds", "quiet", "peak", "phase", "cycles")
    details = {name: getattr(args, name) for name in (*chosen, "seed")}
    details["warm_up"] = "full turns at every batch size before its recorded ones; engines keep what they learned"
    content = record("load", settings, engines, prompts, [], [], details)
    content["summary"] = fixed_summary(measured.fixed)
    content["runs"] = [turn.entry() for turn in measured.fixed]
    content["calibration"] = [turn.entry() for turn in measured.calibration]
    content["swing"] = {
        "service": {str(batch): round(rate, 4) for batch, rate in measured.service().items()},
        "phases": [[phase.name, round(phase.seconds, 2), round(phase.rate, 4)] for phase in measured.phases],
        "bin_seconds": BIN_SECONDS,
    }
    content["swing_summary"] = swing_summary(measured.swinging)
    content["learned"] = {e.spec.name: learned for e in engines if (learned := e.stats().get("policy"))}
    content["swing_runs"] = [turn.entry() for turn in measured.swinging]
    write(content, args.out)
    if content["summary"] or content["swing_summary"]:
        plot(content, args.out.with_suffix(".png"))
    return content


def measure(args: argparse.Namespace) -> None:
    """Start the engines, run both measurements, write after each batch size and each swinging turn."""
    console = Console()
    head = args.head or demo_head()
    specs = [methods.by_name(head, name) for name in args.methods]
    settings = EngineSettings(
        args.model or demo_target(),
        eager=args.eager,
        dtype=native_dtype() if args.dtype == "auto" else args.dtype,
        max_model_len=1024,
        max_num_seqs=max(*args.batches, args.peak),
        kv_cache_mib=args.kv_cache_mib,
        block_size=args.block_size,
        **({} if args.threads is None else {"threads": args.threads}),
    )
    prompts = mixed_prompts(PROMPTS)
    measured = Measured()

    def announce(spec: EngineSpec, seconds: float | None) -> None:
        console.print(f"{spec.label}: " + ("starting ..." if seconds is None else f"started in {seconds:.0f} s"))

    def tell(turn: Turn) -> None:
        run = turn.run
        console.print(
            f"{run.source}, batch {run.batch}, round {run.round}: {run.engine:12s} "
            f"{turn.figures['tokens_per_busy_second']:7.1f} tok/s in {run.seconds:.1f} s, "
            f"{turn.figures['mean_concurrency']:.1f} at once"
        )

    with running(specs, settings, args.out.parent / "logs", announce) as engines:
        for batch in args.batches if args.rounds else ():
            for turn in fixed_load(engines, batch, prompts, args):
                measured.fixed.append(turn)
                tell(turn)
            save(args, settings, engines, prompts, measured)
        if args.swing_rounds:
            calibrate(engines, measured, prompts, args)
            measured.phases = swing.swinging(
                measured.service(), quiet=args.quiet, peak=args.peak, seconds=args.phase, cycles=args.cycles
            )
            console.print(*(f"{p.name} {p.seconds:.0f} s at {p.rate:.2f}/s;" for p in measured.phases))
            for turn in swinging_load(engines, measured, prompts, args):
                measured.swinging.append(turn)
                tell(turn)
                save(args, settings, engines, prompts, measured)
        content = save(args, settings, engines, prompts, measured)
    for made in tables(content):
        console.print(made)


def numbers(text: str) -> list[int]:
    """`1,2,4`."""
    return [int(part) for part in text.split(",")]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--plot", type=Path, metavar="FILE.json", help="draw this record again and measure nothing")
    made.add_argument("--out", type=Path, default=RESULTS / "load.json")
    made.add_argument("--model", type=Path, help="folder of the target; by default the demo's models")
    made.add_argument("--head", type=Path, help="folder of its EAGLE-3 head")
    made.add_argument("--methods", type=lambda text: text.split(","), default=METHODS)
    made.add_argument("--batches", type=numbers, default="1,2,4,8,16,32")
    made.add_argument("--rounds", type=int, default=5, help="of fixed load; 0: none of it")
    made.add_argument("--warmups", type=int, default=1, help="unrecorded turns per engine and batch")
    made.add_argument("--waves", type=int, default=2, help="requests of a turn and client: with more the tail is less")
    made.add_argument("--max-tokens", type=int, default=64)
    made.add_argument("--swing-rounds", type=int, default=2, help="of swinging load; 0: none of it")
    made.add_argument("--quiet", type=float, default=1.0, help="requests at once in a quiet phase")
    made.add_argument("--peak", type=int, default=32, help="requests at once at the end of a busy phase")
    made.add_argument("--phase", type=float, default=20.0, help="seconds of a quiet or a busy phase")
    made.add_argument("--cycles", type=int, default=2)
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--eager", action="store_true")
    made.add_argument("--dtype", default="auto", help="auto: bfloat16 where the CPU multiplies in it, else float32")
    made.add_argument("--threads", type=int, help="cores of an engine; by default all")
    made.add_argument("--kv-cache-mib", type=int, default=512, help="of each engine")
    made.add_argument(
        "--block-size",
        type=int,
        default=32,
        help="of the KV cache, a tenth of which is for trees: vLLM's 128 tokens a block leave a small one few of them",
    )
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    options = parser()
    args = options.parse_args(arguments)
    if args.plot is not None:
        content = json.loads(args.plot.read_text(encoding="utf-8"))
        plot(content, args.plot.with_suffix(".png"))
        for made in tables(content):
            Console().print(made)
        return
    if (args.model is None) != (args.head is None):
        options.error("--model and --head belong together: a head drafts for the one model it was trained on")
    if BASELINE not in args.methods:
        options.error(f"--methods needs {BASELINE!r}: it is what all ratios are to")
    measure(args)


if __name__ == "__main__":
    main()
