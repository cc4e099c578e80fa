#!/usr/bin/env python3
"""Build every Triton kernel ahead of time for GPUs that need not be here, in the configurations its wrapper launches.

The wrappers run with their kernels replaced by recorders, so what is built is what they would launch. Every value of
every choice (dtype, tile, feature) is built at least once. `--table` writes registers, shared memory and spills of the
sm_90 builds to bench/results/kernels-sm90.json and .md.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
import vllm_adaptivespec.triton_kernels as kernels
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_MEMORY = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
"""Bytes one program may have."""
TYPE_NAMES = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
}
OPTIONS = ("num_warps", "num_stages")
MODULES = [
    sys.modules[f"{kernels.__name__}.{name}"]
    for name in ("margin_acceptance", "tree_attention", "kv_commit", "tree_growth", "tree_rows")
]


@dataclass
class Launch:
    """One recorded launch: what to compile, and under which name it is reported."""

    case: str
    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, int]

    def source(self) -> ASTSource:
        """The kernel with types and constants as the JIT would specialise it for these arguments."""
        signature: dict[str, str] = {}
        constants: dict[tuple[int, ...], Any] = {}
        attributes: dict[tuple[int, ...], Any] = {}
        for index, parameter in enumerate(self.kernel.params):
            value = self.arguments[parameter.name]
            if parameter.is_constexpr or (type(value) is int and value == 1 and not parameter.do_not_specialize):
                signature[parameter.name] = "constexpr"
                constants[index,] = value
            elif isinstance(value, torch.Tensor):
                signature[parameter.name] = "*" + TYPE_NAMES[value.dtype]
                attributes[index,] = [["tt.divisibility", 16]]
            else:
                signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
                if isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize:
                    attributes[index,] = [["tt.divisibility", 16]]
        return ASTSource(self.kernel, signature, constants, attributes)

    def build(self, target: GPUTarget) -> Any:
        return triton.compile(self.source(), target=target, options=self.options)


class Recorder:
    """Stands in for a kernel in its module and keeps what would have been launched."""

    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self.kernel, self.launches, self.case = kernel, launches, ""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
            names = [p.name for p in self.kernel.params]
            self.launches.append(Launch(self.case, self.kernel, dict(zip(names, args, strict=False)) | kwargs, options))

        return launch


def each_choice(**choices: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Combinations in which every value of every choice appears; the first is that of the first values."""
    for i in range(max(len(values) for values in choices.values())):
        yield {name: values[i % len(values)] for name, values in choices.items()}


def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def acceptance(vocab: int, dtype: torch.dtype, max_nodes: int, protected: int, sampling: str) -> None:
    requests, rows = 4, 12
    options: dict[str, torch.Tensor] = {}
    if sampling == "sampled":
        options = dict(
            temperatures=torch.ones(requests),
            seeds=zeros(requests, dtype=torch.int64),
            positions=zeros(rows, dtype=torch.int64),
        )
    elif sampling == "given":
        options = dict(choices=zeros(rows, dtype=torch.int64))
    kernels.margin_acceptance(
        torch.zeros((rows, vocab), dtype=dtype),
        zeros(requests + 1),
        zeros(rows, dtype=torch.int64),
        zeros(rows),
        torch.zeros(requests),
        max_nodes=max_nodes,
        max_promotions=zeros(requests),
        protected=zeros(requests, protected, dtype=torch.int64),
        **options,
    )


def attention(
    dtype: torch.dtype,
    head_size: int,
    heads: tuple[int, int],
    page: int,
    max_nodes: int,
    max_queries: int,
    window: int | None,
    softcap: float | None,
    num_splits: int,
    layout: str,
) -> None:
    num_heads, kv_heads = heads
    shape = (8, page, kv_heads, head_size) if layout == "NHD" else (8, kv_heads, page, head_size)
    cache = torch.zeros(shape, dtype=dtype)
    cache = cache if layout == "NHD" else cache.transpose(1, 2)
    requests, rows = 2, 2 * max_queries
    nodes = torch.zeros((rows, kv_heads, head_size), dtype=dtype)
    kernels.tree_attention(
        torch.zeros((rows, num_heads, head_size), dtype=dtype),
        cache,
        cache,
        nodes,
        nodes,
        block_tables=zeros(requests, 512),
        context_lens=zeros(requests),
        query_starts=zeros(requests + 1),
        node_starts=zeros(requests + 1),
        masks=zeros(rows, dtype=torch.int64),
        scale=head_size**-0.5,
        max_queries=max_queries,
        max_nodes=max_nodes,
        max_context=512 * page,
        window=window,
        softcap=softcap,
        num_splits=num_splits,
    )


