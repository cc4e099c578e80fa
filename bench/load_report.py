"""What a record of `bench/load.py` looks like: tables on the terminal and the plot, both from the JSON alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_adaptivespec.cli.report import labels, number

if TYPE_CHECKING:
    from rich.table import Table

BASELINE = "none"
# By kind of engine, each kind in shades from light to dark.
SHADES = {
    "stock": ("#a3c4e4", "#83afd8", "#4c86c0", "#27598f", "#153a63"),
    "tree": ("#93cc88", "#5fae55", "#2f7a2b"),
    "adaptive": ("#e4a11b",),
    "throughput": ("#d62f3c",),
}
OTHERS = ("#b279a2", "#9d755d", "#59a3a3")
BASELINE_COLOR = "#8c8c8c"
HIGHLIGHTED = "throughput"


def colors(names: list[str]) -> dict[str, str]:
    """A colour for every engine that does not depend on which others took part, but for shades."""
    found, used = {BASELINE: BASELINE_COLOR}, dict.fromkeys((*SHADES, ""), 0)
    for name in names:
        if name == BASELINE:
            continue
        kind = name.partition("-")[0] if name.partition("-")[0] in SHADES else ""
        shades = SHADES.get(kind, OTHERS)
        found[name] = shades[used[kind] % len(shades)]
        used[kind] += 1
    return found


def ranged(spread: dict[str, float]) -> str:
    """`1.07 (0.98–1.12)`, in two lines."""
    return f"{spread['median']:.2f}x\n[dim]{spread['low']:.2f}–{spread['high']:.2f}[/dim]"


def new_table(title: str, columns: list[str]) -> Table:
    from rich import box
    from rich.table import Table

    made = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    made.add_column("", no_wrap=True)
    for column in columns:
        made.add_column(column, justify="right", no_wrap=True)
    return made


def tables(content: dict[str, Any]) -> list[Table]:
    """Ratios by batch size and the figures of the swinging load, in 80 columns; only what has been measured."""
    names = list(labels(content))
    made = []
    if content["summary"]:
        rows = {(row["engine"], row["batch"]): row for row in content["summary"]}
        batches = sorted({batch for _, batch in rows})
        ratios = new_table("times no speculation, by requests at once", [str(batch) for batch in batches])
        ratios.add_row(
            f"{BASELINE}, tok/s",
            *(f"{rows[BASELINE, batch]['tokens_per_second']['median']:.1f}" for batch in batches),
        )
        for name in names:
            if name != BASELINE:
                ratios.add_row(name, *(ranged(rows[name, batch]["ratio"]) for batch in batches))
        made.append(ratios)
    if content["swing_summary"]:
        columns = ["tok/\nbusy s", "ratio", "make-\nspan s", "busy\ns", "at\nonce"]
        columns += ["ms/token\nmean, p90", "latency s\nmean, p90"]
        swinging = new_table("swinging load", columns)
        for row in content["swing_summary"]:
            swinging.add_row(
                row["engine"],
                number(row["tokens_per_busy_second"]["median"], ".1f"),
                ranged(row["ratio"]),
                number(row["makespan_s"], ".0f"),
                number(row["busy_s"], ".0f"),
                number(row["mean_concurrency"], ".1f"),
                f"{row['tpot_ms_mean']:.0f}, {row['tpot_ms_p90']:.0f}",
                f"{row['latency_s_mean']:.1f}, {row['latency_s_p90']:.1f}",
            )
        made.append(swinging)
    return made


def draw_fixed(axis: Any, content: dict[str, Any], color_of: dict[str, str]) -> None:
    """Ratio over batch size, a band from the lowest to the highest round."""
    names = labels(content)
    batches = sorted({row["batch"] for row in content["summary"]})
    axis.axhline(1.0, color=BASELINE_COLOR, linestyle="--", linewidth=1.2, label=names[BASELINE], zorder=1)
    for name, label in names.items():
        rows = sorted((r for r in content["summary"] if r["engine"] == name), key=lambda r: r["batch"])
        if name == BASELINE or not rows:
            continue
        ours = name == HIGHLIGHTED
        x = [row["batch"] for row in rows]
        axis.fill_between(
            x,
            [row["ratio"]["low"] for row in rows],
            [row["ratio"]["high"] for row in rows],
            color=color_of[name],
            alpha=0.22 if ours else 0.10,
            linewidth=0,
            zorder=3 if ours else 2,
        )
        axis.plot(
            x,
            [row["ratio"]["median"] for row in rows],
            color=color_of[name],
            marker="o",
            markersize=6 if ours else 3.5,
            linewidth=3.2 if ours else 1.5,
            label=label,
            zorder=5 if ours else 4,
        )
    axis.set_xscale("log", base=2)
    axis.set_xticks(batches, [str(batch) for batch in batches])
    axis.set_xlabel("requests at once")
    axis.set_ylabel("output tokens/s, times no speculation")
    axis.set_title("fixed load: median of the rounds, lowest to highest", fontsize=10)
    axis.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axis.set_axisbelow(True)
    axis.legend(fontsize=8, frameon=False)


def draw_swing(axis: Any, content: dict[str, Any], color_of: dict[str, str]) -> None:
    """A bar per engine: tokens per busy second, times no speculation."""
    names = labels(content)
    rows = {row["engine"]: row for row in content["swing_summary"]}
    order = [name for name in names if name in rows]
    medians = [rows[name]["ratio"]["median"] for name in order]
    errors = [
        [rows[name]["ratio"]["median"] - rows[name]["ratio"]["low"] for name in order],
        [rows[name]["ratio"]["high"] - rows[name]["ratio"]["median"] for name in order],
    ]
    places = range(len(order))
    axis.barh(
        places, medians, color=[color_of[name] for name in order], xerr=errors, error_kw={"elinewidth": 1, "capsize": 2}
    )
    for place, name in enumerate(order):
        axis.text(
            rows[name]["ratio"]["high"] + 0.02,
            place,
            f"{rows[name]['ratio']['median']:.2f}x",
            va="center",
            fontsize=9,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
            fontweight="bold" if name == HIGHLIGHTED else "normal",
        )
    axis.set_yticks(places, [names[name] for name in order], fontsize=9)
    for tick, name in zip(axis.get_yticklabels(), order, strict=True):
        tick.set_fontweight("bold" if name == HIGHLIGHTED else "normal")
    axis.axvline(1.0, color=BASELINE_COLOR, linestyle="--", linewidth=1.2)
    axis.set_xlim(0, 1.15 * max(row["ratio"]["high"] for row in rows.values()))
    axis.set_xlabel("tokens per busy second, times no speculation")
    settings = content["settings"]
    axis.set_title(f"load swinging between {settings['quiet']:g} and {settings['peak']} requests", fontsize=10)
    axis.invert_yaxis()


def draw_reliability(axis: Any, content: dict[str, Any], color_of: dict[str, str]) -> None:
    """What the throughput policy believed of drafted nodes, and what became of them; bins by size."""
    curve = content["learned"][HIGHLIGHTED]["reliability"]
    bins = [b for b in zip(curve["predicted"], curve["accepted"], curve["counts"], strict=True) if b[2]]
    most = max(count for _, _, count in bins)
    axis.plot([0, 1], [0, 1], color=BASELINE_COLOR, linestyle="--", linewidth=1.2)
    axis.scatter(
        [predicted for predicted, _, _ in bins],
        [accepted for _, accepted, _ in bins],
        s=[20 + 200 * count / most for _, _, count in bins],
        color=color_of.get(HIGHLIGHTED, BASELINE_COLOR),
        alpha=0.8,
    )
    axis.set_xlabel("probability it gave a node")
    axis.set_ylabel("share accepted")
    axis.set_title(f"reliability, {sum(count for _, _, count in bins):,} nodes", fontsize=10)


def plot(content: dict[str, Any], path: Path) -> None:
    """Fixed load, swinging load, reliability of the throughput policy; a panel only for what has been measured."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [(draw_fixed, 1.35)] * bool(content["summary"]) + [(draw_swing, 1.0)] * bool(content["swing_summary"])
    panels += [(draw_reliability, 0.8)] * (HIGHLIGHTED in content["learned"])
    figure, axes = pyplot.subplots(
        1,
        len(panels),
        figsize=((6.5, 11, 15)[len(panels) - 1], 4.6),
        squeeze=False,
        layout="constrained",
        gridspec_kw={"width_ratios": [width for _, width in panels]},
    )
    color_of = colors(list(labels(content)))
    for axis, (draw, _) in zip(axes[0], panels, strict=True):
        draw(axis, content, color_of)
        axis.spines[["top", "right"]].set_visible(False)
    settings, versions, where = content["settings"], content["versions"], content["machine"]
    figure.suptitle(
        f"{settings['model']}, {settings['dtype']}{', eager' if settings['eager'] else ''}, greedy, "
        f"vLLM {versions.get('vllm', '?')}, {where['cores']} cores of {where['cpu']}, {content['date'][:10]}",
        fontsize=9,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    pyplot.close(figure)
