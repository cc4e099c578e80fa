"""Drafting on the device: vLLM's EAGLE-3 first pass over the accepted rows, then a tree grown level by level."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.dp_utils import dispatch_cg_and_sync_dp
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import SpeculatorCudaGraphManager

from ..config import AdaptiveSpecConfig
from ..triton_kernels import GrowthState, grow_level, path_rows, tree_masks
from ..triton_kernels.tree_growth import MAX_FED, MAX_WIDTH
from .attention import LevelBatch
from .model_state import TreeModelState


class TreeSpeculator(EagleSpeculator):
    """Replaces vLLM's EAGLE speculator; becomes one by having its class set on the stock object.

    A request has a row of every tensor here by its place in the batch, not by its slot. Limits of each request's tree
    are data, so one sequence of kernels, and one captured graph per batch size, serves all shapes.
    """

    model_state: TreeModelState

    @property
    def max_draft_position(self) -> int:
        """Positions the head was made for, at most the target's."""
        return min(self.draft_model_config.max_model_len or self.max_model_len, self.max_model_len)

    def init_adaptivespec(
        self, config: AdaptiveSpecConfig, model_state: TreeModelState, draft_layers: dict[str, Any]
    ) -> None:
        """Call once the draft model is loaded.

        Raises:
            ValueError: a level's rows would not fit into the draft model's buffers.
        """
        device, requests = self.device, self.max_num_reqs
        self.policy = config.policy()
        self.model_state = model_state
        largest = self.policy.largest
        nodes = config.num_speculative_tokens
        self.max_width = min(largest.width, largest.nodes, MAX_WIDTH)
        self.max_levels = min(largest.depth, nodes)
        self.max_fed = min((self.max_levels - 1) * self.max_width, MAX_FED)
        if requests * self.max_width > self.max_num_tokens:
            raise ValueError(
                f"adaptivespec feeds the draft up to {self.max_width} rows for each of max_num_seqs={requests} "
                f"requests, more than max_num_batched_tokens={self.max_num_tokens}; raise that, or lower max_num_seqs "
                "or the width of the tree shapes."
            )
        mapping = getattr(self.model, "draft_id_to_target_id", None)
        self.target_ids = None
        if mapping is not None:
            self.target_ids = torch.arange(mapping.numel(), device=device) + mapping.data
        self.growth = GrowthState.empty(requests, nodes, self.max_width, device)

        def zeros(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(requests, dtype=dtype, device=device)

        self.depths, self.widths, self.nodes = (zeros(torch.int32) for _ in range(3))
        self.root_positions = zeros(torch.int32)
        each = torch.arange(requests + 1, dtype=torch.int32, device=device)
        self.level_starts = each * self.max_width
        self.node_starts = each * self.max_fed
        self.first_fed = self.node_starts[:-1, None].long()
        self.level_slots = torch.arange(self.max_width, dtype=torch.int32, device=device)
        self.spare_row = requests * self.max_fed
        self.draft_layers = draft_layers
        self.scratch = {
            name: tuple(
                # Zeros: what is masked must still be finite.
                torch.zeros((self.spare_row + 1, layer.num_kv_heads, size), dtype=self.dtype, device=device)
                for size in (layer.head_size, layer.head_size_v)
            )
            for name, layer in draft_layers.items()
        }

    def set_attn(self, model_state: Any, kv_cache_config: Any, *args: Any, **kwargs: Any) -> None:
        super().set_attn(model_state, kv_cache_config, *args, **kwargs)
        self.kv_groups = {
            name: group
            for group, spec in enumerate(kv_cache_config.kv_cache_groups)
            for name in spec.layer_names
            if name in self.draft_layers
        }

    # ---- captured graphs ----

    def _configure_decode_metadata_update(self) -> None:
        """Levels are captured one by one and replayed as often as there are levels."""
        self.supports_decode_metadata_update = False

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        super().init_cudagraph_manager(cudagraph_mode)
        full = cudagraph_mode.decode_mode() == CUDAGraphMode.FULL
        self.decode_cudagraph_manager = SpeculatorCudaGraphManager(
            self.vllm_config,
            self.device,
            CUDAGraphMode.FULL_DECODE_ONLY if full else CUDAGraphMode.NONE,
            decode_query_len=self.max_width,
        )

    # ---- drafting ----

    @torch.inference_mode()
    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        *args: Any,
        dummy_run: bool = False,
        skip_attn_for_dummy_run: bool = False,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Draft one tree per request.

        Returns:
            ``[num_reqs, max_nodes]`` int64 node tokens, best node first; 0 past a tree's last node. The trees' other
            half goes to the store.
        """
        if self.model_state.step is not None and not dummy_run:
            self._follow_paths(input_batch, last_hidden_states, aux_hidden_states)
        num_nodes = self.num_speculative_steps if num_speculative_tokens is None else num_speculative_tokens
        self.root_positions.zero_()
        self.depths.zero_()
        # One token is what the first pass gives; the tree's first level comes with it.
        drafts = super().propose(
            input_batch,
            attn_metadata,
            slot_mappings,
            last_hidden_states,
            aux_hidden_states,
            *args,
            dummy_run=dummy_run,
            skip_attn_for_dummy_run=skip_attn_for_dummy_run,
            is_profile=is_profile,
            num_speculative_tokens=min(num_nodes, 1),
            **kwargs,
        )
        if num_nodes == 0:
            return drafts
        num_reqs = input_batch.num_reqs
        self._grow(num_reqs, min(self.max_levels, num_nodes), is_profile, dummy_run and skip_attn_for_dummy_run)
        growth = self.growth.first(num_reqs)
        if not dummy_run:
            masks, depths = tree_masks(growth.parents, growth.num_nodes)
            store = self.model_state.store
            store.put(input_batch.idx_mapping, growth.parents, growth.num_nodes, masks, depths)
        self.draft_tokens[:num_reqs] = growth.tokens.clamp(min=0)
        return self.draft_tokens[:num_reqs]

    def _follow_paths(
        self, input_batch: Any, last_hidden_states: torch.Tensor, aux_hidden_states: list[torch.Tensor] | None
    ) -> None:
        """Move accepted rows to where a chain has them, in place: the first pass reads a request's first rows."""
        step = self.model_state.step
        assert step is not None
        source = path_rows(self.model_state.store, step.slots, step.local, step.rows)
        for tensor in (input_batch.input_ids, last_hidden_states, *(aux_hidden_states or ())):
            tensor.index_copy_(0, step.rows, tensor.index_select(0, source))

    def _prefill(self, num_reqs: int, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        # Requests beyond the head's positions get no drafts; their rows must not read past its rotary table either.
        self.input_buffers.positions[:num_tokens].clamp_(max=self.max_draft_position - 1)
        super()._prefill(num_reqs, num_tokens, *args, **kwargs)

    def sample_draft(
        self,
        hidden_states: torch.Tensor,
        sample_src_positions: torch.Tensor,
        idx_mapping: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Called at the end of the first pass: choose each request's shape and grow the first level.

        Args:
            hidden_states: ``[num_reqs, hidden_size]`` of the roots.
            sample_src_positions: ``[num_reqs]`` the roots' positions.
            idx_mapping: ``[num_reqs]`` request slots, -1 for padding.

        Returns:
            ``[num_reqs]`` the best node's token.
        """
        num_reqs = len(hidden_states)
        logits = self._draft_logits(hidden_states)
        slots = idx_mapping.clamp(min=0)
        settings = self.model_state.settings
        floats = logits.float()
        confidence = (floats.amax(dim=-1) - floats.logsumexp(dim=-1)).clamp(max=0.0).nan_to_num(nan=-torch.inf).exp()
        depths, widths, nodes = self.policy.shapes(confidence.double(), self.model_state.history.rates[slots])
        width_limits = settings.widths[slots]
        room = settings.last_positions[slots] - sample_src_positions
        room = torch.where((idx_mapping >= 0) & (width_limits > 0), room, 0).clamp(min=0)
        widths = torch.minimum(widths, width_limits.clamp(min=1))
        depths = torch.minimum(depths, room)
        # More nodes than levels make no chain.
        nodes = torch.where(widths == 1, torch.minimum(nodes, depths), nodes)
        nodes = torch.minimum(nodes, (self.max_model_len - 1 - sample_src_positions).clamp(min=0))
        for buffer, value in ((self.depths, depths), (self.widths, widths), (self.nodes, nodes)):
            buffer[:num_reqs] = value
        # Padding has no context to attend to.
        self.root_positions[:num_reqs] = torch.where(idx_mapping >= 0, sample_src_positions, 0)
        growth = self.growth.first(num_reqs)
        grow_level(growth, logits, first=True, **self._limits(num_reqs))
        return growth.tokens[:, 0].clamp(min=0)

    def _limits(self, num_reqs: int) -> dict[str, Any]:
        return dict(
            depths=self.depths[:num_reqs],
            widths=self.widths[:num_reqs],
            nodes=self.nodes[:num_reqs],
            target_ids=self.target_ids,
        )

    def _draft_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """``[num_rows, draft_vocab]`` in the draft's own vocabulary."""
        if self.target_ids is None:
            return self.model.compute_logits(hidden_states)
        return self.model.logits_processor(self.model.lm_head, hidden_states)

    def _grow(self, num_reqs: int, num_levels: int, is_profile: bool, skip_attn: bool) -> None:
        """Run the draft model level by level; the first level is grown already."""
        width = self.max_width
        desc, _ = dispatch_cg_and_sync_dp(
            self.decode_cudagraph_manager,
            num_reqs,
            num_reqs * width,
            uniform_token_count=width,
            dp_size=self.dp_size,
            dp_rank=self.dp_rank,
            need_eager=is_profile,
        )
        for _ in range(1, num_levels):
            if desc.cg_mode == CUDAGraphMode.FULL:
                self.decode_cudagraph_manager.run_fullgraph(desc)
            else:
                metadata = None if skip_attn else self._level_metadata(num_reqs, self.draft_max_seq_len)
                self._run_level(num_reqs, metadata)

    def _generate_draft(self, num_reqs: int, *args: Any, **kwargs: Any) -> None:
        """What vLLM captures for the draft's decoding steps: one level for ``num_reqs`` requests."""
        self._run_level(num_reqs, self._level_metadata(num_reqs, self.max_model_len))

    def _level_metadata(self, num_reqs: int, max_context: int) -> dict[str, LevelBatch]:
        growth = self.growth.first(num_reqs)
        fed = (growth.num_fed - growth.frontier_size)[:, None] + self.level_slots
        used = self.level_slots < growth.frontier_size[:, None]
        fed_rows = torch.where(used, self.first_fed[:num_reqs] + fed, self.spare_row).flatten()
        return {
            name: LevelBatch(
                block_table=self.block_tables.input_block_tables[self.kv_groups[name]][:num_reqs],
                context_lens=self.root_positions[:num_reqs],
                query_starts=self.level_starts[: num_reqs + 1],
                node_starts=self.node_starts[: num_reqs + 1],
                masks=growth.frontier_masks.flatten(),
                fed_rows=fed_rows,
                scratch=self.scratch,
                max_queries=self.max_width,
                max_nodes=self.max_fed,
                max_context=max_context,
            )
            for name in self.draft_layers
        }

    def _run_level(self, num_reqs: int, metadata: dict[str, LevelBatch] | None) -> None:
        """Feed every request's frontier, and grow its children.

        Unused frontier slots are rows like the others, whose outputs nobody reads.
        """
        rows = num_reqs * self.max_width
        growth = self.growth.first(num_reqs)
        buffers = self.input_buffers
        buffers.input_ids[:rows] = growth.frontier_tokens.flatten()
        # The first pass ended one position before the root's; level l is fed l positions further.
        positions = (self.root_positions[:num_reqs] - 1 + growth.levels).clamp(0, self.max_draft_position - 1)
        buffers.positions[:rows] = positions[:, None].expand(-1, self.max_width).reshape(-1)
        self.hidden_states[:rows] = self.hidden_states.index_select(0, growth.frontier_rows.flatten())
        last_hidden, hidden = self._run_model(rows, metadata, {}, num_tokens_across_dp=None)
        self.hidden_states[:rows] = hidden[:rows]
        grow_level(growth, self._draft_logits(last_hidden[:rows]), first=False, **self._limits(num_reqs))
