"""Growth of one draft tree, level by level, from the draft model's distributions.

Every expanded node offers its ``width`` most likely children; the best ``width`` new nodes of a level, by cumulative
log-probability, are expanded in the next. At the end the best ``nodes`` of all candidates form the tree. A child is
never likelier than its parent, so the best nodes always include their parents.
"""

from __future__ import annotations

from collections.abc import Sequence

from .policy import TreeShape
from .tree import ROOT, DraftTree, path_from_root


class TreeGrowth:
    """Candidates of one request's tree while it grows.

    Candidate indices are stable; ``ROOT`` names the root. Call ``expand`` first for ``[ROOT]``, then for ``frontier``
    until that is empty.
    """

    def __init__(self, shape: TreeShape) -> None:
        self.shape = shape
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.scores: list[float] = []  # cumulative log-probability
        self.level = 0
        self.frontier: list[int] = [ROOT] if shape.depth and shape.width and shape.nodes else []

    def expand(self, log_probs: Sequence[Sequence[float]], tokens: Sequence[Sequence[int]]) -> None:
        """Add the children of the frontier and choose the next frontier.

        Args:
            log_probs: ``[len(frontier)][>= width]`` draft log-probabilities, best first.
            tokens: the children's target-vocabulary ids, in the same order.
        """
        first_new = len(self.tokens)
        for parent, row_log_probs, row_tokens in zip(self.frontier, log_probs, tokens, strict=True):
            base = 0.0 if parent == ROOT else self.scores[parent]
            for rank in range(min(self.shape.width, len(row_tokens))):
                self.tokens.append(row_tokens[rank])
                self.parents.append(parent)
                self.scores.append(base + row_log_probs[rank])
        self.level += 1
        self.frontier = []
        if self.level < self.shape.depth:
            # Expanding a node outside the best so far is wasted: its children would score no higher.
            best = self._best()
            new = [c for c in best if c >= first_new]
            # A full tree whose worst node is new gains nothing from expanding that node.
            if len(best) == self.shape.nodes and new and new[-1] == best[-1]:
                new.pop()
            self.frontier = new[: self.shape.width]

    def _best(self) -> list[int]:
        """The best ``shape.nodes`` candidates, best first; the sort is stable, so a parent precedes an equal child."""
        return sorted(range(len(self.scores)), key=lambda c: -self.scores[c])[: self.shape.nodes]

    def path(self, candidate: int) -> list[int]:
        """Candidates from the root's child down to ``candidate``."""
        return path_from_root(self.parents, candidate)

    def tree(self) -> DraftTree:
        """The best nodes, best first, parents before children."""
        best = self._best()
        node_of = {ROOT: ROOT, **{candidate: node for node, candidate in enumerate(best)}}
        return DraftTree(
            tuple(self.tokens[c] for c in best),
            tuple(node_of[self.parents[c]] for c in best),
        )
