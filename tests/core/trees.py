"""Random trees, and what a tree is in terms of token paths: a second description, independent of ``DraftTree``."""

from __future__ import annotations

from hypothesis import strategies as st

from vllm_adaptivespec.core.tree import ROOT, DraftTree

Path = tuple[int, ...]
"""Nodes, or their tokens, from the root's child downwards."""


@st.composite
def parent_lists(draw: st.DrawFn, min_nodes: int = 0, max_nodes: int = 12) -> tuple[int, ...]:
    """Any parents a tree may have, from chains to stars."""
    num_nodes = draw(st.integers(min_nodes, max_nodes))
    return tuple(draw(st.integers(ROOT, node - 1)) for node in range(num_nodes))


def numbered_trees(min_nodes: int = 0, max_nodes: int = 12) -> st.SearchStrategy[DraftTree]:
    """Trees whose node ``n`` carries token ``100 + n``, so that a token names its node."""
    return parent_lists(min_nodes, max_nodes).map(lambda p: DraftTree(tuple(range(100, 100 + len(p))), p))


@st.composite
def small_vocabulary_trees(draw: st.DrawFn, vocab: int, min_nodes: int = 0, max_nodes: int = 10) -> DraftTree:
    """Trees over tokens below ``vocab``; siblings differ, as a draft's top-k does."""
    tokens: list[int] = []
    parents: list[int] = []
    for _ in range(draw(st.integers(min_nodes, max_nodes))):
        free = [
            (parent, token)
            for parent in range(ROOT, len(tokens))
            for token in range(vocab)
            if (parent, token) not in set(zip(parents, tokens, strict=True))
        ]
        parent, token = draw(st.sampled_from(free))
        parents.append(parent)
        tokens.append(token)
    return DraftTree(tuple(tokens), tuple(parents))


def node_path(tree: DraftTree, node: int) -> Path:
    """Nodes from the root's child to ``node``, by following the parents."""
    return () if node == ROOT else (*node_path(tree, tree.parents[node]), node)


def token_path(tree: DraftTree, node: int) -> Path:
    return tuple(tree.tokens[n] for n in node_path(tree, node))
