"""What each request allows, by slot: set on the host when it arrives, read on the device at every step."""

from __future__ import annotations

import math

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor

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
    """Per-slot settings of all requests, in tensors that stay in place, so that captured graphs may read them.

    Args:
        num_slots: request slots.
        max_position: last position a draft may be verified or fed at.
        chains_only: whether no request may have a tree.
    """

    def __init__(
        self,
        config: AdaptiveSpecConfig,
        num_slots: int,
        max_position: int,
        chains_only: bool,
        device: torch.device,
    ) -> None:
        self.config = config
        self.num_slots = num_slots
        self.max_position = max_position
        self.chains_only = chains_only
        self.device = device
        self._log_kappas = StagedWriteTensor(num_slots, torch.float32, device)
        self._max_promotions = StagedWriteTensor(num_slots, torch.int32, device)
        self._widths = StagedWriteTensor(num_slots, torch.int32, device)
        self._last_positions = StagedWriteTensor(num_slots, torch.int32, device)
        self._stops: dict[int, list[int]] = {}
        self._most_stops = 8
        self._protected = StagedWriteTensor((num_slots, self._most_stops), torch.int64, device)

    @property
    def log_kappas(self) -> torch.Tensor:
        """``[num_slots]`` float32, 0 where the margin rule is off."""
        return self._log_kappas.gpu

    @property
    def max_promotions(self) -> torch.Tensor:
        """``[num_slots]`` int32, -1 for no limit."""
        return self._max_promotions.gpu

    @property
    def widths(self) -> torch.Tensor:
        """``[num_slots]`` int32 children per node at most; 1 makes chains, 0 switches drafting off."""
        return self._widths.gpu

    @property
    def last_positions(self) -> torch.Tensor:
        """``[num_slots]`` int32 position of the last token that can still be drafted for."""
        return self._last_positions.gpu

    @property
    def protected(self) -> torch.Tensor:
        """``[num_slots, n]`` int64 EOS and stop ids, -1 where there are fewer. The only one that may move."""
        return self._protected.gpu

    def add(self, slot: int, params: SamplingParams, prompt_len: int) -> None:
        """Set a slot's values; ``apply`` brings them to the device."""
        options = RequestOptions.parse(params.extra_args, self.config)
        rule = options.rule(self.config, frozenset(params.all_stop_token_ids))
        if not options.enabled:
            width = 0
        elif self.chains_only or needs_chain(params):
            width = 1
        else:
            width = self.config.num_speculative_tokens
        last = self.max_position
        if params.max_tokens is not None:
            # The step that emits the last token needs no drafts for what would follow it.
            last = min(last, prompt_len + params.max_tokens - 2)
        self._log_kappas.stage_write(slot, 0, [0.0 if rule.is_exact else math.log(rule.kappa)])
        self._max_promotions.stage_write_elem(slot, -1 if rule.max_promotions is None else rule.max_promotions)
        self._widths.stage_write_elem(slot, width)
        self._last_positions.stage_write_elem(slot, last)
        self._stops[slot] = sorted(rule.protected)
        if len(rule.protected) > self._most_stops:
            self._most_stops = 1 << (len(rule.protected) - 1).bit_length()
            self._protected = StagedWriteTensor((self.num_slots, self._most_stops), torch.int64, self.device)
            for each in self._stops:
                self._stage_stops(each)
        else:
            self._stage_stops(slot)

    def _stage_stops(self, slot: int) -> None:
        ids = self._stops[slot]
        self._protected.stage_write(slot, 0, ids + [-1] * (self._most_stops - len(ids)))

    def apply(self) -> None:
        """Bring what was added to the device, in the order of its work."""
        for staged in (self._log_kappas, self._max_promotions, self._widths, self._last_positions, self._protected):
            staged.apply_write()
