"""The oracle in place of the CPU path's drafter."""

from __future__ import annotations

from typing import Any

from tests.suite.oracle import Answers
from vllm_adaptivespec.core.tree import DraftTree
from vllm_adaptivespec.runner_v1.proposer import TreeProposer

ANSWERS = Answers()


class OracleProposer(TreeProposer):
    """Drafts as usual, which keeps the draft's cache as usual, then puts oracle trees in place of the drafts."""

    def propose(self, num_speculative_tokens: int, **kwargs: Any) -> list[list[int]]:
        drafted = super().propose(num_speculative_tokens, **kwargs)
        runner = self.runner
        for i, request_id in enumerate(runner.input_batch.req_ids):
            state = runner.requests[request_id]
            limits = runner.draft_limits(i, request_id)
            room = self.block_size - 1 - runner.root_position(i) % self.block_size
            done = len(state.output_token_ids)
            width = 1 if limits.width == 1 else 4
            tree = ANSWERS.tree(state.prompt_token_ids, request_id, done, limits.depth, limits.nodes, width)
            if tree is None:
                continue
            tree = tree.subset(tree.within_leaves(1 + runner.branches.available(request_id)))
            if tree.depth > room and not tree.is_chain:
                tree = DraftTree.chain([tree.tokens[n] for n in tree.path(tree.leaves[0])])
            runner.branches.ensure(request_id, len(tree.leaves) - 1)
            runner.speculation[request_id].tree, runner.speculation[request_id].drafted = tree, None
            drafted[i] = list(tree.tokens)
        return drafted
