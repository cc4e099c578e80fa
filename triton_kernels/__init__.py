"""Triton kernels of the method; each has its readable torch twin in ``vllm_adaptivespec.core``."""

from .kv_commit import LayerCaches, kv_commit
from .margin_acceptance import Acceptance, margin_acceptance
from .tree_attention import tree_attention
from .tree_growth import GrowthState, grow_level, tree_masks

__all__ = [
    "Acceptance",
    "GrowthState",
    "LayerCaches",
    "grow_level",
    "kv_commit",
    "margin_acceptance",
    "tree_attention",
    "tree_masks",
]
