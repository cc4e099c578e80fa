"""`adaptivespec demo`: twenty real prompts, four engines, one table and a plot."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from . import methods, report
from .engines import EngineSettings, EngineSpec, alternate, native_dtype, running
from .measure import summarise
from .models import demo_head, demo_target
from .prompts import mixed_prompts
from .record import record, write

STOCK_DRAFT_TOKENS = 3


def demo(
    model: Path | None, head: Path | None, prompts: int, max_tokens: int, eager: bool, dtype: str, out: Path
) -> None:
    """Compare no speculation, stock EAGLE-3 and AdaptiveSpec at kappa 1 and 0.3; write demo.json and demo.png."""
    if (model is None) != (head is None):
        raise ValueError("--model and --head belong together: a head drafts for the one model it was trained on")
    console = Console()
    if model is None:
        console.print("Preparing the demo's model (converted once, then kept in the cache) ...")
    target = model if model is not None else demo_target()
    draft = head if head is not None else demo_head()
    chosen = mixed_prompts(prompts)
    settings = EngineSettings(target, eager=eager, dtype=native_dtype() if dtype == "auto" else dtype)
    specs = [
        methods.no_speculation(),
        methods.stock_eagle3(draft, STOCK_DRAFT_TOKENS),
        methods.adaptivespec(draft),
        methods.adaptivespec(draft, methods.LOSSY_KAPPA),
    ]
    runs = []
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    ) as progress:
        starting = progress.add_task("starting engines", total=len(specs))

        def announce(spec: EngineSpec, seconds: float | None) -> None:
            if seconds is None:
                hint = "" if eager else " (compiling, up to two minutes)"
                progress.update(starting, description=f"starting: {spec.label}{hint}")
            else:
                progress.advance(starting)
                progress.console.print(f"started in {seconds:.0f} s: {spec.label}")

        with running(specs, settings, out / "logs", announce) as engines:
            progress.update(starting, description="engines started")
            generating = progress.add_task("generating", total=len(specs) * len(chosen))
            for run in alternate(engines, chosen, source="mixed", batch=1, rounds=1, max_tokens=max_tokens):
                runs.append(run)
                progress.advance(generating)
    content = record(
        "demo",
        settings,
        engines,
        chosen,
        runs,
        summarise(runs, baseline=specs[0].name),
        {"max_tokens": max_tokens, "head": draft},
    )
    write(content, out / "demo.json")
    report.plot(content, out / "demo.png")
    console.print(report.table(content))
    console.print(report.FOOTNOTE, style="dim")
    console.print(f"Written: {out / 'demo.json'}, {out / 'demo.png'}; logs of the engines in {out / 'logs'}")
