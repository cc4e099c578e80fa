"""Drafting: vLLM's EAGLE-3 first pass over the accepted tokens, then a tree grown level by level."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.eagle import EagleProposer

from ..core.growth import TreeGrowth
from ..core.tree import DraftTree
from .attention import BranchWriter, BranchWrites, KeyValue
from .branch_blocks import RequestBranches
from .state import RequestSpeculation

if TYPE_CHECKING:
    from .runner import AdaptiveSpecModelRunner


@dataclass
class Drafting:
    """One request whose tree is growing.

    Args:
        request: its index in the batch.
        position: of its last accepted token; the draft's cache holds everything up to there.
        cached_row: of each candidate fed to the draft, its row in the recorded keys and values.
        hidden_row: of each candidate fed last, its row in the last pass's output.
        beams: for each path block (0: the request's own), the candidate that lies at each depth.
    """

    request: int
    request_id: str
    speculation: RequestSpeculation
    position: int
    growth: TreeGrowth
    branches: RequestBranches | None = None
    cached_row: dict[int, int] = field(default_factory=dict)
    hidden_row: dict[int, int] = field(default_factory=dict)
    beams: list[dict[int, int]] = field(default_factory=list)

    def assign_beams(self) -> list[int]:
        """A path block for each frontier node: its parent's where that is free, so that least is written again."""
        growth = self.growth
        taken: dict[int, int] = {}
        for index, beam in enumerate(self.beams):
            for node in growth.frontier:
                if node not in taken and beam.get(growth.level - 1) == growth.parents[node]:
                    taken[node] = index
                    break
        free = [b for b in range(len(self.beams)) if b not in taken.values()]
        for node in growth.frontier:
            if node not in taken:
                taken[node] = free.pop(0)
        return [taken[node] for node in growth.frontier]


class TreeProposer(EagleProposer):
    """Replaces vLLM's EAGLE proposer; becomes one by having its class set on the stock object."""

    runner: AdaptiveSpecModelRunner

    def init_adaptivespec(self, runner: AdaptiveSpecModelRunner, writer: BranchWriter) -> None:
        """Call once the draft model is loaded."""
        self.runner = runner
        self.branch_writer = writer
        self.first_pass: tuple[torch.Tensor, torch.Tensor] | None = None
        self.model.register_forward_hook(self._keep_output)
        mapping = getattr(self.model, "draft_id_to_target_id", None)
        self.target_ids = None if mapping is None else torch.arange(mapping.numel()) + mapping.data
        draft_config = self.draft_model_config
        self.max_draft_position = min(draft_config.max_model_len or self.max_model_len, self.max_model_len)

    def _keep_output(self, module: Any, args: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.first_pass = output

    def _set_positions(self, num_tokens: int, positions: torch.Tensor) -> None:
        """Keep positions within the head's range; requests beyond it get no drafts, so what is cached is not used."""
        super()._set_positions(num_tokens, positions.clamp(max=self.max_draft_position - 1))

    def prepare_inputs(
        self,
        common_attn_metadata: CommonAttentionMetadata,
        sampled_token_ids: list[list[int]],
        num_draft_tokens: list[int],
    ) -> tuple[CommonAttentionMetadata, torch.Tensor]:
        """The rows the draft's first pass reads: all but the drafted ones, and those of the accepted path.

        The counts are the stock ones; only which rows they name differs, and their slots, which follow the path.
        """
        metadata, rows = super().prepare_inputs(common_attn_metadata, sampled_token_ids, num_draft_tokens)
        slots = self.runner.chain_slots[rows]
        ends = metadata.query_start_loc_cpu.tolist()
        for step in self.runner.step_trees:
            if step.accepted:
                end = ends[step.request + 1]
                path_rows = [step.root_row + 1 + node for node in step.accepted]
                rows[end - len(path_rows) : end] = torch.tensor(path_rows, dtype=rows.dtype)
        metadata.slot_mapping = slots
        return metadata, rows

    def propose(self, num_speculative_tokens: int, *args: Any, **kwargs: Any) -> list[list[int]]:
        """Draft one tree per request.

        Returns:
            Node tokens of each request in batch order, empty where nothing is drafted. The trees themselves stay with
            the runner until vLLM schedules their tokens.
        """
        metadata: CommonAttentionMetadata = kwargs["common_attn_metadata"]
        # With nothing to draft, the stock method runs the first pass, which keeps the draft's cache complete.
        super().propose(0, *args, **kwargs)
        self.num_speculative_tokens = num_speculative_tokens
        assert self.first_pass is not None
        last_hidden, hidden = self.first_pass
        self.first_pass = None
        ends = (metadata.query_start_loc_cpu[1:] - 1).tolist()
        drafted: list[list[int]] = [[] for _ in ends]
        draftings = self._start(last_hidden, ends)
        if draftings:
            roots = torch.tensor([ends[d.request] for d in draftings])
            self._grow(draftings, hidden[roots], metadata)
        for drafting in draftings:
            tree = self._finish(drafting)
            drafting.speculation.tree = tree
            drafted[drafting.request] = list(tree.tokens)
        return drafted

    def _start(self, last_hidden: torch.Tensor, ends: list[int]) -> list[Drafting]:
        """Decide each request's shape from its root distribution and take the first level."""
        runner = self.runner
        candidates = []
        for i, request_id in enumerate(runner.input_batch.req_ids):
            speculation = runner.speculation[request_id]
            speculation.tree = None
            limits = runner.draft_limits(i, request_id)
            if limits.depth > 0:
                candidates.append((i, request_id, speculation, limits))
        if not candidates:
            return []
        widest = max(limits.width for *_, limits in candidates)
        # A level's rows must fit into the draft model's buffers.
        widest = min(widest, max(self.max_num_tokens // len(candidates), 1))
        log_probs, tokens = self._children(last_hidden[torch.tensor([ends[c[0]] for c in candidates])], widest)
        draftings = []
        for row, (i, request_id, speculation, limits) in enumerate(candidates):
            confidence = float(torch.tensor(log_probs[row][0]).exp())
            shape = runner.policy.shape(confidence, speculation.history)
            width = min(limits.width, widest, 1 + runner.branches.available(request_id))
            shape = shape.clipped(depth=limits.depth, width=width, nodes=limits.nodes)
            base = runner.root_position(i)
            if shape.width > 1 and base % self.block_size + shape.depth >= self.block_size:
                # A tree must fit into the tail block, which its branches stand in for.
                shape = replace(shape, width=1)
            if shape.width == 1:
                shape = replace(shape, nodes=min(shape.nodes, shape.depth))
            drafting = Drafting(i, request_id, speculation, base - 1, TreeGrowth(shape))
            if shape.width > 1:
                drafting.branches = runner.branches.ensure(request_id, min(shape.width, shape.nodes) - 1)
            drafting.beams = [{} for _ in range(min(shape.width, shape.nodes))]
            drafting.growth.expand([log_probs[row]], [tokens[row]])
            draftings.append(drafting)
        return draftings

    def _finish(self, drafting: Drafting) -> DraftTree:
        tree = drafting.growth.tree()
        if not tree.is_chain:
            branches = self.runner.branches
            tree = tree.limit_leaves(1 + branches.available(drafting.request_id))
            branches.ensure(drafting.request_id, len(tree.leaves) - 1)
        return tree

    def _grow(self, draftings: list[Drafting], hidden: torch.Tensor, metadata: CommonAttentionMetadata) -> None:
        """Run the draft model level by level until no tree has a node worth expanding.

        Args:
            hidden: ``[len(draftings), hidden_size]`` the head's own hidden states at the roots.
        """
        for row, drafting in enumerate(draftings):
            drafting.hidden_row = dict.fromkeys(drafting.growth.frontier, row)
        history: dict[str, list[KeyValue]] = {}
        cached_rows = 0
        self._copy_tails(draftings, metadata)
        while growing := [d for d in draftings if d.growth.frontier]:
            rows = [
                (d, node, beam) for d in growing for node, beam in zip(d.growth.frontier, d.assign_beams(), strict=True)
            ]
            last_hidden, hidden = self._run_level(rows, hidden, metadata, history, cached_rows)
            widest = max(d.growth.shape.width for d in growing)
            log_probs, tokens = self._children(last_hidden, widest)
            offset = 0
            for drafting in growing:
                frontier = drafting.growth.frontier
                rows_of = {node: offset + r for r, node in enumerate(frontier)}
                drafting.cached_row.update((node, cached_rows + row) for node, row in rows_of.items())
                end = offset + len(frontier)
                drafting.growth.expand(log_probs[offset:end], tokens[offset:end])
                drafting.hidden_row = {n: rows_of[drafting.growth.parents[n]] for n in drafting.growth.frontier}
                offset = end
            cached_rows += len(rows)

    def _copy_tails(self, draftings: list[Drafting], metadata: CommonAttentionMetadata) -> None:
        """Give the branch blocks the draft layers' committed tail, on which the levels' attention builds."""
        source, target = [], []
        for d in draftings:
            tail, filled = divmod(d.position + 1, self.block_size)
            if d.branches is not None and d.growth.frontier and filled:
                blocks = d.branches.blocks[: len(d.beams) - 1]
                source += [int(metadata.block_table_tensor[d.request, tail])] * len(blocks)
                target += blocks
        if source:
            self.runner.draft_cache.copy_blocks(source, target)

    def _run_level(
        self,
        rows: list[tuple[Drafting, int, int]],
        hidden: torch.Tensor,
        metadata: CommonAttentionMetadata,
        history: dict[str, list[KeyValue]],
        cached_rows: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass of the draft model over (request, node, path block) rows.

        Args:
            hidden: outputs that the nodes' ``hidden_row`` point into.
            history: keys and values of the levels before, ``cached_rows`` rows in all.

        Returns:
            The pass's outputs, ``[len(rows), hidden_size]`` each: for the logits, and for the next level.
        """
        block_table = metadata.block_table_tensor
        block_size = self.block_size
        ids, positions, hidden_rows, slots = [], [], [], []
        write_rows, write_slots = [], []
        branch_rows, branch_tails, branch_blocks = [], [], []
        for row, (d, node, beam) in enumerate(rows):
            level = d.growth.level
            if beam:
                assert d.branches is not None
                block = d.branches.blocks[beam - 1]
                tail = (d.position + 1) // block_size
                branch_rows.append(row)
                branch_tails.append(tail)
                branch_blocks.append(block)
            lies = d.beams[beam]
            for depth, ancestor in enumerate(d.growth.path(node), 1):
                position = d.position + depth
                if not beam:
                    block = int(block_table[d.request, position // block_size])
                slot = block * block_size + position % block_size
                if depth == level:
                    slots.append(slot)
                elif lies.get(depth) != ancestor:
                    write_rows.append(d.cached_row[ancestor])
                    write_slots.append(slot)
                lies[depth] = ancestor
            ids.append(d.growth.tokens[node])
            positions.append(d.position + level)
            hidden_rows.append(d.hidden_row[node])

        num_rows = len(rows)
        table = block_table[torch.tensor([d.request for d, _, _ in rows])]
        if branch_rows:
            table[branch_rows, branch_tails] = torch.tensor(branch_blocks, dtype=table.dtype)
        lengths = torch.tensor(positions, dtype=torch.int32) + 1
        starts = torch.arange(num_rows + 1, dtype=torch.int32)
        slot_mapping = torch.tensor(slots)
        level_metadata = replace(
            metadata,
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=lengths,
            seq_lens_cpu_upper_bound=lengths,
            num_reqs=num_rows,
            num_actual_tokens=num_rows,
            max_query_len=1,
            max_seq_len=max(positions) + 1,
            block_table_tensor=table,
            slot_mapping=slot_mapping,
            is_prefilling=None,
        )
        _, per_layer = self.build_per_group_and_layer_attn_metadata(level_metadata)
        mode, num_input_tokens, num_tokens_across_dp = self._determine_batch_execution_and_padding(num_rows)
        self.input_ids[:num_rows] = torch.tensor(ids, dtype=torch.int32)
        self.positions[:num_rows] = torch.tensor(positions)
        self.hidden_states[:num_rows] = hidden[torch.tensor(hidden_rows)]
        model_kwargs, slot_mapping_size = self.build_model_inputs_first_pass(num_rows, num_input_tokens, None)
        self.branch_writer.writes = BranchWrites(
            torch.tensor(write_rows, dtype=torch.int64),
            torch.tensor(write_slots, dtype=torch.int64),
            history,
            record=True,
        )
        try:
            with set_forward_context(
                per_layer,
                self.vllm_config,
                num_tokens=num_input_tokens,
                num_tokens_across_dp=num_tokens_across_dp,
                cudagraph_runtime_mode=mode,
                slot_mapping=self._get_slot_mapping(slot_mapping_size, slot_mapping),
            ):
                last_hidden, next_hidden = self.model(**model_kwargs)
        finally:
            self.branch_writer.writes = None
        return last_hidden[:num_rows], next_hidden[:num_rows]

    def _children(self, last_hidden: torch.Tensor, width: int) -> tuple[list[list[float]], list[list[int]]]:
        """The ``width`` likeliest next tokens of each row, best first, from the draft's own vocabulary.

        Args:
            last_hidden: ``[num_rows, hidden_size]``.

        Returns:
            Log-probabilities and target-vocabulary ids, ``[num_rows][width]``.
        """
        if self.target_ids is None:
            logits = self.model.compute_logits(last_hidden)
        else:
            logits = self.model.logits_processor(self.model.lm_head, last_hidden)
        logits = logits.to(torch.float32)
        values, ids = logits.topk(min(width, logits.shape[-1]), dim=-1)
        # Rounding must not make a child likelier than its parent, nor NaN undo the order of nodes.
        log_probs = (values - logits.logsumexp(dim=-1, keepdim=True)).clamp(max=0.0).nan_to_num(nan=-torch.inf)
        if self.target_ids is not None:
            ids = self.target_ids[ids]
        return log_probs.tolist(), ids.tolist()
