"""The throughput policy in the V1 runner: whom to draft for, what the draft reads first, and what everything took."""

from __future__ import annotations

import statistics
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from ..core.costs import Batch
from ..core.policy import TreeShape
from ..core.throughput import WIDTH, ThroughputPolicy
from ..core.valued_growth import DraftRequest, ValuedGrowth
from .backlog import DraftBacklog, Reading, metadata_of, passes
from .state import Candidate

if TYPE_CHECKING:
    from .proposer import TreeProposer
    from .runner import AdaptiveSpecModelRunner

LEAST_ROOM = 3
"""Levels that must fit into the tail block for a tree; with less room a longer chain is the better draft."""
GAPS = 15
"""Times between steps (scheduling, output) whose median counts: an idle engine's wait is no cost."""


class StepClock:
    """Times a step's parts, and gives them to the cost model."""

    def __init__(self, policy: ThroughputPolicy) -> None:
        self.costs = policy.costs
        self.gaps: deque[float] = deque([0.0], maxlen=GAPS)
        self.start = self.end = 0.0
        self.batch = Batch(0, 0)
        self.rows = 0
        self.with_prompts = False
        self.levels = 0.0

    def begin(self, batch: Batch, rows: int, with_prompts: bool) -> None:
        """The target's pass begins."""
        self.start = time.perf_counter()
        if self.end:
            self.gaps.append(self.start - self.end)
        self.batch, self.rows, self.with_prompts = batch, rows, with_prompts

    def decided(self) -> None:
        """The target's pass is over and it is known for whom to draft."""
        self.draft_start = time.perf_counter()
        self.levels = 0.0
        if self.rows:
            seconds = self.draft_start - self.start + statistics.median(self.gaps)
            self.costs.observe_target(self.batch, self.rows, seconds, self.with_prompts)

    def level(self, rows: int, seconds: float) -> None:
        """A draft level has run."""
        self.levels += seconds
        self.costs.observe_level(rows, seconds)

    def finish(self, first_pass_rows: int) -> None:
        """Drafting is over; ``first_pass_rows`` is 0 where there was none."""
        self.end = time.perf_counter()
        if first_pass_rows:
            self.costs.observe_first_pass(first_pass_rows, self.end - self.draft_start - self.levels)


