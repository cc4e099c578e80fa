"""A drafter that knows the answer: trees around the true continuation, in every awkward shape.

With a random head almost nothing is accepted, so little would be tested. Exactness must hold for any drafts; these
make long, non-contiguous accepted paths frequent.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.engine.engines import Engine, sampling
from vllm_adaptivespec.core.tree import ROOT, DraftTree


@dataclass
class Answers:
    """What the oracle knows.

    Args:
        by_prompt: true continuation of each prompt.
        seed: of the trees' shapes.
    """

    by_prompt: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    seed: int = 0

    def tree(
        self, prompt: Sequence[int], request_id: str, done: int, depth: int, max_nodes: int, width: int
    ) -> DraftTree | None:
        """A tree for a request that has ``done`` tokens of output; None where the oracle knows nothing."""
        answer = self.by_prompt.get(tuple(prompt))
        if answer is None or depth <= 0:
            return None
        rng = random.Random(f"{self.seed} {request_id} {done}")
        if rng.random() < 0.2:
            width = 1
        return oracle_tree(answer[done : done + min(depth, 4)], max_nodes, width, rng)


@dataclass(frozen=True)
class Size:
    """How much the suite runs; the interpreter is slow.

    Args:
        lengths: of prompts.
        num_tokens, parameter_tokens, crowded_tokens, cache_tokens: of output, in the four kinds of tests.
    """

    lengths: tuple[int, ...]
    num_tokens: int
    parameter_tokens: int
    crowded_tokens: int
    cache_tokens: int


@dataclass
class Oracle:
    """Puts an adapter's oracle in place of its drafter.

    Args:
        part: the model runner's attribute that drafts.
        drafter: class to give it; reads ``answers``.
    """

    part: str
    drafter: type
    answers: Answers

    def install(self, engine: Engine) -> None:
        drafter = getattr(engine.runner, self.part)
        drafter.__class__ = self.drafter
        drafter.runner = engine.runner

    def knowing(self, engine: Engine, plain: Engine, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        """Install it with the target's own greedy continuations, one request at a time, and return them."""
        answers = [plain.tokens([p], sampling(num_tokens))[0] for p in prompts]
        self.answers.by_prompt = {tuple(p): a for p, a in zip(prompts, answers, strict=True)}
        self.install(engine)
        return answers


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


def prompts_of(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 512) for _ in range(length)] for length in lengths]


def stats(engine: Engine) -> dict[str, Any]:
    return engine.llm.collective_rpc("adaptivespec_stats")[0]


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    return [list(c.token_ids) for o in outputs for c in o.outputs]
