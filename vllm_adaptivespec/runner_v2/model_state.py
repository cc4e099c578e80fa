"""The target's pass: trees staged before it, accepted paths committed after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from ..core.policy import HISTORY_START, HistoryBatch
from ..core.store import TreeStore
from ..core.totals import DeviceTotals
from ..triton_kernels import LayerCaches, kv_commit, stage_rows
from ..triton_kernels.tree_attention import PAGE_SIZES
from .attention import TREES, TreeBatch, key_value_views
from .requests import SlotSettings


@dataclass
class VerificationStep:
    """The batch whose trees are under verification.

    Args:
        num_requests: requests with drafts; they come first in the batch.
        rows: ``[num_logits]`` int64 token row of each logits row.
        slots, local: ``[num_logits]`` request slot of each logits row, and its place among its request's.
        shift: ``[num_logits]`` int64 what was added to the rows' positions.
        query_starts: ``[num_requests_in_batch + 1]`` int32 first token row of each request.
    """

    num_requests: int
    rows: torch.Tensor
    slots: torch.Tensor
    local: torch.Tensor
    shift: torch.Tensor
    query_starts: torch.Tensor


class TreeModelState(DefaultModelState):
    """Stock model state with trees. Becomes one by having its class set on the stock object."""

    def init_adaptivespec(
        self,
        store: TreeStore,
        history: HistoryBatch,
        totals: DeviceTotals,
        settings: SlotSettings,
        target_layers: dict[str, Any],
    ) -> None:
        """Call once the models are loaded."""
        self.store = store
        self.history = history
        self.totals = totals
        self.settings = settings
        self.target_layers = target_layers
        self.step: VerificationStep | None = None
        self.caches: dict[int, LayerCaches] = {}
        self.slot_mappings: torch.Tensor | None = None
        self.row_masks = torch.ones(self.max_num_tokens, dtype=torch.int64, device=self.device)
        self.context_lens = torch.zeros(self.max_num_reqs, dtype=torch.int32, device=self.device)

    # ---- set-up ----

    def initialize_kv_cache(self, kv_cache_config: Any, block_tables: Any) -> None:
        super().initialize_kv_cache(kv_cache_config, block_tables)
        self.caches = {}
        for group, spec in enumerate(kv_cache_config.kv_cache_groups):
            layers = [self.target_layers[name] for name in spec.layer_names if name in self.target_layers]
            if not layers:
                continue
            views = [view for layer in layers for view in key_value_views(layer.kv_cache, layer.head_size)]
            page = spec.kv_cache_spec.block_size
            if views[0].shape[1] != page:
                raise ValueError(
                    f"adaptivespec needs attention kernels that take vLLM's KV cache blocks whole, but blocks of "
                    f"{page} tokens are split into {views[0].shape[1]}; set --block-size to that."
                )
            if page not in PAGE_SIZES:
                raise ValueError(
                    f"adaptivespec works with KV cache blocks of 16, 32, 64 or 128 tokens, not {page}; "
                    "set --block-size."
                )
            self.caches[group] = LayerCaches(views)

    # ---- requests ----

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        super().add_request(req_index, new_req_data)
        self.settings.add(req_index, new_req_data.sampling_params, new_req_data.prompt_len)
        self.store.clear(req_index)
        self.history.rates[req_index].fill_(HISTORY_START)
        self.history.misses[req_index].zero_()

    def apply_staged_writes(self) -> None:
        super().apply_staged_writes()
        self.settings.apply()

    # ---- before the pass ----

    def prepare_attn(
        self,
        input_batch: Any,
        cudagraph_mode: Any,
        block_tables: Any,
        slot_mappings: torch.Tensor,
        *args: Any,
        for_capture: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        metadata = super().prepare_attn(
            input_batch, cudagraph_mode, block_tables, slot_mappings, *args, for_capture=for_capture, **kwargs
        )
        self.slot_mappings = slot_mappings
        trees = self._captured_trees(input_batch) if for_capture else self._trees(input_batch)
        for layer_metadata in metadata.values():
            setattr(layer_metadata, TREES, trees)
        return metadata

    def _trees(self, batch: Any) -> TreeBatch | None:
        if not batch.num_draft_tokens:
            return None
        drafted = batch.num_draft_tokens_per_req
        num_requests = int((drafted > 0).sum())
        lengths = batch.num_scheduled_tokens[:num_requests]
        # vLLM puts requests with drafts first, and gives them a root and their nodes.
        assert (drafted[:num_requests] > 0).all()
        assert (lengths == drafted[:num_requests] + 1).all()
        return TreeBatch(
            num_rows=int(lengths.sum()),
            num_requests=num_requests,
            only=num_requests == batch.num_reqs,
            masks=self.row_masks,
            context_lens=self.context_lens,
            query_starts=batch.query_start_loc[: num_requests + 1],
            max_queries=int(lengths.max()),
            max_context=int((batch.num_computed_tokens_np[:num_requests] + lengths).max()),
        )

    def _captured_trees(self, batch: Any) -> TreeBatch | None:
        """For a graph of decodes with equally many rows each; plain decodes keep the stock kernel."""
        longest = batch.max_query_len or int(batch.num_scheduled_tokens.max())
        if not 1 < longest <= self.store.max_nodes + 1:
            return None
        return TreeBatch(
            num_rows=batch.num_tokens,
            num_requests=batch.num_reqs,
            only=True,
            masks=self.row_masks,
            context_lens=self.context_lens,
            query_starts=batch.query_start_loc[: batch.num_reqs + 1],
            max_queries=longest,
            max_context=self.max_model_len,
        )

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> dict[str, Any]:
        """Stage the trees: rows' masks, and their depths for positions, in place, where captured graphs read them.

        Cache slots were computed from a chain's positions before, so that every row has a slot of its own.
        """
        inputs = super().prepare_inputs(input_batch, req_states)
        self.step = None
        if not input_batch.num_draft_tokens:
            return inputs
        rows, slots, local = (
            input_batch.logits_indices,
            input_batch.expanded_idx_mapping,
            input_batch.expanded_local_pos,
        )
        shift = stage_rows(self.store, slots, local, rows, self.row_masks, input_batch.positions)
        num_reqs = input_batch.num_reqs
        starts = input_batch.query_start_loc[: num_reqs + 1]
        torch.sub(input_batch.seq_lens[:num_reqs], starts.diff(), out=self.context_lens[:num_reqs])
        num_requests = int((input_batch.num_draft_tokens_per_req > 0).sum())
        self.step = VerificationStep(num_requests, rows, slots, local, shift, starts)
        return inputs

    # ---- after it ----

    def restore_positions(self, positions: torch.Tensor) -> None:
        """Give the rows a chain's positions again, which vLLM's sampling and drafting go by."""
        assert self.step is not None
        positions.index_add_(0, self.step.rows, self.step.shift, alpha=-1)

    def postprocess_state(self, idx_mapping: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Commit the accepted paths: before the draft reads them, and before another step can share their blocks."""
        super().postprocess_state(idx_mapping, *args, **kwargs)
        if self.step is None:
            return
        num_requests = self.step.num_requests
        requests = idx_mapping[:num_requests]
        path, num_accepted = self.store.path[requests], self.store.path_len[requests]
        assert self.slot_mappings is not None
        for group, caches in self.caches.items():
            kv_commit(caches, self.slot_mappings[group], self.step.query_starts[: num_requests + 1], path, num_accepted)
