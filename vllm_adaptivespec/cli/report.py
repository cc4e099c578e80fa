"""What a measurement looks like: the table on the terminal and the plot, both from the record alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

DASH = "–"
COLORS = ("#8c8c8c", "#4c78a8", "#54a24b", "#e4a11b", "#b279a2", "#9d755d", "#e45756")


def number(value: float | None, pattern: str) -> str:
    """Format a figure that may not exist for an engine."""
    return DASH if value is None else format(value, pattern)


def labels(record: dict[str, Any]) -> dict[str, str]:
    """Engine name -> label."""
    return {engine["name"]: engine["label"] for engine in record["engines"]}


def cell_title(summary: dict[str, Any]) -> str:
    """`humaneval, batch 4`."""
    return f"{summary['source']}, batch {summary['batch']}"


def table(record: dict[str, Any]) -> Table:
    """The figures of a record, one row per engine, a section per kind of prompt and batch size; fits 80 columns."""
    from rich import box
    from rich.table import Table

    settings = record["settings"]
    made = Table(
        title=f"{settings['model']} on {record['machine']['cores']} cores, {settings['dtype']}"
        f"{', eager' if settings['eager'] else ''}, greedy, up to {settings['max_tokens']} tokens",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    made.add_column("", no_wrap=True)
    for heading in (
        "tokens/s",
        "ratio",
        "accept.\nlength",
        "nodes/\nstep",
        "promoted\nshare",
        "exact\nmatch",
    ):
        made.add_column(heading, justify="right", no_wrap=True)
    names = labels(record)
    several = len({cell_title(summary) for summary in record["summary"]}) > 1
    previous = None
    for summary in record["summary"]:
        title = cell_title(summary)
        if title != previous and several:
            made.add_section()
            made.add_row(f"[bold]{title}")
        previous = title
        made.add_row(
            names[summary["engine"]],
            number(summary["tokens_per_second"]["median"], ".1f"),
            number(summary["ratio"]["median"], ".2f") + "x",
            number(summary["acceptance_length"], ".2f"),
            number(summary["drafted_per_step"], ".1f"),
            number(summary["promoted_share"], ".1%"),
            number(summary["exact_match"], ".0%"),
        )
    return made


FOOTNOTE = (
    "ratio: tokens/s by those without speculation, the engines taking turns prompt by prompt.\n"
    "accept. length: tokens emitted per verification, 1 + accepted / drafts. nodes/step: drafted for one "
    "verification.\n"
    "promoted share: output tokens that are not the target's own choice and that the margin rule let through.\n"
    "exact match: prompts whose tokens are all those of no speculation; in bfloat16 two tokens can tie exactly, and a "
    "lossless engine may then take the other one."
)


def plot(record: dict[str, Any], path: Path) -> None:
    """Bars of tokens/s (with the ratio) and of acceptance length, one row of panels per kind of prompt and batch."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = labels(record)
    cells: dict[str, list[dict[str, Any]]] = {}
    for summary in record["summary"]:
        cells.setdefault(cell_title(summary), []).append(summary)
    height = 0.5 + 0.42 * max(len(rows) for rows in cells.values())
    figure, axes = pyplot.subplots(
        len(cells), 2, figsize=(10, 1.0 + height * len(cells)), squeeze=False, layout="constrained"
    )
    color_of = {name: COLORS[index % len(COLORS)] for index, name in enumerate(names)}
    for (speed, length), (title, rows) in zip(axes, cells.items(), strict=True):
        ticks = [names[row["engine"]] for row in rows]
        colors = [color_of[row["engine"]] for row in rows]
        medians = [row["tokens_per_second"]["median"] for row in rows]
        lower = [row["tokens_per_second"]["median"] - row["tokens_per_second"]["low"] for row in rows]
        upper = [row["tokens_per_second"]["high"] - row["tokens_per_second"]["median"] for row in rows]
        speed.barh(ticks, medians, color=colors, xerr=(lower, upper))
        speed.bar_label(speed.containers[-1], [f" {row['ratio']['median']:.2f}x" for row in rows])
        speed.set_title(f"{title}: tokens/s (x no speculation)", fontsize=9)
        lengths = [row["acceptance_length"] or 1.0 for row in rows]
        length.barh(ticks, lengths, color=colors)
        length.bar_label(length.containers[-1], [f" {value:.2f}" for value in lengths])
        length.set_title("tokens per pass of the target", fontsize=9)
        length.set_yticks([])
        for axis in (speed, length):
            axis.invert_yaxis()
            axis.margins(x=0.18)
            axis.spines[["top", "right"]].set_visible(False)
    settings, versions = record["settings"], record["versions"]
    figure.suptitle(
        f"{settings['model']}, {settings['dtype']}, vLLM {versions.get('vllm', '?')}, "
        f"{record['machine']['cores']} cores of {record['machine']['cpu']}, {record['date'][:10]}",
        fontsize=9,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    pyplot.close(figure)
