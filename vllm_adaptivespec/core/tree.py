"""The draft tree: a flat, immutable list of drafted nodes below one committed root."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

ROOT = -1
"""Parent index of the nodes below the root (the last committed token, which is not a node itself)."""


def path_from_root(parents: Sequence[int], node: int) -> list[int]:
    """Nodes from the root's child down to ``node``; empty for the root."""
    path: list[int] = []
    while node != ROOT:
        path.append(node)
        node = parents[node]
    path.reverse()
    return path


@dataclass(frozen=True)
class DraftTree:
    """Drafted tokens of one request for one step.

    Nodes are ordered best first with every parent before its children, so each prefix of the list is a tree again:
    vLLM's scheduler may cut the list at its tail.

    Args:
        tokens: ``[num_nodes]`` target-vocabulary ids.
        parents: ``[num_nodes]`` index of each node's parent, ``ROOT`` for children of the root.

    Raises:
        ValueError: lengths differ, or a parent does not come before its child.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents):
            raise ValueError(f"{len(self.tokens)} tokens but {len(self.parents)} parents")
        for node, parent in enumerate(self.parents):
            if not ROOT <= parent < node:
                raise ValueError(f"parent {parent} of node {node} does not come before it")

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> DraftTree:
        """A tree in which every node is the only child of the one before it."""
        return cls(tuple(tokens), tuple(range(ROOT, len(tokens) - 1)))

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """``[num_nodes]`` distance from the root; children of the root have depth 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        """Number of levels below the root."""
        return max(self.depths, default=0)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """``[num_nodes + 1]`` child indices, best first; the root's are last, so that ``children[ROOT]`` holds."""
        children: list[list[int]] = [[] for _ in range(len(self) + 1)]
        for node, parent in enumerate(self.parents):
            children[parent].append(node)
        return tuple(tuple(c) for c in children)

    @cached_property
    def leaves(self) -> tuple[int, ...]:
        """Nodes without children, the end of the first-child path first, then in node order."""
        if not len(self):
            return ()
        first = self.children[ROOT][0]
        while self.children[first]:
            first = self.children[first][0]
        return (first, *(n for n in range(len(self)) if not self.children[n] and n != first))

    @property
    def is_chain(self) -> bool:
        """Whether no node has a sibling."""
        return len(self.leaves) <= 1

    def path(self, node: int) -> tuple[int, ...]:
        """Nodes from the root's child down to ``node``; empty for the root."""
        return tuple(path_from_root(self.parents, node))

    def prefix(self, num_nodes: int) -> DraftTree:
        """The tree of the first ``num_nodes`` nodes."""
        if num_nodes >= len(self):
            return self
        return DraftTree(self.tokens[:num_nodes], self.parents[:num_nodes])

    def within_leaves(self, max_leaves: int) -> list[int]:
        """The nodes left when nodes are dropped, worst first, until at most ``max_leaves`` (>= 1) paths remain."""
        kept: list[int] = []
        has_child: set[int] = set()
        num_leaves = 0
        for node, parent in enumerate(self.parents):
            if parent != ROOT and parent not in kept:
                continue  # its parent was dropped
            opens_path = parent == ROOT or parent in has_child
            if opens_path and (num_leaves == max_leaves):
                continue
            num_leaves += opens_path
            has_child.add(parent)
            kept.append(node)
        return kept

    def subset(self, nodes: Sequence[int]) -> DraftTree:
        """The tree of some nodes, in ascending order and with all their parents."""
        if len(nodes) == len(self):
            return self
        index = {ROOT: ROOT, **{node: i for i, node in enumerate(nodes)}}
        return DraftTree(tuple(self.tokens[n] for n in nodes), tuple(index[self.parents[n]] for n in nodes))

    def ancestor_mask(self) -> torch.Tensor:
        """``[num_nodes, num_nodes]`` bool: whether a row's node may attend to a column's (ancestors and itself)."""
        mask = torch.zeros(len(self), len(self), dtype=torch.bool)
        for node, parent in enumerate(self.parents):
            if parent != ROOT:
                mask[node] = mask[parent]
            mask[node, node] = True
        return mask