class ThroughputDrafter:
    """What the proposer does differently under the throughput policy."""

    def __init__(self, runner: AdaptiveSpecModelRunner, policy: ThroughputPolicy, backlog: DraftBacklog) -> None:
        self.runner = runner
        self.policy = policy
        self.backlog = backlog
        self.clock = StepClock(policy)
        self.views: list[DraftRequest] = []

    # ---- around the target's pass ----

    def begin_step(self, scheduler_output: Any) -> None:
        """Start the step's clock."""
        scheduled = scheduler_output.num_scheduled_tokens
        drafts = scheduler_output.scheduled_spec_decode_tokens
        rows = scheduler_output.total_num_scheduled_tokens
        cached = scheduler_output.scheduled_cached_reqs
        with_prompts = any(n != 1 + len(drafts.get(request, ())) for request, n in scheduled.items())
        self.clock.begin(Batch(len(scheduled), sum(cached.num_computed_tokens)), rows, with_prompts)

    # ---- for whom ----

    def choose(self, candidates: list[Candidate]) -> list[Candidate]:
        """Those candidates that the policy drafts for, with limits as it uses them."""
        batch = self.runner.input_batch
        usable: list[Candidate] = []
        views: list[DraftRequest] = []
        for candidate in candidates:
            missing = self._first_missing(candidate)
            if missing is None:
                continue
            speculation, limits = candidate.speculation, self._limits(candidate)
            usable.append(replace(candidate, limits=limits))
            pending = self.runner.root_position(candidate.request) - missing
            remaining = self.runner.most_remaining(candidate.request, candidate.request_id)
            views.append(DraftRequest(speculation.outcomes, 1.0 - speculation.rule.kappa, limits, pending, remaining))
        decoding = batch.num_reqs - int(np.count_nonzero(self.runner.discard_request_mask.np[: batch.num_reqs]))
        context = int(batch.num_tokens_no_spec[: batch.num_reqs].sum())
        taken = self.policy.participants(Batch(max(decoding, 1), context), views)
        for i in taken:
            # Others may have taken branch blocks since the limits were made.
            candidate = usable[i] = replace(usable[i], limits=self._limits(usable[i]))
            views[i].limits = candidate.limits
            width = min(candidate.limits.width, candidate.limits.nodes)
            if width > 1:
                self.runner.branches.ensure(candidate.request_id, width - 1)
        self.views = [views[i] for i in taken]
        self.clock.decided()
        return [usable[i] for i in taken]

    def _limits(self, candidate: Candidate) -> TreeShape:
        """A candidate's limits, with a tree's that fits into the tail block or else a chain's."""
        limits, runner = candidate.limits, self.runner
        width = min(limits.width, WIDTH, 1 + runner.branches.available(candidate.request_id))
        room = runner.block_size - 1 - runner.root_position(candidate.request) % runner.block_size
        depth = limits.depth
        if width > 1 and room < min(depth, LEAST_ROOM):
            width = 1
        if width > 1:
            depth = min(depth, room)
        return TreeShape(depth, width, limits.nodes if width > 1 else min(limits.nodes, depth))

    def _slots(self, request: int, start: int, end: int) -> np.ndarray:
        """Cache slots of a request's positions."""
        positions = np.arange(start, end)
        table = self.runner.input_batch.block_table[0].block_table.np[request]
        return table[positions // self.runner.block_size].astype(np.int64) * self.runner.block_size + (
            positions % self.runner.block_size
        )

    def _first_missing(self, candidate: Candidate) -> int | None:
        """The first position of a request that the draft has not read; None if it can never read all."""
        speculation = candidate.speculation
        if speculation.draft_read is None:
            # Before this step's rows, which are at hand.
            computed = int(self.runner.input_batch.num_computed_tokens_cpu[candidate.request])
            speculation.draft_read = self.backlog.missing_from(self._slots(candidate.request, 0, computed))
            if speculation.draft_read is None:
                speculation.draft_read = -1
        return None if speculation.draft_read < 0 else speculation.draft_read

    # ---- the draft's first pass ----

    def first_pass(
        self, proposer: TreeProposer, candidates: list[Candidate], kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Let the draft read what it needs of the candidates' tokens, and keep what it does not read.

        Returns:
            Its outputs at the candidates' roots, ``[len(candidates), hidden_size]`` each: for the logits, and for the
            next level.
        """
        common: CommonAttentionMetadata = kwargs["common_attn_metadata"]
        states: torch.Tensor = kwargs["target_hidden_states"]
        slots = common.slot_mapping[: len(states)]
        readings = [
            Reading(c.request, c.speculation.draft_read or 0, self.runner.root_position(c.request)) for c in candidates
        ]
        starts = common.query_start_loc_cpu.tolist()
        fresh = [starts[r.request + 1] - starts[r.request] == r.end - r.start for r in readings]
        if all(fresh) and len(readings) == common.num_reqs:
            proposer.stock_first_pass(kwargs)
            last_hidden, hidden = proposer.take_first_pass()
            roots = torch.tensor([end - 1 for end in starts[1:]])
            outputs = last_hidden[roots], hidden[roots]
            self.backlog.cached(slots)
        else:
            self.backlog.keep(slots, states)
            outputs = self._read(proposer, readings, kwargs)
        for candidate, reading in zip(candidates, readings, strict=True):
            candidate.speculation.draft_read = reading.end
        return outputs

    def skip(self, kwargs: dict[str, Any]) -> None:
        """Nothing is drafted: keep this step's hidden states."""
        states: torch.Tensor = kwargs["target_hidden_states"]
        self.backlog.keep(kwargs["common_attn_metadata"].slot_mapping[: len(states)], states)

    def _read(
        self, proposer: TreeProposer, readings: list[Reading], kwargs: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the draft over kept states; see ``first_pass``."""
        tokens = self.runner.input_batch.token_ids_cpu
        ends = {reading.request: reading.end for reading in readings}
        roots: list[tuple[torch.Tensor, torch.Tensor]] = []
        for part in passes(readings, proposer.max_num_tokens):
            slots = torch.from_numpy(np.concatenate([self._slots(r.request, r.start, r.end) for r in part]))
            metadata = metadata_of(part, slots, kwargs["common_attn_metadata"])
            proposer.stock_first_pass(
                kwargs
                | {
                    "target_token_ids": torch.from_numpy(
                        np.concatenate([tokens[r.request, r.start : r.end] for r in part])
                    ),
                    "target_positions": torch.from_numpy(np.concatenate([np.arange(r.start, r.end) for r in part])),
                    "target_hidden_states": self.backlog.states[slots],
                    "next_token_ids": torch.from_numpy(np.array([tokens[r.request, r.end] for r in part])),
                    "common_attn_metadata": metadata,
                },
            )
            last_hidden, hidden = proposer.take_first_pass()
            last = metadata.query_start_loc_cpu[1:].tolist()
            finished = [end - 1 for r, end in zip(part, last, strict=True) if r.end == ends[r.request]]
            done = torch.tensor(finished, dtype=torch.int64)
            roots.append((last_hidden[done], hidden[done]))
            self.backlog.cached(slots)
        return torch.cat([a for a, _ in roots]), torch.cat([b for _, b in roots])

    # ---- the trees ----

    def open(self) -> list[ValuedGrowth]:
        """The trees of the chosen candidates, in their order."""
        return self.policy.open(self.views)

    @property
    def rows_to_read(self) -> int:
        """Tokens the first pass reads for the chosen candidates."""
        return sum(view.pending for view in self.views)
