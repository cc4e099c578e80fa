"""The engines that are compared, by what a user would write in `--speculative-config`."""

from __future__ import annotations

from pathlib import Path

from .engines import EngineSpec

# Hard cap on drafted nodes per request, as the README recommends; what their rows cost differs by CPU.
TREE_NODES = 8
LOSSY_KAPPA = 0.3
# Of `tree_policy`: the paper's, by confidence and acceptance, and the one that maximises tokens per second.
POLICIES = ("adaptive", "throughput")


def no_speculation() -> EngineSpec:
    """The baseline of every ratio."""
    return EngineSpec("none", "no speculation")


def stock_eagle3(head: Path, draft_tokens: int) -> EngineSpec:
    """VLLM's own EAGLE-3, which drafts one chain of `draft_tokens`."""
    return EngineSpec(
        f"stock-k{draft_tokens}",
        f"stock EAGLE-3, K = {draft_tokens}",
        {"method": "eagle3", "model": str(head), "num_speculative_tokens": draft_tokens},
    )


def adaptivespec(head: Path, kappa: float = 1.0, nodes: int = TREE_NODES) -> EngineSpec:
    """AdaptiveSpec; kappa = 1 is lossless and the default, so it is left out as a user would."""
    config = {"method": "adaptivespec", "model": str(head), "num_speculative_tokens": nodes}
    if kappa == 1.0:
        return EngineSpec("adaptivespec", "AdaptiveSpec, lossless", config)
    return EngineSpec(
        f"adaptivespec-kappa{kappa:g}", f"AdaptiveSpec, kappa = {kappa:g}", {**config, "margin_threshold": kappa}
    )


def fixed_tree(head: Path, depth: int, width: int, nodes: int) -> EngineSpec:
    """AdaptiveSpec with one shape for every request and step."""
    return EngineSpec(
        f"tree-{depth}-{width}-{nodes}",
        f"tree ({depth}, {width}, {nodes})",
        {
            "method": "adaptivespec",
            "model": str(head),
            "num_speculative_tokens": nodes,
            "tree_policy": "static",
            "static_shape": [depth, width, nodes],
        },
    )


def policy(head: Path, name: str, nodes: int = TREE_NODES) -> EngineSpec:
    """AdaptiveSpec, lossless, with a named `tree_policy`."""
    return EngineSpec(
        name,
        f"{name} policy",
        {"method": "adaptivespec", "model": str(head), "num_speculative_tokens": nodes, "tree_policy": name},
    )


def by_name(head: Path, name: str) -> EngineSpec:
    """`none`, `stock-k2`, `tree-3-4-8`, `adaptive`, `throughput`; ValueError for anything else."""
    kind, *numbers = name.split("-")
    if name == "none":
        return no_speculation()
    if name in POLICIES:
        return policy(head, name)
    if kind == "stock" and len(numbers) == 1 and numbers[0][:1] == "k" and numbers[0][1:].isdecimal():
        return stock_eagle3(head, int(numbers[0][1:]))
    if kind == "tree" and len(numbers) == 3 and all(number.isdecimal() for number in numbers):
        return fixed_tree(head, *map(int, numbers))
    raise ValueError(f"no method {name!r}: none, stock-kK, tree-DEPTH-WIDTH-NODES, {', '.join(POLICIES)}")
