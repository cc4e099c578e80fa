"""Hundreds of random requests on small, scarce blocks, with drafts that are mostly right."""

from __future__ import annotations

import random

import pytest

from tests.engine.engines import Engine, Pair, sampling
from tests.engine.soak import soak
from tests.suite.oracle import Oracle

pytestmark = [pytest.mark.engine, pytest.mark.slow]

VOCAB = 512


def test_soak(tiny_pair: Pair, tiny_spec: Engine, oracle: Oracle) -> None:
    rng = random.Random(0)
    lengths = (1, 4, 17, 31, 32, 33, 70, 130)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(rng.choice(lengths))] for _ in range(60)]
    answers = tiny_pair.plain.tokens(prompts, sampling(40))
    oracle.answers.by_prompt = {tuple(p): a for p, a in zip(prompts, answers, strict=True)}
    oracle.install(tiny_spec)
    soak(tiny_spec, prompts, answers, VOCAB)
