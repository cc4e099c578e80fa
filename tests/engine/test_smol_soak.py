"""Hundreds of random requests on SmolLM2 with its trained head."""

from __future__ import annotations

import random

import pytest

from tests.engine.engines import Engine, Pair, sampling
from tests.engine.soak import soak

pytestmark = [pytest.mark.engine, pytest.mark.slow]

VOCAB = 49152
LONGEST = 11
WARM_UP = 96 << 20
"""The process still grows after 250 requests, slower and slower, with plain vLLM alike (some 10 MiB in 100 requests):
oneDNN keeps something for every number of rows it meets."""


def test_soak(smol_pair: Pair, smol_spec: Engine, smol_prompts: list[list[int]]) -> None:
    rng = random.Random(0)
    prompts = [rng.choice(smol_prompts)[: rng.randrange(2, 70)] for _ in range(40)]
    answers = smol_pair.plain.tokens(prompts, sampling(LONGEST))
    soak(smol_spec, prompts, answers, VOCAB, may_grow=WARM_UP)
