"""The oracle in place of the GPU path's drafter."""

from __future__ import annotations

from typing import Any

import torch
from vllm_adaptivespec.triton_kernels import tree_masks

from tests.suite.oracle import Answers
from vllm_adaptivespec.core.tree import DraftTree
from vllm_adaptivespec.runner_v2.speculator import TreeSpeculator

ANSWERS = Answers()


class OracleSpeculator(TreeSpeculator):
    """Drafts as usual, which keeps the draft's cache as usual, then puts oracle trees in place of the drafts."""

    runner: Any

    def propose(self, input_batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        drafts = super().propose(input_batch, *args, **kwargs)
        settings = self.model_state.settings
        states = self.runner.req_states
        for i, (request_id, slot) in enumerate(zip(input_batch.req_ids, input_batch.idx_mapping.tolist(), strict=True)):
            prompt_len, total = int(states.prompt_len.np[slot]), int(states.total_len.gpu[slot])
            prompt = states.all_token_ids.gpu[slot, :prompt_len].tolist()
            root = total - 1
            width = min(int(settings.widths[slot]), 4)
            depth = min(int(settings.last_positions[slot]) - root, self.num_speculative_steps)
            nodes = min(self.num_speculative_steps, self.max_model_len - 1 - root)
            tree = ANSWERS.tree(prompt, request_id, total - prompt_len, depth if width else 0, nodes, width)
            if tree is not None:
                drafts[i] = self.put(slot, tree)
        return drafts

    def put(self, slot: int, tree: DraftTree) -> torch.Tensor:
        """Store a tree, and return its tokens as vLLM wants them."""
        padding = [0] * (self.num_speculative_steps - len(tree))
        parents = torch.tensor([[*tree.parents, *[-1 for _ in padding]]], dtype=torch.int32)
        num_nodes = torch.tensor([len(tree)], dtype=torch.int32)
        masks, depths = tree_masks(parents, num_nodes)
        self.model_state.store.put(torch.tensor([slot]), parents, num_nodes, masks, depths)
        return torch.tensor([*tree.tokens, *padding])
