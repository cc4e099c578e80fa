#!/usr/bin/env python3
"""Every kernel on the GPU at hand: right against its twin, and how fast against its floor and what a user has today.

Needs torch and triton; flash-attn and xformers are compared with where they are installed. It is meant to take under
three minutes and writes bench/results/gpu-check.json after every line. It checks greedy and sampled acceptance, masked
attention, commits and a growth level at real sizes; `pytest tests/kernels` there checks everything at small ones.
`--tiny` is for the CPU and the interpreter (TRITON_INTERPRET=1): it proves this script, not the speed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton

ROOT = Path(__file__).resolve().parent.parent
KERNELS = "vllm_adaptivespec.triton_kernels"


def load_package() -> Any:
    """The kernels of this checkout, whether or not the package is installed."""
    sys.path.insert(0, str(ROOT))
    if KERNELS not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            KERNELS, ROOT / "triton_kernels" / "__init__.py", submodule_search_locations=[str(ROOT / "triton_kernels")]
        )
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[KERNELS] = module
        spec.loader.exec_module(module)
    return sys.modules[KERNELS]


kernels = load_package()

from vllm_adaptivespec.core import attention as attention_twin  # noqa: E402
from vllm_adaptivespec.core.acceptance import MarginRule  # noqa: E402
from vllm_adaptivespec.core.commit import commit_path  # noqa: E402
from vllm_adaptivespec.core.noise import gumbel_noise  # noqa: E402
from vllm_adaptivespec.core.rows import RowSampling, accept_rows  # noqa: E402
from vllm_adaptivespec.core.tree import ROOT as TREE_ROOT  # noqa: E402
from vllm_adaptivespec.core.tree import DraftTree  # noqa: E402

LAYERS, HEADS, KV_HEADS, HEAD_SIZE, PAGE, VOCAB, DRAFT_VOCAB = 32, 32, 8, 128, 16, 128_256, 32_000
"""An 8B model's."""
FLUSH_BYTES = 512 << 20
"""More than any cache holds."""
NUM_INPUTS = 3
FLASH_PAGE = 256
PER_REQUEST = ("max_promotions", "protected")
ATTENTION_TOLERANCE = 0.02
"""Largest error of bfloat16 attention, relative to the largest output."""
OURS = "ours"


@dataclass
class Size:
    """One measured size; trees of ``nodes`` nodes, ``context`` committed tokens, in every request."""

    batch: int
    nodes: int
    context: int


@dataclass
class Call:
    """One call to be timed; ``prepare`` is run before it and not timed."""

    call: Callable[[], Any]
    prepare: Callable[[], Any] = lambda: None


Contenders = dict[str, Sequence[Call | Callable[[], Any]]]
"""By name, the same work on different inputs."""


