"""Every kernel compiles ahead of time for GPUs that are not here, and its GPU check runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.kernels

REPOSITORY = Path(__file__).resolve().parents[2]


def run(*command: str, interpreted: bool = False) -> str:
    """Run a script of bench/ in a process of its own: this one's kernels may be interpreted."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    if interpreted:
        environment["TRITON_INTERPRET"] = "1"
    result = subprocess.run(
        [sys.executable, *command], cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return result.stdout


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_every_kernel_builds(target: str, tmp_path: Path) -> None:
    """For sm_90 the script also fails where a default configuration spills registers."""
    report = run("bench/kernel_builds.py", "--targets", target, "--out", str(tmp_path))
    for kernel in (
        "_row",
        "_walk",
        "_attention",
        "_merge",
        "_commit",
        "_topk",
        "_grow",
        "_mask",
        "_stage",
        "_verify",
        "_path",
        "_record",
    ):
        assert f"{target} {kernel}_kernel (" in report


def test_gpu_check_runs(tmp_path: Path) -> None:
    report = run("bench/gpu_check.py", "--tiny", "--out", str(tmp_path), interpreted=True)
    assert "all results right" in report
    results = json.loads((tmp_path / "gpu-check-tiny.json").read_text())["results"]
    assert {r["kernel"] for r in results} == {"acceptance", "attention", "commit", "growth"}
    assert all(r["bytes"] > 0 and r["us"]["ours"]["median"] > 0 for r in results)
