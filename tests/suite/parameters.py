"""Every request parameter behaves as without speculation, along tree paths too. Oracle trees make paths long."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.engines import Engine, Pair, sampling
from tests.suite.oracle import Oracle, Size, prompts_of, stats, tokens_of

PROMPTS = prompts_of((5, 33, 21, 40), seed=5)


def both(pair: Pair, engine: Engine, oracle: Oracle, params: Any) -> tuple[list[Any], list[Any]]:
    """Outputs of plain vLLM and of the plugin with an oracle that knows them."""
    expected = pair.plain.generate(PROMPTS, params)
    oracle.answers.by_prompt = {
        tuple(p): list(o.outputs[0].token_ids) + [7] * 8 for p, o in zip(PROMPTS, expected, strict=True)
    }
    oracle.install(engine)
    before = stats(engine)["accepted"]
    outputs = engine.generate(PROMPTS, params)
    assert stats(engine)["accepted"] > before
    return expected, outputs


@pytest.mark.parametrize(
    "arguments",
    [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 0.8, "frequency_penalty": 0.5},
        {"allowed_token_ids": list(range(100, 160))},
        {"temperature": 0.7, "seed": 5, "top_k": 20},
        {"temperature": 1.0, "seed": 5, "top_p": 0.8, "repetition_penalty": 1.2},
        {"min_tokens": 20, "stop_token_ids": list(range(3, 120)), "ignore_eos": False},
        {"stop_token_ids": list(range(3, 40)), "ignore_eos": False},
        {"max_tokens": 3},
    ],
    ids=lambda a: "-".join(a),
)
def test_sampling_parameters(
    tiny_pair: Pair, tiny_spec: Engine, oracle: Oracle, size: Size, arguments: dict[str, Any]
) -> None:
    params = sampling(**{"max_tokens": size.parameter_tokens, **arguments})
    expected, outputs = both(tiny_pair, tiny_spec, oracle, params)
    assert tokens_of(outputs) == tokens_of(expected)
    assert [o.outputs[0].finish_reason for o in outputs] == [o.outputs[0].finish_reason for o in expected]


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_too_short_to_draft_for(tiny_pair: Pair, tiny_spec: Engine, max_tokens: int) -> None:
    """Nothing is drafted that could not be emitted."""
    verified = stats(tiny_spec)["verifications"]
    params = sampling(max_tokens)
    assert tiny_spec.tokens(PROMPTS, params) == tiny_pair.plain.tokens(PROMPTS, params)
    assert stats(tiny_spec)["verifications"] == verified


def test_bad_words_along_a_branch(tiny_pair: Pair, tiny_spec: Engine, oracle: Oracle, size: Size) -> None:
    """A forbidden pair must be seen even when its first token was accepted in the same step."""
    free = tiny_pair.plain.tokens(PROMPTS, sampling(size.parameter_tokens))
    params = []
    for answer in free:
        p = sampling(size.parameter_tokens)
        p._bad_words_token_ids = [answer[5:7], answer[10:12], [answer[15]]]
        params.append(p)
    expected, outputs = both(tiny_pair, tiny_spec, oracle, params)
    assert tokens_of(outputs) == tokens_of(expected) != free


def test_mixed_batch(tiny_pair: Pair, tiny_spec: Engine, oracle: Oracle, size: Size) -> None:
    """Greedy, sampled, penalised and unspeculated requests share every step."""
    length = size.parameter_tokens
    params = [
        sampling(length),
        sampling(length, temperature=0.8, seed=11),
        sampling(length, repetition_penalty=1.4),
        sampling(length, extra_args={"adaptivespec_enabled": 0}),
    ]
    expected, outputs = both(tiny_pair, tiny_spec, oracle, params)
    assert tokens_of(outputs) == tokens_of(expected)


@pytest.mark.parametrize("count", [0, 1, 5])
def test_logprobs(tiny_pair: Pair, tiny_spec: Engine, oracle: Oracle, size: Size, count: int) -> None:
    """Every emitted token has its own row's log-probs, with ragged accepted lengths and prompt log-probs beside."""
    length = size.parameter_tokens
    params = [
        sampling(length, logprobs=count),
        sampling(length),
        sampling(length, logprobs=count, prompt_logprobs=1),
        sampling(length, logprobs=count, temperature=0.9, seed=3),
    ]
    expected, outputs = both(tiny_pair, tiny_spec, oracle, params)
    assert tokens_of(outputs) == tokens_of(expected)
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


def test_kappa_is_the_requests_own(tiny_pair: Pair, tiny_spec: Engine, oracle: Oracle, size: Size) -> None:
    """With a floor below 1, one request is lossy and the others stay exact."""
    prompts = PROMPTS[:3]
    answers = oracle.knowing(tiny_spec, tiny_pair.plain, prompts, size.parameter_tokens)
    lossy = {"adaptivespec_margin_threshold": 1e-6}
    before = stats(tiny_spec)["promoted"]
    with tiny_spec.lossy_down_to(1e-6):
        params = [sampling(size.parameter_tokens, extra_args=lossy if i == 1 else {}) for i in range(3)]
        outputs = tiny_spec.tokens(prompts, params)
    assert stats(tiny_spec)["promoted"] > before
    assert outputs[0] == answers[0]
    assert outputs[1] != answers[1]
    assert outputs[2] == answers[2]