def commit(dtype: torch.dtype, head_size: int, max_nodes: int) -> None:
    cache = torch.zeros((4, 16, 8, head_size), dtype=dtype)
    requests = 2
    kernels.kv_commit(
        kernels.LayerCaches([cache, cache]),
        zeros(18, dtype=torch.int64),
        zeros(requests + 1),
        zeros(requests, max_nodes),
        zeros(requests),
    )


def growth(dtype: torch.dtype, vocab: int, max_nodes: int, max_width: int, level: int, mapped: bool) -> None:
    requests = 2
    state = kernels.GrowthState.empty(requests, max_nodes, max_width, torch.device("cpu"))
    limits = zeros(requests)
    kernels.grow_level(
        state,
        torch.zeros((requests * (max_width if level else 1), vocab), dtype=dtype),
        first=level == 0,
        depths=limits,
        widths=limits,
        nodes=limits,
        target_ids=zeros(vocab, dtype=torch.int64) if mapped else None,
    )
    kernels.tree_masks(state.parents, state.num_nodes)


def rows(max_nodes: int, token: torch.dtype) -> None:
    slots, requests, count = 4, 2, 12
    trees = SimpleNamespace(
        parents=zeros(slots, max_nodes),
        masks=zeros(slots, max_nodes, dtype=torch.int64),
        depths=zeros(slots, max_nodes),
        num_nodes=zeros(slots),
        path=zeros(slots, max_nodes),
        path_len=zeros(slots),
    )
    wide = zeros(count, dtype=torch.int64)
    kernels.stage_rows(trees, wide, zeros(count), wide, wide, wide)
    kernels.verify_rows(trees, wide, zeros(count), wide, zeros(count, dtype=token))
    kernels.path_rows(trees, wide, zeros(count), wide)
    kernels.record_step(
        trees,
        SimpleNamespace(rates=zeros(slots, dtype=torch.float64), misses=zeros(slots)),
        zeros(2, dtype=torch.float64),
        5,
        SimpleNamespace(
            sums=zeros(7, dtype=torch.int64),
            shapes=zeros(9, max_nodes + 1, dtype=torch.int64),
            margins=zeros(8, dtype=torch.int64),
            edges=zeros(7, dtype=torch.float32),
        ),
        zeros(requests, dtype=torch.int64),
        zeros(requests + 1),
        path=zeros(requests, max_nodes),
        num_emitted=zeros(requests),
        promoted=zeros(requests, dtype=torch.int64),
        first_margin=zeros(requests, dtype=torch.float32),
    )


CASES: dict[str, tuple[Callable[..., None], list[dict[str, Any]]]] = {
    "acceptance": (
        acceptance,
        list(
            each_choice(
                vocab=(128_256, 32_000, 1000, 262_144),
                dtype=(torch.float32, torch.bfloat16, torch.float16),
                max_nodes=(8, 16, 32, 64),
                protected=(2, 0, 8),
                sampling=("greedy", "sampled", "given", "sampled", "greedy"),
            )
        ),
    ),
    "attention": (
        attention,
        list(
            each_choice(
                dtype=(torch.bfloat16, torch.float16),
                head_size=(128, 64, 80, 96, 256, 192, 160),
                heads=((32, 8), (32, 32), (64, 8), (8, 1), (14, 2)),
                page=(16, 32, 64, 128),
                max_nodes=(8, 16, 32, 64),
                max_queries=(9, 17, 1, 33, 65),
                window=(None, 4096, 1024),
                softcap=(None, None, 30.0),
                num_splits=(16, 1, 64, 2, 4, 8, 32),
                layout=("NHD", "HND"),
            )
        ),
    ),
    "commit": (
        commit,
        list(
            each_choice(
                dtype=(torch.bfloat16, torch.float32, torch.float8_e4m3fn),
                head_size=(128, 64, 80, 96, 256),
                max_nodes=(8, 16, 32, 64, 1),
            )
        ),
    ),
    "rows": (rows, list(each_choice(max_nodes=(8, 16, 32, 63), token=(torch.int32, torch.int64)))),
    "growth": (
        growth,
        list(
            each_choice(
                dtype=(torch.bfloat16, torch.float32, torch.float16),
                vocab=(32_000, 128_256, 8192, 500),
                max_nodes=(8, 16, 32, 64),
                max_width=(4, 8, 16, 1),
                level=(1, 0),
                mapped=(True, False, False),
            )
        ),
    ),
}
"""By wrapper: how to call it, and with what; the first of each is the default configuration."""

