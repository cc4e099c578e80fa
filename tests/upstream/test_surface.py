"""What we override is there in the vLLM that is installed, and in the newest one that is let in."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.upstream.sources import WheelSources
from vllm_adaptivespec.cli.models import cache_dir
from vllm_adaptivespec.compat import SUPPORTED, SURFACES, check_version, surface_problems

pytestmark = pytest.mark.upstream

NEWEST = "0.33.0"
"""Its CUDA wheel cannot run here, but it can be read."""
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_31_x86_64", "manylinux_2_35_x86_64")


@pytest.fixture(scope="module")
def newest() -> WheelSources:
    folder = cache_dir() / "upstream"
    wheels = list(folder.glob(f"vllm-{NEWEST}-*.whl"))
    if not wheels:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            "--no-deps",
            "--only-binary",
            ":all:",
            "-d",
            str(folder),
        ]
        command += [part for platform in PLATFORMS for part in ("--platform", platform)]
        result = subprocess.run([*command, f"vllm=={NEWEST}"], capture_output=True, text=True, check=False)
        wheels = list(folder.glob(f"vllm-{NEWEST}-*.whl"))
        if not wheels:
            pytest.fail(f"no wheel of vllm {NEWEST} to be had: {result.stderr[-300:]}")
    return WheelSources(wheels[0])


def problems(sources: WheelSources, surface: dict[str, dict[str, tuple[str, ...]]]) -> list[str]:
    found = []
    for place, methods in surface.items():
        module, _, class_name = place.partition(":")
        for method, needed in methods.items():
            actual = sources.parameters(module, class_name, method)
            if actual is None:
                found.append(f"{place}.{method} is missing")
            else:
                found += [f"{place}.{method} has no parameter {p!r}" for p in needed if p not in actual]
    return found


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_installed(runner: str) -> None:
    assert surface_problems(runner) == []


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_newest(newest: WheelSources, runner: str) -> None:
    assert newest.version == NEWEST
    check_version(newest.version)
    assert problems(newest, SURFACES[runner]) == []


def test_what_is_missing_would_show(newest: WheelSources) -> None:
    worker = "vllm.v1.worker.cpu_model_runner:CPUModelRunner"
    assert problems(newest, {worker: {"_sample": ("logits", "colour")}}) == [
        f"{worker}._sample has no parameter 'colour'"
    ]
    assert problems(newest, {worker: {"_sing": ()}}) == [f"{worker}._sing is missing"]
    assert problems(newest, {"vllm.nowhere:Nothing": {"x": ()}}) == ["vllm.nowhere:Nothing.x is missing"]


def test_newest_is_the_last_that_is_let_in() -> None:
    major, minor = (int(part) for part in NEWEST.split(".")[:2])
    assert SUPPORTED[1] == (major, minor + 1)


def test_inherited_and_imported_names(tmp_path: Path) -> None:
    wheel = tmp_path / "p-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("p/__init__.py", "from .base import Base as Renamed\n")
        archive.writestr("p/base.py", "class Base:\n    def f(self, a, *, b=1): ...\n")
        archive.writestr("p/child.py", "from p import Renamed\nclass Child(Renamed[int]):\n    def g(self): ...\n")
    sources = WheelSources(wheel)
    assert sources.parameters("p.child", "Child", "f") == ["self", "a", "b"]
    assert sources.parameters("p.child", "Child", "g") == ["self"]
    assert sources.parameters("p.child", "Child", "h") is None
