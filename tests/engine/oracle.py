"""A drafter that knows the answer: trees around the true continuation, in every awkward shape.

With a random head almost nothing is accepted, so little would be tested. Exactness must hold for any drafts; these
make long, non-contiguous accepted paths frequent.
"""

from __future__ import annotations

import random
from typing import Any, ClassVar

from vllm_adaptivespec.core.tree import ROOT, DraftTree
from vllm_adaptivespec.runner_v1.proposer import TreeProposer


class OracleProposer(TreeProposer):
    """Drafts as usual, which keeps the draft's cache as usual, then puts oracle trees in place of the drafts."""

    answers: ClassVar[dict[tuple[int, ...], list[int]]] = {}
    """True continuation by prompt."""
    seed: ClassVar[int] = 0

    def propose(self, num_speculative_tokens: int, *args: Any, **kwargs: Any) -> list[list[int]]:
        drafted = super().propose(num_speculative_tokens, *args, **kwargs)
        runner = self.runner
        for i, request_id in enumerate(runner.input_batch.req_ids):
            state = runner.requests[request_id]
            limits = runner.draft_limits(i, request_id)
            answer = self.answers.get(tuple(state.prompt_token_ids))
            if limits.depth == 0 or answer is None:
                continue
            done = len(state.output_token_ids)
            base = runner.root_position(i)
            room = self.block_size - 1 - base % self.block_size
            rng = random.Random(f"{self.seed} {request_id} {done}")
            tree = oracle_tree(answer[done : done + min(limits.depth, 4)], limits.nodes, 1 if room < 4 else 4, rng)
            tree = tree.limit_leaves(1 + runner.branches.available(request_id))
            if tree.depth > room and not tree.is_chain:
                tree = DraftTree.chain(answer[done : done + min(limits.depth, 4)])
            runner.branches.ensure(request_id, len(tree.leaves) - 1)
            runner.speculation[request_id].tree = tree
            drafted[i] = list(tree.tokens)
        return drafted


def oracle_tree(future: list[int], max_nodes: int, width: int, rng: random.Random, vocab: int = 512) -> DraftTree:
    """A random tree in which the true path usually runs through later siblings, with wrong twigs on the way."""
    tokens: list[int] = []
    parents: list[int] = []

    def add(token: int, parent: int) -> int:
        tokens.append(token)
        parents.append(parent)
        return len(tokens) - 1

    true_parent = ROOT
    for token in future:
        wrong = (token + 1 + rng.randrange(vocab - 1)) % vocab
        if width > 1 and rng.random() < 0.7 and len(tokens) < max_nodes:
            twig = add(wrong, true_parent)
            if rng.random() < 0.5 and len(tokens) < max_nodes - 1:
                add((wrong + 7) % vocab, twig)
        if len(tokens) >= max_nodes:
            break
        if rng.random() < 0.15:
            break  # let the walk end with a token no child carries
        true_parent = add(token, true_parent)
    return DraftTree(tuple(tokens), tuple(parents))
