"""Every request parameter behaves as without speculation, along tree paths too. Oracle trees make paths long."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.engines import Engine, Pair, sampling
from tests.engine.oracle import OracleProposer
from tests.engine.test_oracle_exactness import prompts_of

pytestmark = pytest.mark.engine

PROMPTS = prompts_of((5, 33, 21, 40), seed=5)


def both(pair: Pair, engine: Engine, params: Any, prompts: list[list[int]] = PROMPTS) -> tuple[list[Any], list[Any]]:
    """Outputs of plain vLLM and of the plugin with an oracle that knows them."""
    expected = pair.plain.generate(prompts, params)
    OracleProposer.answers = {
        tuple(p): list(o.outputs[0].token_ids) + [7] * 8 for p, o in zip(prompts, expected, strict=True)
    }
    engine.runner.drafter.__class__ = OracleProposer
    stats = engine.runner.stats
    before = stats.accepted
    outputs = engine.generate(prompts, params)
    assert stats.accepted > before
    return expected, outputs


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [list(c.token_ids) for o in outputs for c in o.outputs]


@pytest.mark.parametrize(
    "arguments",
    [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.8, "frequency_penalty": 0.5},
        {"allowed_token_ids": list(range(100, 160))},
        {"temperature": 0.7, "seed": 5, "top_k": 20},
        {"temperature": 1.0, "seed": 5, "top_p": 0.8, "repetition_penalty": 1.2},
        {"min_tokens": 30, "stop_token_ids": list(range(3, 250)), "ignore_eos": False},
        {"stop_token_ids": list(range(3, 40)), "ignore_eos": False},
        {"max_tokens": 3},
    ],
    ids=lambda a: "-".join(a),
)
def test_sampling_parameters(tiny_pair: Pair, tiny_spec: Engine, arguments: dict[str, Any]) -> None:
    params = sampling(**{"max_tokens": 40, **arguments})
    expected, outputs = both(tiny_pair, tiny_spec, params)
    assert tokens(outputs) == tokens(expected)
    assert [o.outputs[0].finish_reason for o in outputs] == [o.outputs[0].finish_reason for o in expected]


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_too_short_to_draft_for(tiny_pair: Pair, tiny_spec: Engine, max_tokens: int) -> None:
    """Nothing is drafted that could not be emitted."""
    verified = tiny_spec.runner.stats.verifications
    params = sampling(max_tokens)
    assert tiny_spec.tokens(PROMPTS, params) == tiny_pair.plain.tokens(PROMPTS, params)
    assert tiny_spec.runner.stats.verifications == verified


def test_bad_words_along_a_branch(tiny_pair: Pair, tiny_spec: Engine) -> None:
    """A forbidden pair must be seen even when its first token was accepted in the same step."""
    free = tiny_pair.plain.tokens(PROMPTS, sampling(30))
    params = []
    for answer in free:
        p = sampling(30)
        p._bad_words_token_ids = [answer[10:12], answer[15:17], [answer[20]]]
        params.append(p)
    expected, outputs = both(tiny_pair, tiny_spec, params)
    assert tokens(outputs) == tokens(expected) != free


def test_mixed_batch(tiny_pair: Pair, tiny_spec: Engine) -> None:
    """Greedy, sampled, penalised and unspeculated requests share every step."""
    params = [
        sampling(40),
        sampling(40, temperature=0.8, seed=11),
        sampling(40, repetition_penalty=1.4),
        sampling(40, extra_args={"adaptivespec_enabled": 0}),
    ]
    expected, outputs = both(tiny_pair, tiny_spec, params)
    assert tokens(outputs) == tokens(expected)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_logprobs(tiny_pair: Pair, tiny_spec: Engine, count: int) -> None:
    """Every emitted token has its own row's log-probs, with ragged accepted lengths and prompt log-probs beside."""
    params = [
        sampling(30, logprobs=count),
        sampling(30),
        sampling(30, logprobs=count, prompt_logprobs=1),
        sampling(30, logprobs=count, temperature=0.9, seed=3),
    ]
    expected, outputs = both(tiny_pair, tiny_spec, params)
    assert tokens(outputs) == tokens(expected)
    for output, reference in zip(outputs, expected, strict=True):
        completion, wanted = output.outputs[0], reference.outputs[0]
        assert (completion.logprobs is None) == (wanted.logprobs is None)
        for row, wanted_row in zip(completion.logprobs or [], wanted.logprobs or [], strict=True):
            assert set(row) == set(wanted_row)
            for token, value in row.items():
                assert value.logprob == pytest.approx(wanted_row[token].logprob, abs=1e-4)
                assert value.rank == wanted_row[token].rank
        if reference.prompt_logprobs is not None:
            for got, want in zip(output.prompt_logprobs[1:], reference.prompt_logprobs[1:], strict=True):
                assert {t: v.logprob for t, v in got.items()} == pytest.approx(
                    {t: v.logprob for t, v in want.items()}, abs=1e-4
                )


def test_several_completions(tiny_pair: Pair, tiny_spec: Engine) -> None:
    # One short prompt: stock vLLM cannot take back a seeded draw on a CPU, which chunked prompts make it do.
    params = sampling(25, n=3, temperature=0.9, seed=21)
    assert tokens(tiny_spec.generate(PROMPTS[:1], params)) == tokens(tiny_pair.plain.generate(PROMPTS[:1], params))


def test_stop_ids_are_never_promoted_to_or_away_from(tiny_pair: Pair, tiny_spec: Engine) -> None:
    """With everything else promotable, an answer still ends where the target ends it."""
    from dataclasses import replace

    free = tiny_pair.plain.tokens(PROMPTS, sampling(40))
    stops = sorted({answer[12] for answer in free})
    engine = tiny_spec
    engine.runner.adaptivespec = replace(engine.runner.adaptivespec, margin_threshold=1e-9, margin_threshold_floor=1e-9)
    OracleProposer.answers = {tuple(p): [stops[0]] * 60 for p in PROMPTS}  # every draft is a stop token
    engine.runner.drafter.__class__ = OracleProposer
    promoted = engine.runner.stats.promoted
    outputs = engine.generate(PROMPTS, sampling(40, stop_token_ids=stops, ignore_eos=False))
    assert engine.runner.stats.promoted > promoted  # wrong twigs of the oracle's trees were promoted
    for output in outputs:
        completion = output.outputs[0]
        assert completion.finish_reason in ("stop", "length")
        assert not set(completion.token_ids[:-1]) & set(stops)


def test_kappa_does_not_leak_into_exact_requests(tiny_pair: Pair, tiny_spec: Engine) -> None:
    from dataclasses import replace

    tiny_spec.runner.adaptivespec = replace(tiny_spec.runner.adaptivespec, margin_threshold_floor=0.01)
    tiny_spec.llm.llm_engine.input_processor.validate_logits_processors_params = lambda params: None
    params = [sampling(40, extra_args={"adaptivespec_margin_threshold": k}) for k in (1.0, 0.01, 1.0, 0.01)]
    expected, outputs = both(tiny_pair, tiny_spec, params)
    assert tokens(outputs)[::2] == tokens(expected)[::2]
