"""What each request allows, by slot: set on the host when it arrives, read on the device at every step."""

from __future__ import annotations

import math
from typing import Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor

from ..config import AdaptiveSpecConfig, RequestOptions


def needs_chain(params: SamplingParams) -> bool:
    """Whether vLLM processes the request's rows as if each one's prefix were all rows before it.

    That is so for masks and penalties that depend on the tokens so far; siblings would see each other.
    """
    return (
        params.structured_outputs is not None
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
        or params.repetition_penalty != 1.0
        or bool(params.bad_words)
        or params.thinking_token_budget is not None
    )


class SlotSettings:
    """Per-slot settings of all requests.

    Args:
        num_slots: request slots.
        max_position: last position a draft may be verified or fed at.
        chains_only: whether no request may have a tree.

    Attributes:
        log_kappas: float32, 0 where the margin rule is off.
        max_promotions: int32, -1 for no limit.
        protected: ``[num_slots, n]`` int64 EOS and stop ids, -1 where there are fewer.
        widths: int32 children per node at most; 1 makes chains, 0 switches drafting off.
        last_positions: int32 position of the last token that can still be drafted for.
    """

    def __init__(self, config: AdaptiveSpecConfig, num_slots: int, max_position: int, chains_only: bool) -> None:
        self.config = config
        self.num_slots = num_slots
        self.max_position = max_position
        self.chains_only = chains_only
        self.log_kappas = UvaBackedTensor(num_slots, torch.float32)
        self.max_promotions = UvaBackedTensor(num_slots, torch.int32)
        self.widths = UvaBackedTensor(num_slots, torch.int32)
        self.last_positions = UvaBackedTensor(num_slots, torch.int32)
        self._protected = self._protected_buffer(8)

    def _protected_buffer(self, most: int) -> UvaBackedTensor:
        buffer = UvaBackedTensor((self.num_slots, most), torch.int64)
        buffer.np[:] = -1
        return buffer

    @property
    def protected(self) -> torch.Tensor:
        return self._protected.gpu

    def add(self, slot: int, params: SamplingParams, prompt_len: int) -> None:
        """Set a slot's values; ``apply`` brings them to the device."""
        options = RequestOptions.parse(params.extra_args, self.config)
        rule = options.rule(self.config, frozenset(params.all_stop_token_ids))
        self.log_kappas.np[slot] = 0.0 if rule.is_exact else math.log(rule.kappa)
        self.max_promotions.np[slot] = -1 if rule.max_promotions is None else rule.max_promotions
        if not options.enabled:
            width = 0
        elif self.chains_only or needs_chain(params):
            width = 1
        else:
            width = self.config.num_speculative_tokens
        self.widths.np[slot] = width
        last = self.max_position
        if params.max_tokens is not None:
            # The step that emits the last token needs no drafts for what would follow it.
            last = min(last, prompt_len + params.max_tokens - 2)
        self.last_positions.np[slot] = last
        self._protect(slot, sorted(rule.protected))

    def _protect(self, slot: int, ids: list[int]) -> None:
        if len(ids) > self._protected.np.shape[1]:
            old = self._protected
            self._protected = self._protected_buffer(1 << (len(ids) - 1).bit_length())
            self._protected.np[:, : old.np.shape[1]] = old.np
        row: Any = self._protected.np[slot]
        row[:] = -1
        row[: len(ids)] = ids

    def apply(self) -> None:
        """Show the device what was added."""
        for buffer in (self.log_kappas, self.max_promotions, self.widths, self.last_positions, self._protected):
            buffer.copy_to_uva()
