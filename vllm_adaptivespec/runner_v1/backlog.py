"""What the draft model has not seen yet: the target's hidden states, kept slot by slot until they are needed.

A token that is not drafted after is not run through the draft either. Its hidden states go to a store that is laid out
like the KV cache, so that blocks shared by prefix caching share it; before a request is drafted for again, the draft
runs over all its missing tokens at once, and its cache is then what it would be had it never slept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

UNKNOWN, KEPT, CACHED = 0, 1, 2
"""Of a slot: nothing is known of it; the target's states are kept; the draft's keys and values are in its cache."""


class DraftBacklog:
    """Hidden states by cache slot, and which slots the draft has in its own cache.

    Args:
        num_slots: slots of the scheduler's KV cache.
        state_size: hidden states of one token, all layers that the draft reads.
        dtype: the target's.
    """

    def __init__(self, num_slots: int, state_size: int, dtype: torch.dtype) -> None:
        # Memory that is never written is never touched: on CPUs it costs address space only.
        self.states = torch.empty(num_slots, state_size, dtype=dtype)
        self.known = np.zeros(num_slots, dtype=np.uint8)

    def keep(self, slots: torch.Tensor, states: torch.Tensor) -> None:
        """Keep ``[num_rows, state_size]`` states of tokens that the draft does not read now."""
        self.states[slots] = states
        self.known[slots.numpy()] = KEPT

    def cached(self, slots: torch.Tensor) -> None:
        """The draft has read the tokens of these slots."""
        self.known[slots.numpy()] = CACHED

    def missing_from(self, slots: np.ndarray) -> int | None:
        """How many leading tokens the draft has seen, of those in ``slots``; None if some can never be made up for."""
        known = self.known[slots]
        missing = np.flatnonzero(known != CACHED)
        if not len(missing):
            return len(slots)
        return None if (known[missing] == UNKNOWN).any() else int(missing[0])


@dataclass(frozen=True)
class Reading:
    """Tokens of one request that the draft is to read: positions ``start`` to ``end``, the latter excluded."""

    request: int
    start: int
    end: int


def passes(readings: list[Reading], most_rows: int) -> list[list[Reading]]:
    """Split readings into passes of at most ``most_rows`` rows, in order; the last part of each request ends it."""
    result: list[list[Reading]] = [[]]
    room = most_rows
    for reading in readings:
        start = reading.start
        while start < reading.end:
            if room == 0:
                result.append([])
                room = most_rows
            end = min(reading.end, start + room)
            result[-1].append(Reading(reading.request, start, end))
            room -= end - start
            start = end
    return result


def metadata_of(
    readings: list[Reading], slots: torch.Tensor, common: CommonAttentionMetadata
) -> CommonAttentionMetadata:
    """Attention metadata of a pass over these readings only.

    Args:
        slots: ``[num_rows]`` cache slots, in order of the readings.
        common: of the whole batch, whose block tables are taken.
    """
    lengths = [reading.end - reading.start for reading in readings]
    starts = torch.tensor([0, *np.cumsum(lengths).tolist()], dtype=torch.int32)
    ends = torch.tensor([reading.end for reading in readings], dtype=torch.int32)
    return replace(
        common,
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=ends,
        seq_lens_cpu_upper_bound=ends,
        num_reqs=len(readings),
        num_actual_tokens=sum(lengths),
        max_query_len=max(lengths),
        max_seq_len=max(reading.end for reading in readings),
        block_table_tensor=common.block_table_tensor[torch.tensor([reading.request for reading in readings])],
        slot_mapping=slots,
        is_prefilling=None,
    )