@dataclass
class Device:
    """Where things run and what it can do at best."""

    torch: torch.device
    repeats: int
    bytes_per_second: float = math.nan
    path: Path = Path("gpu-check.json")
    results: list[dict[str, Any]] = field(default_factory=list)

    def write(self) -> None:
        """All results so far: a later failure must not lose them."""
        content = {
            "command": " ".join(["bench/gpu_check.py", *sys.argv[1:]]),
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__},
            "device": torch.cuda.get_device_name() if self.is_gpu else "cpu, interpreted",
            "copy_bytes_per_second": self.bytes_per_second,
            "results": self.results,
        }
        self.path.write_text(json.dumps(content, indent=1) + "\n")

    @property
    def is_gpu(self) -> bool:
        return self.torch.type == "cuda"

    def seconds(self, calls: list[Call]) -> list[float]:
        """Times of calls with different inputs in turn, the caches flushed before each.

        On a GPU a call is captured in a graph first, so that the time is the device's and not the launching host's.
        """
        if not self.is_gpu:
            return [self.by_clock(calls[i % len(calls)]) for i in range(self.repeats)]
        flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=self.torch)
        graphs = []
        for one in calls:
            one.prepare()
            one.call()  # compiles, and allocates what a library keeps
            torch.cuda.synchronize()
            one.prepare()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                one.call()
            graphs.append(graph)
        times = []
        for i in range(self.repeats):
            calls[i % len(calls)].prepare()
            flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graphs[i % len(calls)].replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1000)
        return times

    @staticmethod
    def by_clock(one: Call) -> float:
        one.prepare()
        begin = time.perf_counter()
        one.call()
        return time.perf_counter() - begin

    def measure(self, kernel: str, size: Size, num_bytes: int, contenders: Contenders) -> None:
        """Time ours and what it is compared with; where one of the others fails, its error is the record."""
        row: dict[str, Any] = {
            "kernel": kernel,
            "size": vars(size),
            "bytes": num_bytes,
            "floor_us": 1e6 * num_bytes / self.bytes_per_second,
            "us": {},
            "failed": {},
        }
        for name, calls in contenders.items():
            try:
                times = [1e6 * t for t in self.seconds([c if isinstance(c, Call) else Call(c) for c in calls])]
            except Exception as error:
                if name == OURS:
                    raise
                row["failed"][name] = f"{type(error).__name__}: {error}"[:300]
                continue
            row["us"][name] = {"median": statistics.median(times), "min": min(times), "max": max(times)}
        self.results.append(row)
        medians = "  ".join(f"{name} {t['median']:.1f}" for name, t in row["us"].items())
        failed = "".join(f"  {name} failed" for name in row["failed"])
        self.write()
        print(f"{kernel:11s} {size}  floor {row['floor_us']:.1f} us: {medians}{failed}", flush=True)


def some_tree(rng: random.Random, nodes: int) -> DraftTree:
    """Wide near the root, as drafted trees are; siblings differ."""
    parents = [TREE_ROOT if n < 3 else rng.randrange(max(0, n - 6), n) for n in range(nodes)]
    return DraftTree(tuple(range(10, 10 + nodes)), tuple(parents))


def starts(counts: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *counts], device=device).cumsum(0).to(torch.int32)


def check(name: str, condition: bool) -> None:
    if not condition:
        raise SystemExit(f"{name}: WRONG RESULT")


# ---- acceptance ----


def acceptance(device: Device, size: Size, vocab: int) -> None:
    rng = random.Random(0)
    trees = [some_tree(rng, size.nodes) for _ in range(size.batch)]
    rows = 1 + size.nodes
    where = device.torch
    arguments = dict(
        row_starts=starts([rows] * size.batch, where),
        tokens=torch.tensor([t for tree in trees for t in (-1, *tree.tokens)], device=where),
        parents=torch.tensor([p for tree in trees for p in (-1, *tree.parents)], dtype=torch.int32, device=where),
        log_kappas=torch.full((size.batch,), math.log(0.3), device=where),
        max_nodes=size.nodes,
        max_promotions=torch.full((size.batch,), -1, dtype=torch.int32, device=where),
        protected=torch.full((size.batch, 2), 2, dtype=torch.int64, device=where),
    )

    def make() -> torch.Tensor:
        logits = torch.randn((size.batch * rows, vocab), device=where)
        for r, tree in enumerate(trees):  # every second child is what the target wants, or nearly
            for node, parent in enumerate(tree.parents):
                logits[r * rows + 1 + parent, tree.tokens[node]] = 5.0 + 0.1 * (node % 3)
        return logits.to(torch.bfloat16)

    num_bytes = size.batch * rows * vocab * 2
    inputs = [make() for _ in range(NUM_INPUTS)]
    result = kernels.margin_acceptance(inputs[0], **arguments)
    walks = accept_rows(
        inputs[0].float().cpu(),
        [r * rows for r in range(size.batch + 1)],
        trees,
        [MarginRule(0.3, protected=frozenset({2}))] * size.batch,
        [RowSampling()] * size.batch,
    )
    for emitted, path, walk in zip(result.emitted.tolist(), result.path.tolist(), walks, strict=True):
        assert walk is not None
        check("acceptance", [t for t in emitted if t >= 0] == walk.emitted and [n for n in path if n >= 0] == walk.path)
    check_sampling(inputs[0][: 2 * rows].float(), trees[:2], arguments)

    parent_rows = torch.arange(size.batch, device=where).repeat_interleave(rows) * rows + 1 + arguments["parents"]

    def by_torch(logits: torch.Tensor) -> torch.Tensor:
        best = logits.max(dim=-1)
        return logits[parent_rows, arguments["tokens"].clamp(min=0)] - best.values[parent_rows]

    contenders: Contenders = {
        OURS: [partial(kernels.margin_acceptance, x, **arguments) for x in inputs],
        "torch max + gather (no walk)": [partial(by_torch, x) for x in inputs],
    }
    device.measure("acceptance", size, num_bytes, contenders)


