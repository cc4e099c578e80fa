"""Growth of a draft tree whose nodes carry their estimated probability of being accepted.

It has the surface of ``TreeGrowth``, but what is expanded and what is kept is decided outside, over all requests of a
step together (``core/throughput.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .calibration import FEATURES, RequestHistory
from .policy import TreeShape
from .tree import ROOT, DraftTree, path_from_root


@dataclass
class DraftRequest:
    """What the policy knows of a request when it decides whether and what to draft for it.

    Args:
        history: how its drafts have fared.
        lossiness: 1 - kappa.
        limits: most levels, children considered per node, and nodes; depth 0 where nothing may be drafted.
        pending: its tokens that the draft model has not seen, which its next first pass would have to read.
        remaining: most tokens it may still emit.
    """

    history: RequestHistory
    lossiness: float
    limits: TreeShape
    pending: int
    remaining: int = 1 << 30


@dataclass
class DraftedNodes:
    """What was assumed of the nodes of a drafted tree, to learn from what becomes of them.

    Args:
        features: ``[num_nodes, len(FEATURES)]``.
        probabilities: ``[num_nodes]`` of being accepted, path included.
    """

    features: np.ndarray
    probabilities: np.ndarray

    def subset(self, nodes: Sequence[int]) -> DraftedNodes:
        """The same of some nodes."""
        index = np.asarray(nodes, dtype=np.int64)
        return DraftedNodes(self.features[index], self.probabilities[index])


class ValuedGrowth:
    """Candidates of one request's tree; ``expand`` first for ``[ROOT]``, then for ``frontier`` until that is empty."""

    def __init__(self, request: DraftRequest) -> None:
        self.request = request
        self.shape = request.limits
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.log_probs: list[float] = []
        self.ranks: list[int] = []
        self.conditional = np.empty(0)
        self.probabilities = np.empty(0)
        self.features = np.empty((0, len(FEATURES)))
        self.level = 0
        self.newest = slice(0, 0)  # candidates of that level
        self.frontier: list[int] = [ROOT]
        self.chosen: list[int] = []

    def expand(self, log_probs: Sequence[Sequence[float]], tokens: Sequence[Sequence[int]]) -> None:
        """Add the children of the frontier, which are then to be assessed; nothing is left to expand.

        Args:
            log_probs: ``[len(frontier)][>= width]`` draft log-probabilities, best first.
            tokens: the children's target-vocabulary ids, in the same order.
        """
        self.level += 1
        first = len(self.tokens)
        for parent, row_log_probs, row_tokens in zip(self.frontier, log_probs, tokens, strict=True):
            count = min(self.shape.width, len(row_tokens))
            self.tokens += row_tokens[:count]
            self.log_probs += row_log_probs[:count]
            self.parents += [parent] * count
            self.depths += [self.level] * count
            self.ranks += range(1, count + 1)
        self.newest = slice(first, len(self.tokens))
        self.frontier = []

    @property
    def fresh(self) -> range:
        """Candidates not yet assessed."""
        return range(len(self.probabilities), len(self.tokens))

    def assess(self, features: np.ndarray, conditional: np.ndarray) -> None:
        """Take the fresh candidates' features and their probabilities of being accepted once their parent is."""
        parents = np.array(self.parents[self.fresh.start :])
        # The root comes last, as index -1.
        before = np.append(self.probabilities, 1.0)[parents]
        self.probabilities = np.concatenate([self.probabilities, before * conditional])
        self.conditional = np.concatenate([self.conditional, conditional])
        self.features = np.concatenate([self.features, features])

    def path(self, candidate: int) -> list[int]:
        """Candidates from the root's child down to ``candidate``."""
        return path_from_root(self.parents, candidate)

    def tree(self) -> DraftTree:
        """The chosen nodes, best first, parents before children."""
        node_of = {ROOT: ROOT, **{candidate: node for node, candidate in enumerate(self.chosen)}}
        return DraftTree(
            tuple(self.tokens[c] for c in self.chosen), tuple(node_of[self.parents[c]] for c in self.chosen)
        )

    def drafted(self) -> DraftedNodes:
        """What is assumed of the chosen nodes."""
        return DraftedNodes(self.features[self.chosen], self.probabilities[self.chosen])
