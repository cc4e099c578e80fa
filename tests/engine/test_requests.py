"""The suite of request parameters on the CPU path, and what only it has."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.engine.engines import Engine, Pair, sampling
from tests.suite.oracle import Oracle, stats, tokens_of
from tests.suite.parameters import *  # noqa: F403
from tests.suite.parameters import PROMPTS

pytestmark = pytest.mark.engine


def test_several_completions(tiny_pair: Pair, tiny_spec: Engine) -> None:
    # One short prompt: stock vLLM cannot take back a seeded draw on a CPU, which chunked prompts make it do.
    params = sampling(25, n=3, temperature=0.9, seed=21)
    assert tokens_of(tiny_spec.generate(PROMPTS[:1], params)) == tokens_of(
        tiny_pair.plain.generate(PROMPTS[:1], params)
    )


def test_stop_ids_are_never_promoted_to_or_away_from(tiny_pair: Pair, tiny_spec: Engine, oracle: Oracle) -> None:
    """With everything else promotable, an answer still ends where the target ends it."""
    free = tiny_pair.plain.tokens(PROMPTS, sampling(40))
    stops = sorted({answer[12] for answer in free})
    engine = tiny_spec
    engine.runner.adaptivespec = replace(engine.runner.adaptivespec, margin_threshold=1e-9, margin_threshold_floor=1e-9)
    oracle.answers.by_prompt = {tuple(p): [stops[0]] * 60 for p in PROMPTS}  # every draft is a stop token
    oracle.install(engine)
    promoted = stats(engine)["promoted"]
    outputs = engine.generate(PROMPTS, sampling(40, stop_token_ids=stops, ignore_eos=False))
    assert stats(engine)["promoted"] > promoted  # wrong twigs of the oracle's trees were promoted
    for output in outputs:
        completion = output.outputs[0]
        assert completion.finish_reason in ("stop", "length")
        assert not set(completion.token_ids[:-1]) & set(stops)
