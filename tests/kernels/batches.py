"""Random batches of trees with target logits, for the acceptance kernel and its twin."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import dataclass, field
from typing import Any

import torch

from vllm_adaptivespec.core.acceptance import MarginRule
from vllm_adaptivespec.core.rows import RowSampling
from vllm_adaptivespec.core.tree import ROOT, DraftTree

PADDING_ROWS = 3


def random_tree(rng: random.Random, num_nodes: int, vocab: int) -> DraftTree:
    """Any tree whose siblings differ, as those of a draft's top-k do."""
    tokens: list[int] = []
    parents: list[int] = []
    used: dict[int, set[int]] = {ROOT: set()}
    chain = rng.random() < 0.2
    for node in range(num_nodes):
        open_parents = [p for p in used if len(used[p]) < vocab]
        parent = node - 1 if chain else rng.choice(open_parents)
        token = rng.choice([t for t in range(min(vocab, 40)) if t not in used[parent]] or [vocab - 1])
        if token in used[parent]:
            parent, token = node - 1, rng.randrange(min(vocab, 40))
        used[parent].add(token)
        used[node] = set()
        tokens.append(token)
        parents.append(parent)
    return DraftTree(tuple(tokens), tuple(parents))


@dataclass
class Batch:
    """One verification: requests in order, some without rows."""

    logits: torch.Tensor
    row_starts: list[int]
    trees: list[DraftTree]
    rules: list[MarginRule]
    samplings: list[RowSampling]
    max_nodes: int
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        for (start, end), tree, sampling in zip(
            itertools.pairwise(self.row_starts), self.trees, self.samplings, strict=True
        ):
            if end > start:
                self.tokens += [-9, *tree.tokens]
                self.parents += [-9, *tree.parents]
                self.positions += [sampling.root_position + d for d in (0, *tree.depths)]
        padding = len(self.logits) - len(self.tokens)
        for column in (self.tokens, self.parents, self.positions):
            column += [-9] * padding

    def arguments(self, device: torch.device, *, sampled: bool) -> dict[str, Any]:
        """Keyword arguments of ``margin_acceptance``."""

        def on(value: object, dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(value, dtype=dtype, device=device)

        longest = max((len(r.protected) for r in self.rules), default=0)
        limits = [-1 if r.max_promotions is None else r.max_promotions for r in self.rules]
        protected = [[*r.protected, *[-1] * (longest - len(r.protected))] for r in self.rules]
        arguments: dict[str, Any] = dict(
            logits=self.logits.to(device),
            row_starts=on(self.row_starts, torch.int32),
            tokens=on(self.tokens, torch.int64),
            parents=on(self.parents, torch.int32),
            log_kappas=on([math.log(r.kappa) for r in self.rules], torch.float32),
            max_nodes=self.max_nodes,
            max_promotions=on(limits, torch.int32),
            protected=on(protected, torch.int64).reshape(len(self.rules), longest),
        )
        if sampled:
            arguments |= dict(
                temperatures=on([s.temperature for s in self.samplings], torch.float32),
                seeds=on([s.seed for s in self.samplings], torch.int64),
                positions=on(self.positions, torch.int64),
            )
        return arguments


def random_batch(
    rng: random.Random,
    *,
    num_requests: int,
    vocab: int,
    max_nodes: int,
    dtype: torch.dtype = torch.float32,
    sampled: bool = False,
    specials: bool = False,
) -> Batch:
    """A batch in which matches, promotions and mismatches are all frequent.

    Args:
        specials: put -inf, NaN, +inf and ties in.
    """
    trees, rules, samplings, starts, rows = [], [], [], [0], []
    for _ in range(num_requests):
        empty = rng.random() < 0.1
        tree = random_tree(rng, 0 if empty else rng.randrange(max_nodes + 1), vocab)
        trees.append(tree)
        rules.append(
            MarginRule(
                kappa=rng.choice((1.0, 0.7, 0.3, 0.05)),
                max_promotions=rng.choice((None, None, 0, 1, 2)),
                protected=frozenset(rng.sample(range(vocab), min(vocab, rng.choice((0, 0, 1, 3))))),
            )
        )
        temperature = rng.choice((0.0, 0.8)) if sampled else 0.0
        samplings.append(RowSampling(temperature, rng.getrandbits(63), rng.randrange(10_000)))
        if empty and rng.random() < 0.5:
            starts.append(starts[-1])
            continue
        starts.append(starts[-1] + 1 + len(tree))
        generator = torch.Generator().manual_seed(rng.getrandbits(40))
        own = torch.randn((1 + len(tree), vocab), generator=generator) * rng.choice((0.3, 1.0, 4.0))
        for node in (ROOT, *range(len(tree))):
            children = tree.children[node]
            if children and rng.random() < 0.7:  # make a child the choice, or nearly
                own[1 + node, tree.tokens[rng.choice(children)]] = own[1 + node].max() + rng.uniform(-1.5, 1.0)
        rows.append(own)
    rows.append(torch.full((PADDING_ROWS, vocab), float("nan")))
    logits = torch.cat(rows)
    if specials and vocab > 2:
        for row in range(len(logits) - PADDING_ROWS):
            kind = rng.randrange(8)
            columns = [rng.randrange(min(vocab, 40)) for _ in range(3)]
            if kind == 0:
                logits[row, columns] = -math.inf
            elif kind == 1:
                logits[row, columns] = math.nan
            elif kind == 2:
                logits[row] = -math.inf
            elif kind == 3:
                logits[row, columns] = math.inf
            elif kind == 4:
                logits[row, columns] = logits[row].max()
    return Batch(logits.to(dtype), starts, trees, rules, samplings, max_nodes)
