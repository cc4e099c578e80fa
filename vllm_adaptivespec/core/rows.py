"""Acceptance of a whole batch given as flat tensors: what a device kernel sees, decided by ``acceptance.Walk``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .acceptance import MarginRule, Walk, log_ratios
from .noise import gumbel_noise
from .tree import DraftTree


@dataclass(frozen=True)
class RowSampling:
    """How one request's target tokens are drawn.

    Args:
        temperature: 0 for the argmax; above, Gumbel noise is added to logits that are scaled already.
        seed: of its noise.
        root_position: position of its root; a row's token is keyed by root position + depth.
    """

    temperature: float = 0.0
    seed: int = 0
    root_position: int = 0


def target_choices(logits: torch.Tensor, tree: DraftTree, sampling: RowSampling) -> torch.Tensor:
    """The target's token for the root's and every node's row.

    Args:
        logits: ``[1 + num_nodes, vocab]`` processed target logits.

    Returns:
        ``[1 + num_nodes]`` int64; the lowest id of equals, the first NaN of a row that has any.
    """
    values = logits.double()
    if sampling.temperature > 0:
        depths = (0, *tree.depths)
        noise = {d: gumbel_noise(sampling.seed, sampling.root_position + d, logits.shape[1]) for d in set(depths)}
        values = values + torch.stack([noise[d] for d in depths])
    is_nan = values.isnan()
    highest = values.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).amax(dim=1, keepdim=True)
    holds = torch.where(is_nan.any(dim=1, keepdim=True), is_nan, values == highest)
    return holds.to(torch.int8).argmax(dim=1)


def accept_rows(
    logits: torch.Tensor,
    row_starts: Sequence[int],
    trees: Sequence[DraftTree],
    rules: Sequence[MarginRule],
    samplings: Sequence[RowSampling],
    choices: torch.Tensor | None = None,
) -> list[Walk | None]:
    """Walk every request's tree.

    Args:
        logits: ``[num_rows, vocab]`` processed target logits; a request's rows are its root's, then its nodes'.
        row_starts: ``[num_requests + 1]``.
        trees: of each request; where a request has no rows, its tree is ignored.
        choices: ``[num_rows]`` the target's tokens, where they are given.

    Returns:
        Finished walks; None for requests without rows.
    """
    walks: list[Walk | None] = []
    for (start, end), tree, rule, sampling in zip(itertools.pairwise(row_starts), trees, rules, samplings, strict=True):
        if start == end:
            walks.append(None)
            continue
        own = logits[start:end]
        chosen = (target_choices(own, tree, sampling) if choices is None else choices[start:end]).tolist()
        tokens = torch.tensor(tree.tokens, dtype=torch.int64)
        in_vocab = torch.where(tokens < logits.shape[1], tokens, -1)
        ratios = log_ratios(own, torch.tensor(tree.parents, dtype=torch.int64) + 1, in_vocab).tolist()
        walk = Walk(tree, rule)
        while not walk.done:
            walk.advance(chosen[1 + walk.node], ratios)
        walks.append(walk)
    return walks
