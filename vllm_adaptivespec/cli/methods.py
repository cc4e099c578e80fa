"""The engines that are compared, by what a user would write in `--speculative-config`."""

from __future__ import annotations

from pathlib import Path

from .engines import EngineSpec

# Hard cap on drafted nodes per request, as the README recommends; what their rows cost differs by CPU.
TREE_NODES = 8
LOSSY_KAPPA = 0.3


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
