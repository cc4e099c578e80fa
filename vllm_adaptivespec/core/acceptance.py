"""Acceptance: the sample-and-match walk through a verified tree, and the margin rule.

At each node the target's own token ``x`` decides (argmax, or one sample of its processed distribution). A child that
carries ``x`` is accepted and the walk goes on there; otherwise ``x`` is the last token emitted in this step. That is
exactly the target's distribution at any temperature. Only where no child carries ``x`` does the margin rule apply:
with kappa < 1, the likeliest child ``c`` with ``p(c) / max(p) >= kappa`` is promoted (arXiv 2609.02897).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch

from .tree import ROOT, DraftTree

EXACT = 1.0
"""The kappa that switches the margin rule off: the output is the target's own."""


@dataclass(frozen=True)
class MarginRule:
    """How lossy one request may be.

    Args:
        kappa: threshold of the probability ratio, in (0, 1]; 1.0 switches the rule off.
        max_promotions: promotions allowed in one step; None for no limit.
        protected: token ids (EOS, stop ids) that are never promoted to or away from: a wrong stop truncates an
            answer, a missed one lengthens it.
    """

    kappa: float = EXACT
    max_promotions: int | None = None
    protected: Collection[int] = frozenset()

    @property
    def is_exact(self) -> bool:
        return self.kappa >= EXACT

    def promoted_child(self, tree: DraftTree, node: int, choice: int, log_ratios: Sequence[float]) -> int | None:
        """The child of ``node`` promoted over the target's ``choice``, or None.

        Args:
            log_ratios: ``[num_nodes]`` ``log p(node's token) - log max p`` under the target's processed distribution
                at the node's parent. -inf (a masked token) and NaN never pass.
        """
        if self.is_exact or choice in self.protected:
            return None
        threshold = math.log(self.kappa)
        best: int | None = None
        for child in tree.children[node]:
            ratio = log_ratios[child]
            if ratio >= threshold and tree.tokens[child] not in self.protected:
                if best is None or ratio > log_ratios[best]:
                    best = child
        return best


@dataclass
class Walk:
    """The walk through one request's tree, one target choice at a time.

    ``node`` is the node whose row decides next; ``emitted`` are the tokens of this step so far, the last of which is
    not in the tree once the walk is ``done``.
    """

    tree: DraftTree
    rule: MarginRule = MarginRule()
    node: int = ROOT
    path: list[int] = field(default_factory=list)
    emitted: list[int] = field(default_factory=list)
    promoted: int = 0
    done: bool = False
    first_mismatch: float | None = None
    """Best child's log ratio where the target's choice first had no child (None: no such row, or not known)."""

    def advance(self, choice: int, log_ratios: Sequence[float] | None = None) -> None:
        """Take the target's ``choice`` at ``node`` and go to a child, or finish.

        Args:
            choice: the target's token for the row of ``node``.
            log_ratios: see ``MarginRule.promoted_child``; None leaves the margin rule out.
        """
        children = self.tree.children[self.node]
        child = next((c for c in children if self.tree.tokens[c] == choice), None)
        if child is None and children and log_ratios is not None:
            if self.first_mismatch is None:
                self.first_mismatch = max(log_ratios[c] for c in children)
            if self.rule.max_promotions is None or self.promoted < self.rule.max_promotions:
                child = self.rule.promoted_child(self.tree, self.node, choice, log_ratios)
                self.promoted += child is not None
        if child is None:
            self.emitted.append(choice)
            self.done = True
            return
        self.emitted.append(self.tree.tokens[child])
        self.path.append(child)
        self.node = child


def log_ratios(
    logits: torch.Tensor, rows: torch.Tensor, tokens: torch.Tensor, argmax: torch.Tensor | None = None
) -> torch.Tensor:
    """``log p(token) - log max p`` for drafted tokens: two gathers and a max, no softmax.

    Args:
        logits: ``[num_rows, vocab]`` processed target logits.
        rows: ``[num_nodes]`` row of each node's parent.
        tokens: ``[num_nodes]`` drafted ids; negative ids (placeholders) get -inf.
        argmax: ``[num_rows]`` index of each row's maximum, where the caller has it already.

    Returns:
        ``[num_nodes]`` float32, at most 0; -inf where it is not a number, so that it never passes.
    """
    best = logits.amax(dim=-1)[rows] if argmax is None else logits[rows, argmax[rows]]
    ratios = logits[rows, tokens.clamp(min=0)].float() - best.float()
    return ratios.masked_fill((tokens < 0) | ratios.isnan(), -math.inf)


def walk_tree(
    tree: DraftTree, choose: Callable[[int, Sequence[int]], int], rule: MarginRule, ratios: Sequence[float] | None
) -> Walk:
    """Reference walk of one tree: ``choose(node, path tokens)`` gives the target's token for a node's row."""
    walk = Walk(tree, rule)
    while not walk.done:
        walk.advance(choose(walk.node, [tree.tokens[n] for n in walk.path]), ratios)
    return walk
