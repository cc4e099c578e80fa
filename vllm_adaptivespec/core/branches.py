"""Layout of a tree for an attention kernel that only knows causal sequences over paged blocks.

Every root-to-leaf path is a plain sequence. The first, the *trunk*, lies in the request's own blocks; each other path,
a *branch*, has one block of its own that stands in for the request's tail block: the same committed tokens, then the
path. A node's row is one query at the end of its path, so the kernel's causal rule is the ancestor mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .tree import ROOT, DraftTree

TRUNK = 0
"""Path index of the trunk; branches count from 1."""


@dataclass(frozen=True)
class QueryRun:
    """Consecutive rows of the batch that form the end of one sequence.

    Args:
        path: index of the path they attend along.
        num_rows: rows in the run.
        depth: depth of the last one (0 for the root).
    """

    path: int
    num_rows: int
    depth: int


@dataclass(frozen=True)
class PathWrite:
    """One row's K/V that one path needs: ``row`` counts from the root (0), ``depth`` gives its position."""

    row: int
    path: int
    depth: int


class BranchLayout:
    """Paths of one tree, and which of them each node's row attends along."""

    def __init__(self, tree: DraftTree) -> None:
        self.tree = tree
        # Depth first, so that a node and its best child lie on the same path, and in one run where they are neighbours.
        self.paths = sorted(tree.path(leaf) for leaf in tree.leaves)
        self.path_of = [-1] * len(tree)
        for index, path in enumerate(self.paths):
            for node in path:
                if self.path_of[node] < 0:
                    self.path_of[node] = index

    @property
    def num_branches(self) -> int:
        return max(len(self.paths) - 1, 0)

    def runs(self) -> Iterator[QueryRun]:
        """Rows root, node 0, node 1, ... grouped into as few sequences as their order allows."""
        path, rows, depth, last = TRUNK, 1, 0, ROOT
        for node, parent in enumerate(self.tree.parents):
            if parent == last and self.path_of[node] == path:
                rows, depth, last = rows + 1, depth + 1, node
                continue
            yield QueryRun(path, rows, depth)
            path, rows, depth, last = self.path_of[node], 1, self.tree.depths[node], node
        yield QueryRun(path, rows, depth)

    def branch_writes(self) -> Iterator[PathWrite]:
        """K/V every branch needs: the root's and its own path's."""
        for index, path in enumerate(self.paths):
            if index == TRUNK:
                continue
            yield PathWrite(0, index, 0)
            for depth, node in enumerate(path, 1):
                yield PathWrite(1 + node, index, depth)
