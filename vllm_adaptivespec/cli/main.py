"""The `adaptivespec` command. Only typer is imported here: a command imports what it needs when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Adaptive draft trees and the margin rule: speculative decoding for stock vLLM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Model = Annotated[
    Path | None, typer.Option(exists=True, file_okay=False, resolve_path=True, help="Folder of the target model.")
]
Head = Annotated[
    Path | None, typer.Option(exists=True, file_okay=False, resolve_path=True, help="Folder of its EAGLE-3 head.")
]
Eager = Annotated[bool, typer.Option("--eager", help="Do not compile: engines start in 25 s, and run slower.")]
Dtype = Annotated[
    str, typer.Option(help="bfloat16, float32, ... or auto: bfloat16 where the CPU multiplies in it, else float32.")
]
MaxTokens = Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")]


@app.command()
def demo(
    model: Model = None,
    head: Head = None,
    prompts: Annotated[int, typer.Option(min=2, help="Number of prompts, half HumanEval, half chat.")] = 20,
    max_tokens: MaxTokens = 96,
    eager: Eager = False,
    dtype: Dtype = "auto",
    out: Annotated[Path, typer.Option(help="Folder for the JSON, the plot and the engines' logs.")] = Path("demo-out"),
) -> None:
    """Compare no speculation, stock EAGLE-3 and AdaptiveSpec on real prompts, on this machine."""
    from .demo import demo as run
    from .engines import EngineError

    try:
        run(model, head, prompts, max_tokens, eager, dtype, out)
    except (EngineError, FileNotFoundError, ValueError) as error:
        raise fail(error) from None


@app.command()
def bench(
    out: Annotated[Path, typer.Option(help="Folder for the JSON and the plot.")],
    model: Model = None,
    head: Head = None,
    batches: Annotated[str, typer.Option(help="Batch sizes, comma-separated.")] = "1,4,16",
    prompts: Annotated[
        int, typer.Option(min=1, help="Prompts per source at batch 1; at larger ones two full batches, if more.")
    ] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, for medians and spread.")] = 3,
    max_tokens: MaxTokens = 96,
    sweep: Annotated[str, typer.Option(help="Draft lengths K to choose stock EAGLE-3's best from.")] = "1,2,3,4,5",
    kappas: Annotated[str, typer.Option(help="AdaptiveSpec's kappas, comma-separated; empty: stock only.")] = "1,0.3",
    eager: Eager = False,
    dtype: Dtype = "auto",
    intel_openmp: Annotated[
        bool, typer.Option("--intel-openmp", help="Put Intel OpenMP into LD_PRELOAD, as vLLM advises for x86.")
    ] = False,
) -> None:
    """Measure against no speculation and stock EAGLE-3 at its best K; writes ladder-*.json."""
    from .bench import bench as run
    from .engines import EngineError

    try:
        run(
            out=out,
            model=model,
            head=head,
            batches=[int(batch) for batch in batches.split(",")],
            prompts=prompts,
            rounds=rounds,
            max_tokens=max_tokens,
            sweep=[int(k) for k in sweep.split(",")],
            kappas=[float(kappa) for kappa in kappas.split(",") if kappa],
            eager=eager,
            dtype=dtype,
            preload_openmp=intel_openmp,
        )
    except (EngineError, FileNotFoundError, ValueError) as error:
        raise fail(error) from None


@app.command()
def doctor() -> None:
    """Say what this machine and this vLLM can do, and what is refused and why."""
    from .doctor import doctor as run

    raise typer.Exit(run())


@app.command("demo-models")
def demo_models() -> None:
    """Prepare the demo's models and print their folders: the target's, then the head's."""
    from .models import demo_head, demo_target

    try:
        folders = demo_target(), demo_head()
    except (FileNotFoundError, ValueError) as error:
        raise fail(error) from None
    for folder in folders:
        print(folder)


def fail(error: Exception) -> typer.Exit:
    """Show what a user can act on, without a traceback."""
    typer.echo(f"adaptivespec: {error}", err=True)
    return typer.Exit(1)


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
