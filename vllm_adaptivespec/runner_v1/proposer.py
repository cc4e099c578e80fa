"""Drafting: vLLM's EAGLE-3 first pass over the accepted tokens, then a tree grown level by level."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.eagle import EagleProposer

from ..core.growth import TreeGrowth
from ..core.valued_growth import ValuedGrowth
from .attention import BranchWriter, BranchWrites, KeyValue
from .branch_blocks import RequestBranches
from .state import Candidate, RequestSpeculation

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
        tails_copied: branch blocks that have the committed tail.
    """

    request: int
    request_id: str
    speculation: RequestSpeculation
    position: int
    growth: TreeGrowth | ValuedGrowth
    branches: RequestBranches | None = None
    cached_row: dict[int, int] = field(default_factory=dict)
    hidden_row: dict[int, int] = field(default_factory=dict)
    beams: list[dict[int, int]] = field(default_factory=list)
    tails_copied: int = 0

    def assign_beams(self) -> list[int]:
        """A path block for each frontier node: its parent's where that is free, so that least is written again."""
        growth = self.growth
        while len(self.beams) < len(growth.frontier):
            self.beams.append({})
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


def valued(draftings: Sequence[Drafting]) -> list[ValuedGrowth]:
    """Their trees, under the throughput policy."""
    return [d.growth for d in draftings if isinstance(d.growth, ValuedGrowth)]


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

    def propose(self, num_speculative_tokens: int, **kwargs: Any) -> list[list[int]]:
        """Draft one tree per request.

        Returns:
            Node tokens of each request in batch order, empty where nothing is drafted. The trees themselves stay with
            the runner until vLLM schedules their tokens.
        """
        metadata: CommonAttentionMetadata = kwargs["common_attn_metadata"]
        runner = self.runner
        candidates = self._candidates()
        throughput = runner.throughput
        if throughput is not None:
            candidates = throughput.choose(candidates)
            if candidates:
                last_hidden, hidden = throughput.first_pass(self, candidates, kwargs)
            else:
                throughput.skip(kwargs)
        else:
            self.stock_first_pass(kwargs)
            last_hidden, hidden = self.take_first_pass()
            roots = (metadata.query_start_loc_cpu[1:] - 1)[[c.request for c in candidates]]
            last_hidden, hidden = last_hidden[roots], hidden[roots]
        self.num_speculative_tokens = num_speculative_tokens
        drafted: list[list[int]] = [[] for _ in runner.input_batch.req_ids]
        if candidates:
            draftings = self._start(candidates, last_hidden)
            self._grow(draftings, hidden, metadata)
            if throughput is not None:
                throughput.policy.select(valued(draftings))
            for drafting in draftings:
                drafted[drafting.request] = self._finish(drafting)
        if throughput is not None:
            throughput.clock.finish(throughput.rows_to_read if candidates else 0)
        return drafted

    def stock_first_pass(self, kwargs: dict[str, Any]) -> None:
        """With nothing to draft, the stock method runs the first pass, which keeps the draft's cache complete."""
        super().propose(0, **kwargs)

    def take_first_pass(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs of the first pass that just ran, ``[num_rows, hidden_size]``: for logits, and for the next level."""
        assert self.first_pass is not None
        outputs, self.first_pass = self.first_pass, None
        return outputs

    def _candidates(self) -> list[Candidate]:
        """The requests that may be drafted for, with their limits."""
        runner = self.runner
        candidates = []
        for i, request_id in enumerate(runner.input_batch.req_ids):
            speculation = runner.speculation[request_id]
            speculation.tree = speculation.drafted = None
            limits = runner.draft_limits(i, request_id)
            if limits.depth > 0:
                candidates.append(Candidate(i, request_id, speculation, limits))
        return candidates

    def _start(self, candidates: list[Candidate], last_hidden: torch.Tensor) -> list[Drafting]:
        """Start every candidate's tree and take its first level.

        Args:
            last_hidden: ``[len(candidates), hidden_size]`` at the roots.
        """
        runner = self.runner
        widest = max(c.limits.width for c in candidates)
        # A level's rows must fit into the draft model's buffers.
        widest = min(widest, max(self.max_num_tokens // len(candidates), 1))
        log_probs, tokens = self._children(last_hidden, widest)
        growths: Sequence[TreeGrowth | ValuedGrowth]
        if runner.throughput is not None:
            growths = runner.throughput.open()
        else:
            growths = [
                self._shaped_growth(c, widest, float(torch.tensor(row[0]).exp()))
                for c, row in zip(candidates, log_probs, strict=True)
            ]
        draftings = []
        for row, (candidate, growth) in enumerate(zip(candidates, growths, strict=True)):
            position = runner.root_position(candidate.request) - 1
            growth.expand([log_probs[row]], [tokens[row]])
            draftings.append(Drafting(candidate.request, candidate.request_id, candidate.speculation, position, growth))
        if runner.throughput is not None:
            runner.throughput.policy.assess(valued(draftings))
        return draftings

    def _shaped_growth(self, candidate: Candidate, widest: int, confidence: float) -> TreeGrowth:
        """A tree whose shape is decided from its root's distribution."""
        runner, limits = self.runner, candidate.limits
        assert runner.policy is not None
        shape = runner.policy.shape(confidence, candidate.speculation.history)
        width = min(limits.width, widest, 1 + runner.branches.available(candidate.request_id))
        shape = shape.clipped(depth=limits.depth, width=width, nodes=limits.nodes)
        base = runner.root_position(candidate.request)
        if shape.width > 1 and base % self.block_size + shape.depth >= self.block_size:
            # A tree must fit into the tail block, which its branches stand in for.
            shape = replace(shape, width=1)
        if shape.width == 1:
            shape = replace(shape, nodes=min(shape.nodes, shape.depth))
        else:
            # Now, before the next request counts what is left.
            runner.branches.ensure(candidate.request_id, min(shape.width, shape.nodes) - 1)
        return TreeGrowth(shape)

    def _finish(self, drafting: Drafting) -> list[int]:
        """Hand the tree over to the request; returns its tokens."""
        growth, speculation = drafting.growth, drafting.speculation
        tree = growth.tree()
        if not len(tree):
            return []
        nodes: Sequence[int] = range(len(tree))
        if not tree.is_chain:
            branches = self.runner.branches
            nodes = tree.within_leaves(1 + branches.available(drafting.request_id))
            tree = tree.subset(nodes)
            branches.ensure(drafting.request_id, len(tree.leaves) - 1)
        speculation.tree = tree
        if isinstance(growth, ValuedGrowth):
            speculation.drafted = growth.drafted().subset(nodes)
        return list(tree.tokens)

    def _grow(self, draftings: list[Drafting], hidden: torch.Tensor, metadata: CommonAttentionMetadata) -> None:
        """Run the draft model level by level until no tree has a node worth expanding.

        Args:
            hidden: ``[len(draftings), hidden_size]`` the head's own hidden states at the roots.
        """
        for row, drafting in enumerate(draftings):
            drafting.hidden_row = dict.fromkeys(drafting.growth.frontier, row)
        history: dict[str, list[KeyValue]] = {}
        cached_rows = 0
        throughput = self.runner.throughput
        while growing := [d for d in draftings if d.growth.frontier]:
            start = time.perf_counter()
            rows = [
                (d, node, beam) for d in growing for node, beam in zip(d.growth.frontier, d.assign_beams(), strict=True)
            ]
            self._copy_tails(growing, metadata)
            last_hidden, hidden = self._run_level(rows, hidden, metadata, history, cached_rows)
            widest = max(d.growth.shape.width for d in growing)
            log_probs, tokens = self._children(last_hidden, widest)
            offset = 0
            rows_of: list[dict[int, int]] = []
            for drafting in growing:
                frontier = drafting.growth.frontier
                rows_of.append({node: offset + r for r, node in enumerate(frontier)})
                drafting.cached_row.update((node, cached_rows + row) for node, row in rows_of[-1].items())
                end = offset + len(frontier)
                drafting.growth.expand(log_probs[offset:end], tokens[offset:end])
                offset = end
            if throughput is not None:
                throughput.policy.assess(valued(draftings))  # all of them: nodes compete across requests
            for drafting, own in zip(growing, rows_of, strict=True):
                drafting.hidden_row = {n: own[drafting.growth.parents[n]] for n in drafting.growth.frontier}
            cached_rows += len(rows)
            if throughput is not None:
                throughput.clock.level(len(rows), time.perf_counter() - start)

    def _copy_tails(self, draftings: list[Drafting], metadata: CommonAttentionMetadata) -> None:
        """Give new beams a branch block with the draft layers' committed tail, on which the levels build."""
        source, target = [], []
        for d in draftings:
            branches = self.runner.branches.ensure(d.request_id, len(d.beams) - 1) if len(d.beams) > 1 else None
            tail, filled = divmod(d.position + 1, self.block_size)
            if branches is not None:
                blocks = branches.blocks[d.tails_copied : len(d.beams) - 1]
                if filled:
                    source += [int(metadata.block_table_tensor[d.request, tail])] * len(blocks)
                    target += blocks
                d.branches, d.tails_copied = branches, len(d.beams) - 1
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
