"""Each part of the GPU path broken alone: what the suite compares must show it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.engine.engines import Engine, Pair, sampling
from tests.suite.oracle import Oracle, prompts_of, tokens_of
from vllm_adaptivespec.runner_v2 import model_state, rejection_sampler

pytestmark = pytest.mark.engine

LENGTHS, NUM_TOKENS = (5, 33, 70), 30


def greedy(pair: Pair, engine: Engine, oracle: Oracle) -> tuple[int, float]:
    """Prompts that come out wrong, and the largest error of a log-probability before the first wrong token."""
    prompts = prompts_of(LENGTHS)
    oracle.knowing(engine, pair.plain, prompts, NUM_TOKENS)
    params = sampling(NUM_TOKENS, logprobs=0)
    wrong, error = 0, 0.0
    for got, want in zip(engine.generate(prompts, params), pair.plain.generate(prompts, params), strict=True):
        (a,), (b,) = got.outputs, want.outputs
        wrong += list(a.token_ids) != list(b.token_ids)
        for row, other, token, expected in zip(a.logprobs, b.logprobs, a.token_ids, b.token_ids, strict=True):
            if token != expected:
                break
            error = max(error, abs(row[token].logprob - other[token].logprob))
    return wrong, error


def no_commit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(model_state, "kv_commit", lambda *args: None)


def causal_mask(patch: pytest.MonkeyPatch) -> None:
    stage = model_state.stage_rows

    def staged(store: Any, slots: Any, local: Any, rows: Any, row_masks: Any, positions: Any) -> Any:
        shift = stage(store, slots, local, rows, row_masks, positions)
        row_masks[rows] = (torch.ones_like(rows) << (local.long() + 1)) - 1
        return shift

    patch.setattr(model_state, "stage_rows", staged)


def chain_positions(patch: pytest.MonkeyPatch) -> None:
    stage = model_state.stage_rows

    def staged(store: Any, slots: Any, local: Any, rows: Any, row_masks: Any, positions: Any) -> Any:
        shift = stage(store, slots, local, rows, row_masks, positions)
        positions[rows] -= shift
        return torch.zeros_like(shift)

    patch.setattr(model_state, "stage_rows", staged)


def test_nothing_broken(tiny_pair: Pair, tiny_spec: Engine, oracle: Oracle) -> None:
    wrong, error = greedy(tiny_pair, tiny_spec, oracle)
    assert wrong == 0
    assert error < 1e-4


@pytest.mark.parametrize("broken", [no_commit, causal_mask, chain_positions])
def test_output_shows(
    tiny_pair: Pair,
    tiny_spec: Engine,
    oracle: Oracle,
    monkeypatch: pytest.MonkeyPatch,
    broken: Callable[[pytest.MonkeyPatch], None],
) -> None:
    broken(monkeypatch)
    wrong, _ = greedy(tiny_pair, tiny_spec, oracle)
    assert wrong > 0


def test_log_probs_show_rows_out_of_order(
    tiny_pair: Pair, tiny_spec: Engine, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = rejection_sampler.TreeRejectionSampler
    monkeypatch.setattr(ours, "_get_logprobs_tensors", ours.__mro__[1]._get_logprobs_tensors)
    wrong, error = greedy(tiny_pair, tiny_spec, oracle)
    assert wrong == 0
    assert error > 0.1


def test_seeded_sampling_shows_draws_keyed_by_row(
    tiny_pair: Pair, tiny_spec: Engine, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node's draw must be that of its place in the text, not in the list of nodes."""
    prompts = prompts_of(LENGTHS)
    params = sampling(NUM_TOKENS, temperature=1.0, seed=3)
    expected = tiny_pair.plain.generate(prompts, params)
    oracle.answers.by_prompt = {tuple(p): list(o.outputs[0].token_ids) for p, o in zip(prompts, expected, strict=True)}
    oracle.install(tiny_spec)
    assert tokens_of(tiny_spec.generate(prompts, params)) == tokens_of(expected)
    draw = rejection_sampler.gumbel_sample

    def by_row(logits: Any, idx: Any, temperature: Any, seeds: Any, positions: Any, **kwargs: Any) -> Any:
        return draw(logits, idx, temperature, seeds, torch.arange(len(positions)), **kwargs)

    monkeypatch.setattr(rejection_sampler, "gumbel_sample", by_row)
    tiny_spec.reset_cache()
    assert tokens_of(tiny_spec.generate(prompts, params)) != tokens_of(expected)