def check_sampling(logits: torch.Tensor, trees: list[DraftTree], arguments: dict[str, Any]) -> None:
    """Roots of one or two requests, sampled: the noise on the device is the twin's, up to rounding."""
    where, rows, vocab = logits.device, 1 + len(trees[0]), logits.shape[1]
    samplings = [RowSampling(1.0, 11 + r, 40 + r) for r in range(len(logits) // rows)]
    own = {name: value[: len(samplings)] for name, value in arguments.items() if name in PER_REQUEST}
    result = kernels.margin_acceptance(
        logits,
        arguments["row_starts"][: len(samplings) + 1],
        arguments["tokens"][: len(logits)],
        arguments["parents"][: len(logits)],
        torch.zeros(len(samplings), device=where),
        max_nodes=arguments["max_nodes"],
        **own,
        temperatures=torch.ones(len(samplings), device=where),
        seeds=torch.tensor([s.seed for s in samplings], device=where),
        positions=torch.tensor([s.root_position for s in samplings for _ in range(rows)], device=where),
    )
    for r, sampling in enumerate(samplings):
        noised = logits[r * rows].double().cpu() + gumbel_noise(sampling.seed, sampling.root_position, vocab)
        check("sampled acceptance", bool(noised[int(result.emitted[r, 0])] > noised.max() - 1e-3))


# ---- attention ----


@dataclass
class AttentionInput:
    """Paged and, for the dense contenders, gathered keys and values."""

    query: torch.Tensor
    cache: torch.Tensor
    node: torch.Tensor
    dense: torch.Tensor | None


def attention(device: Device, size: Size) -> None:
    rng = random.Random(1)
    where = device.torch
    dtype = torch.bfloat16
    rows = 1 + size.nodes
    trees = [some_tree(rng, size.nodes) for _ in range(size.batch)]
    blocks_each = -(-size.context // PAGE)
    num_blocks = size.batch * blocks_each
    run = FLASH_PAGE // PAGE if blocks_each % (FLASH_PAGE // PAGE) == 0 else 1
    runs = torch.randperm(num_blocks // run, device=where)
    # Runs of pages that lie together, so that FlashAttention, which takes no small pages, can read the same cache.
    table = (runs[:, None] * run + torch.arange(run, device=where)).reshape(size.batch, blocks_each).to(torch.int32)
    tree_masks = torch.stack([t.ancestor_mask() for t in trees]).to(where)
    seen = torch.cat((torch.zeros_like(tree_masks[:, :1]), tree_masks), dim=1)
    weights = (1 << torch.arange(size.nodes, device=where)).to(torch.int64)
    arguments = dict(
        block_tables=table,
        context_lens=torch.full((size.batch,), size.context, dtype=torch.int32, device=where),
        query_starts=starts([rows] * size.batch, where),
        node_starts=starts([size.nodes] * size.batch, where),
        masks=(seen * weights).sum(-1).flatten(),
        scale=HEAD_SIZE**-0.5,
        max_queries=rows,
        max_nodes=size.nodes,
        max_context=blocks_each * PAGE,
    )
    num_bytes = 2 * 2 * size.batch * (size.context + size.nodes) * KV_HEADS * HEAD_SIZE
    num_bytes += 2 * 2 * size.batch * rows * HEADS * HEAD_SIZE
    with_dense = num_bytes < 4 << 30

    def make() -> AttentionInput:
        cache = torch.randn((2, num_blocks, PAGE, KV_HEADS, HEAD_SIZE), device=where).to(dtype)
        node = torch.randn((2, size.batch * size.nodes, KV_HEADS, HEAD_SIZE), device=where).to(dtype)
        query = torch.randn((size.batch * rows, HEADS, HEAD_SIZE), device=where).to(dtype)
        dense = None
        if with_dense:
            prefix = cache[:, table.flatten().long()].reshape(2, size.batch, -1, KV_HEADS, HEAD_SIZE)[
                :, :, : size.context
            ]
            own = node.reshape(2, size.batch, size.nodes, KV_HEADS, HEAD_SIZE)
            dense = torch.cat((prefix, own), dim=2).transpose(2, 3).contiguous()
        return AttentionInput(query, cache, node, dense)

    def ours(x: AttentionInput) -> torch.Tensor:
        result: torch.Tensor = kernels.tree_attention(x.query, *x.cache, *x.node, **arguments)
        return result

    inputs = [make() for _ in range(NUM_INPUTS)]
    check_attention(inputs[0], size, arguments, seen)
    contenders: Contenders = {OURS: [partial(ours, x) for x in inputs]}
    mask = torch.cat((torch.ones((size.batch, rows, size.context), dtype=torch.bool, device=where), seen), dim=-1)
    for name, call in dense_contenders(mask, size, rows):
        if with_dense:
            contenders[name] = [partial(call, x) for x in inputs]
    flash = paged_flash(runs.reshape(size.batch, -1).to(torch.int32), size, rows)
    if flash is not None and device.is_gpu and run > 1:
        contenders["FlashAttention chain, paged"] = [partial(flash, x) for x in inputs]
    device.measure("attention", size, num_bytes, contenders)


def check_attention(x: AttentionInput, size: Size, arguments: dict[str, Any], seen: torch.Tensor) -> None:
    """First and last request, on keys that make the nodes and the context's end count; a wrong mask must show."""
    rows, table = 1 + size.nodes, arguments["block_tables"]
    slots = torch.arange(size.context, device=table.device)
    loud_slots = slots[-min(64, size.context) :]
    cache, node = x.cache.clone(), x.node.clone()
    for request in (0, size.batch - 1):
        cache[0][table[request, loud_slots // PAGE].long(), loud_slots % PAGE] *= 4
    node[0] *= 4

    def error(masks: torch.Tensor) -> float:
        result = kernels.tree_attention(x.query, *cache, *node, **{**arguments, "masks": masks})
        worst = 0.0
        for request in {0, size.batch - 1}:
            blocks = table[request, slots // PAGE].long()
            own = slice(request * rows, (request + 1) * rows)
            own_nodes = slice(request * size.nodes, (request + 1) * size.nodes)
            expected = attention_twin.tree_attention(
                x.query[own].double(),
                cache[0][blocks, slots % PAGE].double(),
                cache[1][blocks, slots % PAGE].double(),
                node[0][own_nodes].double(),
                node[1][own_nodes].double(),
                seen[request],
                HEAD_SIZE**-0.5,
            )
            difference = (result[own].double() - expected).abs().max() / expected.abs().max()
            worst = max(worst, difference.item())
        return worst

    right, wrong = error(arguments["masks"]), error(torch.full_like(arguments["masks"], (1 << size.nodes) - 1))
    check(f"attention (relative error {right:.4f})", right < ATTENTION_TOLERANCE)
    check(f"attention's control, all nodes visible (relative error {wrong:.4f})", wrong > 2 * ATTENTION_TOLERANCE)


def dense_contenders(
    mask: torch.Tensor, size: Size, rows: int
) -> Iterator[tuple[str, Callable[[AttentionInput], Any]]]:
    """Attention over keys gathered beforehand (which is not timed): with the tree's mask, and as a causal chain."""
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def query(x: AttentionInput) -> torch.Tensor:
        return x.query.reshape(size.batch, rows, HEADS, HEAD_SIZE).transpose(1, 2)

    def masked(x: AttentionInput) -> torch.Tensor:
        assert x.dense is not None
        return sdpa(query(x), *x.dense, attn_mask=mask[:, None], enable_gqa=True)

    yield "SDPA, dense mask, gathered", masked
    try:
        from torch.nn.attention.bias import causal_lower_right
    except ImportError:
        return
    bias = causal_lower_right(rows, size.context + size.nodes)

    def chain(x: AttentionInput) -> torch.Tensor:
        assert x.dense is not None
        return sdpa(query(x), *x.dense, attn_mask=bias, enable_gqa=True)

    yield "SDPA, causal chain, gathered", chain
    try:
        from xformers.ops import memory_efficient_attention
    except ImportError:
        return
    group = HEADS // KV_HEADS
    padded = -(-mask.shape[-1] // 8) * 8  # xformers wants aligned rows
    room = torch.zeros((size.batch, 1, 1, rows, padded), dtype=torch.bfloat16, device=mask.device)
    dense_bias = room[..., : mask.shape[-1]].masked_fill_(~mask[:, None, None], -math.inf)
    dense_bias = dense_bias.expand(size.batch, KV_HEADS, group, rows, mask.shape[-1])

    def by_xformers(x: AttentionInput) -> Any:
        assert x.dense is not None
        q = x.query.reshape(size.batch, rows, KV_HEADS, group, HEAD_SIZE)
        key, value = (p.transpose(1, 2)[:, :, :, None].expand(-1, -1, -1, group, -1) for p in x.dense)
        return memory_efficient_attention(q, key, value, attn_bias=dense_bias)

    yield "xformers, tree bias, gathered", by_xformers


def paged_flash(table: torch.Tensor, size: Size, rows: int) -> Callable[[AttentionInput], Any] | None:
    """FlashAttention's decode over the same cache, the rows as a causal chain; None where it is not installed.

    Args:
        table: ``[batch, runs]`` of ``FLASH_PAGE`` tokens.
    """
    try:
        from flash_attn import flash_attn_with_kvcache
    except ImportError:
        return None
    lengths = torch.full((size.batch,), size.context, dtype=torch.int32, device=table.device)

    def call(x: AttentionInput) -> Any:
        q = x.query.reshape(size.batch, rows, HEADS, HEAD_SIZE)
        cache = x.cache.view(2, -1, FLASH_PAGE, KV_HEADS, HEAD_SIZE)
        return flash_attn_with_kvcache(q, *cache, cache_seqlens=lengths, block_table=table, causal=True)

    return call


# ---- commit ----


def commit(device: Device, size: Size, layers: int) -> None:
    where = device.torch
    rows = 1 + size.nodes
    num_blocks = -(-size.batch * rows // PAGE) + 1
    path = list(range(1, min(4, size.nodes)))
    slots = torch.arange(size.batch * rows, device=where)
    arguments = (
        slots,
        starts([rows] * size.batch, where),
        torch.tensor([path + [-1] * (size.nodes - len(path))] * size.batch, dtype=torch.int32, device=where),
        torch.full((size.batch,), len(path), dtype=torch.int32, device=where),
    )

    def make() -> Any:
        shape = (num_blocks, PAGE, KV_HEADS, HEAD_SIZE)
        return kernels.LayerCaches([torch.randn(shape, device=where).to(torch.bfloat16) for _ in range(2 * layers)])

    num_bytes = 2 * 2 * layers * 2 * size.batch * len(path) * KV_HEADS * HEAD_SIZE
    inputs = [make() for _ in range(NUM_INPUTS)]
    expected = [cache.clone() for cache in inputs[0].caches]
    for r in range(size.batch):
        for cache in expected:
            commit_path(cache, list(range(r * rows + 1, (r + 1) * rows)), path)
    kernels.kv_commit(inputs[0], *arguments)
    check("commit", all(torch.equal(a, b) for a, b in zip(inputs[0].caches, expected, strict=True)))
    roots = torch.arange(size.batch, device=where)[:, None] * rows + 1
    source = (roots + torch.tensor(path, device=where)).flatten()
    target = (roots + torch.arange(len(path), device=where)).flatten()

    def by_torch(caches: Any) -> None:
        for cache in caches.caches:
            flat = cache.view(-1, KV_HEADS, HEAD_SIZE)
            flat[target] = flat[source]

    contenders: Contenders = {
        OURS: [partial(kernels.kv_commit, x, *arguments) for x in inputs],
        "torch index copies": [partial(by_torch, x) for x in inputs],
    }
    device.measure("commit", size, num_bytes, contenders)


# ---- growth ----


def growth(device: Device, size: Size, vocab: int) -> None:
    where = device.torch
    width = 4
    state = kernels.GrowthState.empty(size.batch, size.nodes, width, where)
    limits = {
        name: torch.full((size.batch,), value, dtype=torch.int32, device=where)
        for name, value in (("depths", 8), ("widths", width), ("nodes", size.nodes))
    }
    roots = torch.randn((size.batch, vocab), device=where)
    kernels.grow_level(state, roots, first=True, **limits)
    reference = roots.double().log_softmax(-1).topk(width)
    first = min(width, size.nodes)
    check("growth", torch.equal(state.tokens[:, :first], reference.indices[:, :first]))
    check("growth's scores", torch.allclose(state.scores[:, :first].double(), reference.values[:, :first], atol=1e-3))
    num_bytes = size.batch * width * vocab * 2

    def make() -> torch.Tensor:
        return torch.randn((size.batch * width, vocab), device=where).to(torch.bfloat16)

    def by_torch(x: torch.Tensor) -> Any:
        return x.float().log_softmax(-1).topk(width)

    inputs = [make() for _ in range(NUM_INPUTS)]
    kept = {name: tensor.clone() for name, tensor in vars(state).items()}

    def restore() -> None:
        for name, tensor in vars(state).items():
            tensor.copy_(kept[name])

    def ours(x: torch.Tensor) -> None:
        kernels.grow_level(state, x, first=False, **limits)

    contenders: Contenders = {
        OURS: [Call(partial(ours, x), restore) for x in inputs],
        "torch log_softmax + topk (no merge)": [partial(by_torch, x) for x in inputs],
    }
    device.measure("growth", size, num_bytes, contenders)


def copy_bandwidth(device: Device, num_bytes: int) -> float:
    """Bytes per second that a plain copy reads and writes."""
    source = torch.empty(num_bytes, dtype=torch.int8, device=device.torch)
    target = torch.empty_like(source)
    return 2 * num_bytes / statistics.median(device.seconds([Call(lambda: target.copy_(source))]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    options = parser.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        raise SystemExit("No GPU here. --tiny with TRITON_INTERPRET=1 runs this script on the CPU.")
    torch.manual_seed(0)
    device = Device(torch.device("cpu" if options.tiny else "cuda"), 2 if options.tiny else 50)
    options.out.mkdir(parents=True, exist_ok=True)
    device.path = options.out / ("gpu-check-tiny.json" if options.tiny else "gpu-check.json")
    device.bytes_per_second = copy_bandwidth(device, 1 << 20 if options.tiny else 1 << 30)
    print(f"copy: {device.bytes_per_second / 1e12:.2f} TB/s")
    if options.tiny:
        sizes, vocab, draft_vocab, layers = [Size(2, 3, 40)], 500, 300, 2
    else:
        sizes, vocab, draft_vocab, layers = (
            [Size(1, 8, 1024), Size(1, 32, 32_768), Size(16, 16, 8192), Size(64, 8, 1024), Size(64, 32, 8192)],
            VOCAB,
            DRAFT_VOCAB,
            LAYERS,
        )
    for size in sizes:
        acceptance(device, size, vocab)
        attention(device, size)
        commit(device, size, layers)
        growth(device, size, draft_vocab)
    print(f"all results right; wrote {device.path.name}")


if __name__ == "__main__":
    main()