USUAL = dict(dtype=torch.bfloat16, head_size=128, page=16, window=None, softcap=None, layout="NHD")
CASES["attention"][1].extend(
    [
        # bench/gpu_check.py's sizes, and full tiles of narrow heads
        {**USUAL, "heads": (32, 8), "max_nodes": 16, "max_queries": 17, "num_splits": 4},
        {**USUAL, "heads": (32, 8), "max_nodes": 32, "max_queries": 33, "num_splits": 1},
        {**USUAL, "heads": (32, 8), "max_nodes": 8, "max_queries": 33, "num_splits": 1, "head_size": 96},
        {**USUAL, "heads": (32, 8), "max_nodes": 64, "max_queries": 65, "num_splits": 1, "head_size": 64},
        # float32, for tests
        {**USUAL, "heads": (4, 2), "max_nodes": 8, "max_queries": 9, "num_splits": 2, "dtype": torch.float32},
        {**USUAL, "heads": (4, 2), "max_nodes": 64, "max_queries": 65, "num_splits": 1, "dtype": torch.float32}
        | {"head_size": 256},
    ]
)


def label(index: int, options: dict[str, Any]) -> str:
    if index == 0:
        return "default"
    return ", ".join(f"{k}={str(v).removeprefix('torch.')}" for k, v in options.items())


def launches(target: str) -> list[Launch]:
    """All launches of all cases on one target, without running anything."""
    recorded: list[Launch] = []
    recorders: list[Recorder] = []
    kept: list[tuple[Any, str, Any]] = []
    for module in MODULES:
        for name, kernel in list(vars(module).items()):
            if name.endswith("_kernel") and isinstance(kernel, triton.JITFunction):
                recorders.append(Recorder(kernel, recorded))
                kept.append((module, name, kernel))
                setattr(module, name, recorders[-1])
    try:
        for wrapper, (call, all_options) in CASES.items():
            for index, options in enumerate(all_options):
                for recorder in recorders:
                    recorder.case = f"{wrapper}: {label(index, options)}"
                with mock.patch.object(torch.version, "hip", "7" if TARGETS[target].backend == "hip" else None):
                    call(**options)
    finally:
        for module, name, kernel in kept:
            setattr(module, name, kernel)
    return recorded


def resources(ptx: str, arch: str) -> dict[str, int]:
    """Registers, spilled bytes and shared memory, as ptxas reports them."""
    ptxas = get_ptxas(int(arch.strip("sm_a"))).path
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [ptxas, "-v", f"--gpu-name={arch}", str(source), "-o", str(source.with_suffix(".cubin"))]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", report)]
    registers = re.search(r"Used (\d+) registers", report)
    assert registers is not None, report
    return {"registers": int(registers[1]), "spilled_bytes": sum(spills)}


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| kernel | configuration | warps | registers | spilled bytes | shared memory |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| `{r['kernel']}` | {r['case']} | {r['num_warps']} | {r['registers']} | "
        f"{r['spilled_bytes']} | {r['shared']} |"
        for r in rows
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--table", action="store_true", help="write the sm_90 table")
    parser.add_argument("--out", type=Path, default=Path(__file__).resolve().parent / "results")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    seen: set[str] = set()
    if not isinstance(kernels.tree_attention.__globals__["_attention_kernel"], triton.JITFunction):
        raise SystemExit("Kernels are interpreted here: unset TRITON_INTERPRET to build them.")
    builds = [(launch, target) for target in options.targets for launch in launches(target)]
    for launch, target in builds:
        built = launch.build(TARGETS[target])
        if built.hash in seen:
            continue
        seen.add(built.hash)
        name = launch.kernel.__name__
        row: dict[str, Any] = {
            "kernel": name,
            "case": launch.case,
            "target": target,
            "shared": built.metadata.shared,
            "num_warps": built.metadata.num_warps,
        }
        if target == "sm_90":
            row |= resources(built.asm["ptx"], "sm_90a")
            if launch.case.endswith("default") and row["spilled_bytes"]:
                raise SystemExit(f"{name} spills {row['spilled_bytes']} bytes in its default configuration")
        if row["shared"] > SHARED_MEMORY[target]:
            raise SystemExit(f"{name} ({launch.case}) needs {row['shared']} bytes of shared memory on {target}")
        rows.append(row)
        print(
            f"{target} {name} ({launch.case}): " + ", ".join(f"{k} {v}" for k, v in list(row.items())[3:]), flush=True
        )
    print(f"{len(rows)} builds")
    if options.table:
        sm_90 = [row for row in rows if row["target"] == "sm_90"]
        options.out.mkdir(parents=True, exist_ok=True)
        content = {"triton": triton.__version__, "rows": sm_90}
        (options.out / "kernels-sm90.json").write_text(json.dumps(content, indent=1) + "\n")
        (options.out / "kernels-sm90.md").write_text(table(sm_90))


if __name__ == "__main__":
    main()
