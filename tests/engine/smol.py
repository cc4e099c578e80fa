"""Comparing SmolLM2's outputs, tokens and log-probs."""

from __future__ import annotations

from typing import Any

import pytest


def tokens_and_logprobs(outputs: list[Any]) -> tuple[list[list[int]], list[list[float]]]:
    completions = [o.outputs[0] for o in outputs]
    tokens = [list(c.token_ids) for c in completions]
    return tokens, [[row[t].logprob for row, t in zip(c.logprobs, c.token_ids, strict=True)] for c in completions]


def assert_equal(outputs: list[Any], reference: list[Any]) -> None:
    tokens, logprobs = tokens_and_logprobs(outputs)
    expected_tokens, expected_logprobs = tokens_and_logprobs(reference)
    assert tokens == expected_tokens
    for got, expected in zip(logprobs, expected_logprobs, strict=True):
        assert got == pytest.approx(expected, abs=1e-4)
