"""`adaptivespec bench`: no speculation, stock EAGLE-3 at its best K and AdaptiveSpec, by batch and prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from . import methods, report
from .engines import EngineSettings, EngineSpec, Run, alternate, intel_openmp, native_dtype, running
from .measure import Summary, summarise
from .models import demo_head, demo_target
from .prompts import SOURCES, Prompt, load_prompts
from .record import record, write

BASELINE = methods.no_speculation().name
# The best K is found on fewer rounds: neighbouring values differ by less than what the ladder is about.
SWEEP_ROUNDS = 1

Cell = tuple[str, int]  # kind of prompt, batch size


@dataclass(frozen=True)
class Plan:
    """Which prompts run at which batch sizes, how often and how long."""

    batches: Sequence[int]
    prompts: int
    max_tokens: int

    def cells(self) -> dict[Cell, list[Prompt]]:
        """Prompts of every cell: `prompts` of them, or two full batches where that is more."""
        return {
            (source, batch): load_prompts(source, max(self.prompts, 2 * batch if batch > 1 else 1))
            for source in SOURCES
            for batch in self.batches
        }


def best_stock(summaries: Sequence[Summary]) -> dict[Cell, str]:
    """Name of the fastest stock engine in every cell of a sweep."""
    best: dict[Cell, Summary] = {}
    for summary in summaries:
        cell = (summary.source, summary.batch)
        if summary.engine == BASELINE:
            continue
        if cell not in best or summary.tokens_per_second.median > best[cell].tokens_per_second.median:
            best[cell] = summary
    return {cell: summary.engine for cell, summary in best.items()}


def measure(
    name: str,
    specs: Sequence[EngineSpec],
    engines_of: Mapping[Cell, set[str]],
    plan: Plan,
    rounds: int,
    settings: EngineSettings,
    out: Path,
    console: Console,
) -> list[Summary]:
    """Run every cell on its engines; write NAME.json and NAME.png and show the table."""
    runs: list[Run] = []

    def announce(spec: EngineSpec, seconds: float | None) -> None:
        console.print(f"{spec.label}: " + ("starting ..." if seconds is None else f"started in {seconds:.0f} s"))

    cells = plan.cells()
    with running(specs, settings, out / "logs", announce) as engines:
        for (source, batch), prompts in cells.items():
            console.print(f"{name}: {source}, batch {batch}, {len(prompts)} prompts, {rounds} round(s)")
            taking_part = [engine for engine in engines if engine.spec.name in engines_of[source, batch]]
            runs.extend(
                alternate(taking_part, prompts, source=source, batch=batch, rounds=rounds, max_tokens=plan.max_tokens)
            )
    summaries = summarise(runs, BASELINE)
    prompts_used = list(dict.fromkeys(prompt for prompts in cells.values() for prompt in prompts))
    details: dict[str, Any] = {"max_tokens": plan.max_tokens, "rounds": rounds}
    content = record("bench", settings, engines, prompts_used, runs, summaries, details)
    write(content, out / f"{name}.json")
    report.plot(content, out / f"{name}.png")
    console.print(report.table(content))
    return summaries


def bench(
    *,
    out: Path,
    model: Path | None,
    head: Path | None,
    batches: Sequence[int],
    prompts: int,
    rounds: int,
    max_tokens: int,
    sweep: Sequence[int],
    kappas: Sequence[float],
    eager: bool,
    dtype: str,
    preload_openmp: bool,
) -> None:
    """Find stock EAGLE-3's best K in every cell, then measure it beside no speculation and AdaptiveSpec."""
    if (model is None) != (head is None):
        raise ValueError("--model and --head belong together: a head drafts for the one model it was trained on")
    console = Console()
    draft = head if head is not None else demo_head()
    settings = EngineSettings(
        model if model is not None else demo_target(),
        eager=eager,
        dtype=native_dtype() if dtype == "auto" else dtype,
        max_num_seqs=max(batches),
        preload=intel_openmp() if preload_openmp else None,
    )
    plan = Plan(batches, prompts, max_tokens)
    baseline = methods.no_speculation()
    stock = {spec.name: spec for spec in (methods.stock_eagle3(draft, k) for k in sweep)}
    suffix = "-intel-openmp" if preload_openmp else ""

    if len(stock) > 1:
        everyone = {baseline.name, *stock}
        summaries = measure(
            f"sweep{suffix}",
            [baseline, *stock.values()],
            dict.fromkeys(plan.cells(), everyone),
            plan,
            SWEEP_ROUNDS,
            settings,
            out,
            console,
        )
        best = best_stock(summaries)
    else:
        best = dict.fromkeys(plan.cells(), next(iter(stock)))

    own = [methods.adaptivespec(draft, kappa) for kappa in kappas]
    engines_of = {cell: {baseline.name, name, *(spec.name for spec in own)} for cell, name in best.items()}
    finalists = [spec for name, spec in stock.items() if name in best.values()]
    measure(f"ladder{suffix}", [baseline, *finalists, *own], engines_of, plan, rounds, settings, out, console)
