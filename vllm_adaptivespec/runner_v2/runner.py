"""Model Runner V2 with trees: puts our parts in the places of vLLM's."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from ..config import AdaptiveSpecConfig
from ..core.policy import HISTORY_START, HistoryBatch
from ..core.store import TreeStore
from ..core.totals import DeviceTotals
from ..plugin import config_of
from . import attention
from .model_state import TreeModelState
from .rejection_sampler import TreeRejectionSampler
from .requests import SlotSettings
from .speculator import TreeSpeculator

logger = init_logger("vllm.adaptivespec")


class TreeRunner:
    """Mixed into a V2 model runner of vLLM's."""

    adaptivespec: AdaptiveSpecConfig
    model_state: TreeModelState
    rejection_sampler: TreeRejectionSampler
    speculator: TreeSpeculator
    vllm_config: Any
    device: torch.device
    max_num_reqs: int
    max_model_len: int

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        config = config_of(vllm_config)
        if config is None:
            raise RuntimeError("adaptivespec's worker was started without adaptivespec's configuration.")
        self.adaptivespec = config
        super().__init__(vllm_config, device)  # type: ignore[call-arg]
        become(self.speculator, EagleSpeculator, TreeSpeculator)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        config = self.adaptivespec
        layers: dict[str, Any] = get_layers_from_vllm_config(self.vllm_config, Attention)
        draft_names = self.speculator.draft_attn_layer_names
        target_layers = {name: layer for name, layer in layers.items() if name not in draft_names}
        draft_layers = {name: layer for name, layer in layers.items() if name in draft_names}
        attention.install(target_layers, attention.with_trees)
        attention.install(draft_layers, attention.with_levels)

        processors = self.vllm_config.model_config.logits_processors
        if processors:
            logger.warning(
                "adaptivespec drafts chains: custom logits processors may go by the rows before their own, among which "
                "would be other branches."
            )
        nodes = config.num_speculative_tokens
        store = TreeStore(self.max_num_reqs, nodes, self.device)
        history = HistoryBatch(
            config.history_decay,
            config.reset_after,
            torch.full((self.max_num_reqs,), HISTORY_START, dtype=torch.float64, device=self.device),
            torch.zeros(self.max_num_reqs, dtype=torch.int32, device=self.device),
        )
        max_draft_position = self.speculator.max_draft_position
        settings = SlotSettings(
            config, self.max_num_reqs, min(self.max_model_len - 1, max_draft_position), bool(processors), self.device
        )
        become(self.model_state, DefaultModelState, TreeModelState)
        totals = DeviceTotals(config.policy().largest.depth, nodes, self.device)
        self.model_state.init_adaptivespec(store, history, totals, settings, target_layers)
        become(self.rejection_sampler, RejectionSampler, TreeRejectionSampler)
        self.rejection_sampler.init_adaptivespec(self.model_state)
        self.speculator.init_adaptivespec(config, self.model_state, draft_layers)


def become(instance: Any, stock: type, ours: type) -> None:
    """Set the class of a stock object.

    Raises:
        ValueError: it is not exactly the stock class, so overriding it would be a guess.
    """
    if type(instance) is not stock:
        raise ValueError(
            f"adaptivespec goes with vLLM's {stock.__name__}, but this model has {type(instance).__name__}; it cannot "
            "be served with trees."
        )
    instance.__class__ = ours


class AdaptiveSpecGPUModelRunner(TreeRunner, GPUModelRunner):
    """Stock V2 runner whose drafts are trees."""
