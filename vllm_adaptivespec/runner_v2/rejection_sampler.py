"""Acceptance of trees in place of vLLM's rejection sampling."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from ..core.policy import HISTORY_START
from ..triton_kernels import margin_acceptance, path_rows, record_step, verify_rows
from .model_state import TreeModelState


class TreeRejectionSampler(RejectionSampler):
    """Walks trees by exact match and the margin rule. Becomes one by having its class set on the stock object."""

    def init_adaptivespec(self, model_state: TreeModelState) -> None:
        """Call once the models are loaded."""
        self.model_state = model_state
        history = model_state.history
        self.constants = torch.tensor([history.decay, HISTORY_START], dtype=torch.float64, device=model_state.device)
        self.verified: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(self, logits: torch.Tensor, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        self.model_state.restore_positions(input_batch.positions)
        return super().__call__(logits, input_batch, *args, **kwargs)

    def _verify(
        self,
        logits: torch.Tensor,
        draft_logits: torch.Tensor | None,
        draft_sampled: torch.Tensor,
        pos: torch.Tensor,
        cu_num_logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        idx_mapping_np: Any,
        expanded_idx_mapping: torch.Tensor,
        expanded_local_pos: torch.Tensor,
        seq_lens_upper_bound_np: Any,
        verify_draft_sampled: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Accept a path of every request's tree; vLLM may hand over the batch in several parts.

        The target's tokens are drawn by vLLM's own noise, keyed by seed and position, so that a seeded request gets
        the tokens it would get without speculation.

        Returns:
            Processed logits ``[num_logits, vocab]`` in the order of the rows, tokens ``[num_requests, max_nodes + 1]``
            and their number ``[num_requests]``.
        """
        state = self.model_state
        store, settings = state.store, state.settings
        rows = verify_rows(store, expanded_idx_mapping, expanded_local_pos, pos, verify_draft_sampled)
        processed = self.sampler.apply_sampling_params(
            logits,
            expanded_idx_mapping,
            idx_mapping,
            idx_mapping_np,
            rows.positions,
            draft_sampled,
            expanded_local_pos,
            seq_lens_upper_bound_np,
        )
        sampling = self.sampler.sampling_states
        choices = gumbel_sample(
            processed,
            expanded_idx_mapping,
            sampling.temperature.gpu,
            sampling.seeds.gpu,
            rows.positions,
            apply_temperature=False,
            is_drafting=False,
            use_fp64=self.sampler.use_fp64_gumbel,
        )
        accepted = margin_acceptance(
            processed,
            cu_num_logits,
            rows.tokens,
            rows.parents,
            settings.log_kappas[idx_mapping],
            max_nodes=store.max_nodes,
            max_promotions=settings.max_promotions[idx_mapping],
            protected=settings.protected[idx_mapping],
            choices=choices,
        )
        record_step(
            store,
            state.history,
            self.constants,
            state.history.reset_after,
            state.totals,
            idx_mapping,
            cu_num_logits,
            path=accepted.path,
            num_emitted=accepted.num_emitted,
            promoted=accepted.promoted,
            first_margin=accepted.first_margin,
        )
        self.verified = expanded_idx_mapping, expanded_local_pos
        return processed, accepted.emitted, accepted.num_emitted

    def _get_logprobs_tensors(
        self,
        sampled: torch.Tensor,
        num_sampled: torch.Tensor,
        logits: torch.Tensor,
        cu_num_logits: torch.Tensor,
        cu_num_logits_np: Any,
        max_num_logprobs: int,
    ) -> Any:
        """vLLM reads token ``k``'s log-probability from row ``k``: give it the rows of the accepted path."""
        if max_num_logprobs != NO_LOGPROBS:
            assert self.verified is not None
            in_order = torch.arange(len(logits), device=logits.device)
            logits = logits[path_rows(self.model_state.store, *self.verified, in_order)]
        return super()._get_logprobs_tensors(
            sampled, num_sampled, logits, cu_num_logits, cu_num_logits_np, max_num_logprobs
        )
