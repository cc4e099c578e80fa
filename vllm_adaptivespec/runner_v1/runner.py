"""The V1 model runner with trees: stages them before the target's pass, commits the accepted paths after it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.config import get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import SamplerOutput
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from ..config import AdaptiveSpecConfig
from ..core.branches import TRUNK
from ..core.policy import TreeShape
from ..core.stats import SpecStats
from ..core.throughput import ThroughputPolicy
from .attention import BranchWriter, BranchWrites, StackedCache, install
from .backlog import DraftBacklog
from .branch_blocks import BranchPool, why_no_branches, with_branch_blocks
from .proposer import TreeProposer
from .sampler import TreeSampler
from .state import RequestSpeculation, StepTree
from .throughput import ThroughputDrafter

logger = init_logger("vllm.adaptivespec")


class AdaptiveSpecModelRunner(CPUModelRunner):
    """Stock CPU runner whose drafts are trees. Becomes one by having its class set on the stock object."""

    drafter: TreeProposer
    rejection_sampler: TreeSampler

    def init_adaptivespec(self, config: AdaptiveSpecConfig) -> None:
        """Call right after construction; ``load_model`` finishes the set-up."""
        self.adaptivespec = config
        self.policy = None if config.tree_policy == "throughput" else config.policy()
        self.throughput: ThroughputDrafter | None = None
        self.stats = SpecStats()
        self.speculation: dict[str, RequestSpeculation] = {}
        self.step_trees: list[StepTree] = []
        self.hidden_generators: dict[int, torch.Generator] = {}
        self.num_branch_blocks = 0
        self.branches = BranchPool(0, 0)
        self.target_writer = BranchWriter()
        self.drafter.__class__ = TreeProposer
        self.rejection_sampler.__class__ = TreeSampler
        self.rejection_sampler.init_adaptivespec()

    # ---- set-up ----

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        layers = get_layers_from_vllm_config(self.vllm_config, Attention)
        draft_names = self.drafter._draft_attn_layer_names
        # Layers that share another's cache write nothing themselves.
        own_cache = {n: layer for n, layer in layers.items() if layer.impl.kv_sharing_target_layer_name is None}
        self.target_layers = {name: layer for name, layer in own_cache.items() if name not in draft_names}
        self.draft_layers = {name: layer for name, layer in own_cache.items() if name in draft_names}
        draft_writer = BranchWriter()
        install(self.target_layers, self.target_writer)
        install(self.draft_layers, draft_writer)
        self.drafter.init_adaptivespec(self, draft_writer)

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any) -> None:
        first_branch_block = kv_cache_config.num_blocks
        chains_only = why_no_branches(kv_cache_config)
        if chains_only is None:
            kv_cache_config = with_branch_blocks(kv_cache_config, self.num_branch_blocks)
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        block_size = kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        if any(size != block_size for size in self._kernel_block_sizes):
            chains_only = f"its attention kernel splits blocks of {block_size} tokens"
        if chains_only is None:
            try:
                self.target_cache, self.draft_cache = StackedCache(self.target_layers), StackedCache(self.draft_layers)
            except ValueError as error:
                chains_only = str(error)
        if chains_only is not None:
            logger.warning("adaptivespec drafts chains for this model: %s.", chains_only)
            self.num_branch_blocks = 0
        self.block_size = block_size
        self.branches = BranchPool(first_branch_block, self.num_branch_blocks)
        if self.adaptivespec.tree_policy == "throughput":
            backlog = DraftBacklog(first_branch_block * block_size, self.draft_state_size, self.dtype)
            self.throughput = ThroughputDrafter(self, ThroughputPolicy(), backlog)
        logger.info("adaptivespec set %d KV cache blocks aside for tree branches.", self.num_branch_blocks)

    @property
    def draft_state_size(self) -> int:
        """Hidden states of one token that the draft reads; call once the models are loaded."""
        layers = 1
        if self.use_aux_hidden_state_outputs:
            layers = len(
                self._get_eagle3_aux_layers_from_config() or self.model.get_eagle3_default_aux_hidden_state_layers()
            )
        return layers * self.model_config.get_hidden_size()

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if self.throughput is not None:
            self.throughput.begin_step(scheduler_output)
        return super().execute_model(scheduler_output, *args, **kwargs)

    # ---- requests ----

    def _update_states(self, scheduler_output: Any) -> Any:
        result = super()._update_states(scheduler_output)
        for new in scheduler_output.scheduled_new_reqs:
            self._forget(new.req_id)
            self.speculation[new.req_id] = RequestSpeculation.new(new.sampling_params, self.adaptivespec)
        interrupted = scheduler_output.preempted_req_ids or set()
        for request_id in interrupted | scheduler_output.scheduled_cached_reqs.resumed_req_ids:
            self.branches.release(request_id)
            if request_id in self.speculation:
                self.speculation[request_id].interrupt()
        return result

    def _on_request_state_removed(self, req_id: str, req_state: Any) -> None:
        super()._on_request_state_removed(req_id, req_state)
        self._forget(req_id)

    def _forget(self, request_id: str) -> None:
        self.speculation.pop(request_id, None)
        self.branches.release(request_id)

    def root_position(self, request: int) -> int:
        """Position of the newest token of a request, after bookkeeping: the root of its next tree."""
        return int(self.input_batch.num_tokens_no_spec[request]) - 1

    def most_remaining(self, request: int, request_id: str) -> int:
        """Tokens a request may still be asked for at most."""
        base = self.root_position(request)
        remaining = self.max_model_len - base  # the last of them is never fed
        max_tokens = self.speculation[request_id].max_tokens
        if max_tokens is not None:
            produced = base + 1 - int(self.input_batch.num_prompt_tokens[request])
            remaining = min(remaining, max_tokens - produced)
        return remaining

    def draft_limits(self, request: int, request_id: str) -> TreeShape:
        """What may be drafted for a request at most; depth 0 where nothing may."""
        speculation = self.speculation[request_id]
        nodes = self.adaptivespec.num_speculative_tokens
        base = self.root_position(request)
        # The draft's first pass ends at base - 1; level d is fed at base - 1 + d, the last level not at all.
        depth = min(nodes, self.max_model_len - 1 - base, self.drafter.max_draft_position - base)
        depth = min(depth, self.most_remaining(request, request_id) - 1)
        if not speculation.drafts or self.discard_request_mask.np[request]:
            depth = 0
        width = 1 if speculation.chain_only else nodes
        return TreeShape(max(depth, 0), width, min(nodes, max(self.max_model_len - 1 - base, 0)))

    # ---- before the target's pass ----

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: np.ndarray) -> Any:
        result = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        ends = np.cumsum(num_scheduled_tokens)
        self.step_trees = []
        rows: list[int] = []
        positions: list[int] = []
        for request_id, tokens in scheduler_output.scheduled_spec_decode_tokens.items():
            i = self.input_batch.req_id_to_index[request_id]
            speculation = self.speculation[request_id]
            tree = speculation.take_tree(tokens)
            root_row = int(ends[i]) - len(tree) - 1
            first = int(ends[i] - num_scheduled_tokens[i])
            base = int(self.input_batch.num_computed_tokens_cpu[i]) + root_row - first
            self.step_trees.append(StepTree(i, request_id, speculation, tree, root_row, base))
            rows += range(root_row + 1, root_row + 1 + len(tree))
            positions += [base + depth for depth in tree.depths]
        if rows:
            self.positions[torch.tensor(rows)] = torch.tensor(positions)
        return result

    def _get_slot_mappings(self, *args: Any, **kwargs: Any) -> Any:
        by_group, by_layer = super()._get_slot_mappings(*args, **kwargs)
        self.target_writer.writes = None
        if by_group is None or len(by_group) != 1:
            return by_group, by_layer
        slots = by_group[0]
        self.chain_slots = slots.clone()
        rows: list[int] = []
        sources: list[int] = []
        for step in self.step_trees:
            for node, depth in enumerate(step.tree.depths):
                if step.layout.path_of[node] == TRUNK:
                    rows.append(step.root_row + 1 + node)
                    sources.append(step.root_row + depth)
        trees = [step for step in self.step_trees if not step.tree.is_chain]
        for step in trees:
            # What is not on the trunk stays out of the request's blocks.
            slots[step.root_row + 1 : step.root_row + 1 + len(step.tree)] = -1
        if trees:
            slots[torch.tensor(rows)] = self.chain_slots[torch.tensor(sources)]
        self._stage_branches()
        return by_group, by_layer

    def _tail_block(self, step: StepTree) -> int:
        return int(self.input_batch.block_table[0].block_table.np[step.request, step.base // self.block_size])

    def _stage_branches(self) -> None:
        """Bring branch blocks up to date and say which rows' K/V this pass must write to them."""
        rows: list[int] = []
        slots: list[int] = []
        source: list[int] = []
        target: list[int] = []
        for step in self.step_trees:
            branches = self.branches.of(step.request_id)
            if branches is None or not branches.blocks:
                continue
            tail, offset = divmod(step.base, self.block_size)
            if not branches.in_sync(tail, step.base):
                if step.tree.is_chain:
                    continue
                if offset:
                    source += [self._tail_block(step)] * len(branches.blocks)
                    target += branches.blocks
            # Beyond its end lies somebody else's branch.
            assert step.tree.is_chain or offset + step.tree.depth < self.block_size
            step.branches = branches
            step.stash_start = len(rows)
            rows += range(step.root_row, step.root_row + 1 + len(step.tree))
            slots += [-1] * (1 + len(step.tree))
            for block in branches.blocks:
                rows.append(step.root_row)
                slots.append(block * self.block_size + offset)
            for write in step.layout.branch_writes():
                if write.depth:
                    rows.append(step.root_row + write.row)
                    slots.append(branches.blocks[write.path - 1] * self.block_size + offset + write.depth)
        if source:
            self.target_cache.copy_blocks(source, target)
        if rows:
            self.target_writer.writes = BranchWrites(torch.tensor(rows), torch.tensor(slots))

    def _build_attention_metadata(self, *args: Any, **kwargs: Any) -> Any:
        metadata, common = super()._build_attention_metadata(*args, **kwargs)
        if common is not None and any(not step.tree.is_chain for step in self.step_trees):
            by_path = self._split_by_path(common)
            for group in self.attn_groups[0]:
                group_metadata = group.build_metadata(by_path)
                for name in group.layer_names:
                    metadata[name] = group_metadata
        return metadata, common

    def _split_by_path(self, common: CommonAttentionMetadata) -> CommonAttentionMetadata:
        """The same rows as more sequences: one for each run of rows along one path of a tree."""
        trees = {step.request: step for step in self.step_trees if not step.tree.is_chain}
        starts = common.query_start_loc_cpu.tolist()
        totals = self.optimistic_seq_lens_cpu[: common.num_reqs].tolist()
        requests: list[int] = []
        lengths: list[int] = []
        totals_by_path: list[int] = []
        rows: list[int] = []
        tails: list[int] = []
        blocks: list[int] = []
        for i, (start, end) in enumerate(itertools.pairwise(starts)):
            step = trees.get(i)
            if step is None:
                requests.append(i)
                lengths.append(end - start)
                totals_by_path.append(totals[i])
                continue
            assert step.branches is not None
            before = step.root_row - start
            for run in step.layout.runs():
                if run.path != TRUNK:
                    rows.append(len(requests))
                    tails.append(step.base // self.block_size)
                    blocks.append(step.branches.blocks[run.path - 1])
                requests.append(i)
                lengths.append(before + run.num_rows)
                totals_by_path.append(step.base + run.depth + 1)
                before = 0
        table = common.block_table_tensor[torch.tensor(requests)]
        table[rows, tails] = torch.tensor(blocks, dtype=table.dtype)
        query_starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        seq_lens = torch.tensor(totals_by_path, dtype=torch.int32)
        return replace(
            common,
            query_start_loc=query_starts,
            query_start_loc_cpu=query_starts,
            seq_lens=seq_lens,
            seq_lens_cpu_upper_bound=seq_lens,
            num_reqs=len(requests),
            max_query_len=max(lengths),
            max_seq_len=max(totals_by_path),
            block_table_tensor=table,
            is_prefilling=None,
        )

    # ---- after it ----

    def _sample(self, logits: torch.Tensor | None, spec_decode_metadata: Any) -> SamplerOutput:
        self.target_writer.writes = None
        # Rows of unfinished prompts must not draw from their request's generator; vLLM would wind it back, which CPU
        # generators cannot do.
        generators = self.input_batch.generators
        discarded = np.nonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])[0].tolist()
        self.hidden_generators = {i: generators.pop(i) for i in discarded if i in generators}
        sampler = self.rejection_sampler
        sampler.trees = {step.request: step.tree for step in self.step_trees}
        sampler.rules = {step.request: step.speculation.rule for step in self.step_trees}
        output = super()._sample(logits, spec_decode_metadata)
        learned = []
        for step in self.step_trees:
            walk = sampler.walks[step.request]
            step.accepted = walk.path
            if step.tree.tokens[0] < 0:
                continue  # vLLM's placeholders for a request that was not drafted for
            step.speculation.history.observe(len(walk.path), step.tree.depth)
            self.stats.observe(walk)
            if step.speculation.drafted is not None:
                learned.append((step.speculation.outcomes, step.speculation.drafted, walk))
        if self.throughput is not None:
            self.throughput.policy.observe_walks(learned)
        self._commit()
        sampler.trees, sampler.rules = {}, {}
        return output

    def _commit(self) -> None:
        """Write the accepted paths' K/V to their final slots, and to the branches that mirror the tail block.

        Before the step returns: vLLM may hash and share these blocks right after it.
        """
        source: list[int] = []
        slots: list[int] = []
        for step in self.step_trees:
            branches = step.branches
            if branches is None:
                continue
            offset = step.base % self.block_size
            for depth, node in enumerate(step.accepted, 1):
                row = step.stash_start + 1 + node
                if step.layout.path_of[node] != TRUNK:
                    source.append(row)
                    slots.append(int(self.chain_slots[step.root_row + depth]))
                if offset + depth < self.block_size:
                    for block in branches.blocks:
                        source.append(row)
                        slots.append(block * self.block_size + offset + depth)
            branches.tail = step.base // self.block_size
            branches.synced_to = step.base + 1 + len(step.accepted)
        if not source:
            return
        self.target_cache.write(self.target_writer.stash, torch.tensor(source), torch.tensor(slots))

    def _bookkeeping_sync(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super()._bookkeeping_sync(*args, **kwargs)
        finally:
            self.input_batch.generators.update(self.hidden_generators)
            self.hidden_generators = {}

    def _input_fits_in_drafter(self, common_attn_metadata: CommonAttentionMetadata | None) -> bool:
        """Limits are kept per request, in ``draft_limits``: one long request must not stop the batch's drafting."""
        return common_attn_metadata is not None
