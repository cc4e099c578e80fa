"""FULL graphs of decoding: the target's pass, the draft's first pass and its levels, replayed from recordings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.engines import Engine, Pair, sampling, start_tiny
from tests.runner_v2 import graphs
from tests.suite.oracle import Oracle, prompts_of, tokens_of
from vllm_adaptivespec.runner_v2.model_state import TreeModelState
from vllm_adaptivespec.runner_v2.speculator import TreeSpeculator

pytestmark = pytest.mark.engine

LENGTHS, NUM_TOKENS = (5, 33, 70), 24
SHAPE: dict[str, Any] = {"tree_policy": "static", "static_shape": [3, 2, 5]}


@pytest.fixture(scope="module")
def captured(tiny: tuple[Path, Path]) -> Iterator[tuple[Engine, list[Any]]]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        graphs.patch(monkeypatch)
        engine = start_tiny(*tiny, 64, **SHAPE)
        # One, two and four requests for the target (root and eight nodes each); two rows a request for a level, so
        # that its graphs are of one, two and six requests, and three requests run padded.
        yield engine, graphs.capture_all(engine, [2, 4, 9, 12, 18, 36])


def wrong(pair: Pair, engine: Engine, oracle: Oracle) -> int:
    prompts = prompts_of(LENGTHS)
    answers = oracle.knowing(engine, pair.plain, prompts, NUM_TOKENS)
    outputs = engine.tokens(prompts, sampling(NUM_TOKENS))
    return sum(output != answer for output, answer in zip(outputs, answers, strict=True))


@pytest.fixture
def engine(captured: tuple[Engine, list[Any]]) -> Iterator[Engine]:
    with captured[0].restored():
        yield captured[0]


def test_replays_give_the_targets_output(
    tiny_pair: Pair, engine: Engine, captured: tuple[Engine, list[Any]], oracle: Oracle
) -> None:
    managers = captured[1]
    assert [sorted(d.num_reqs for d in m.graphs) for m in managers] == [[1, 2, 4], [1, 2, 4], [1, 2, 5, 6]]
    assert wrong(tiny_pair, engine, oracle) == 0
    for manager in managers:
        assert sum(g.replays for g in manager.graphs.values()) > 3
    assert sum(g.replays for d, g in managers[2].graphs.items() if d.num_reqs == 5) > 0  # padded


def test_replays_draft_what_eager_passes_draft(
    tiny_pair: Pair, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head's own trees, step by step, with and without graphs."""
    drafted: list[Any] = []
    propose = TreeSpeculator.propose

    def recorded(self: Any, batch: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        tokens = propose(self, batch, *args, **kwargs)
        store = self.model_state.store
        for row, slot in enumerate(batch.idx_mapping.tolist()):
            drafted.append((batch.req_ids[row][:1], tokens[row].tolist(), store.parents[slot].tolist()))
        return tokens

    monkeypatch.setattr(TreeSpeculator, "propose", recorded)
    prompts = prompts_of(LENGTHS)
    runs = []
    for managers_on in (True, False):
        for manager in (
            engine.runner.cudagraph_manager,
            engine.runner.speculator.prefill_cudagraph_manager,
            engine.runner.speculator.decode_cudagraph_manager,
        ):
            manager._graphs_captured = managers_on
        drafted.clear()
        outputs = engine.tokens(prompts, sampling(8))
        runs.append((outputs, [d[1:] for d in drafted]))
        engine.reset_cache()
    for manager in (
        engine.runner.cudagraph_manager,
        engine.runner.speculator.prefill_cudagraph_manager,
        engine.runner.speculator.decode_cudagraph_manager,
    ):
        manager._graphs_captured = True
    assert runs[0] == runs[1]
    assert runs[0][0] == tiny_pair.plain.tokens(prompts, sampling(8))


@pytest.mark.parametrize("buffer", ["row_masks", "context_lens"])
def test_negative_control_buffers_that_move(
    tiny_pair: Pair, engine: Engine, oracle: Oracle, monkeypatch: pytest.MonkeyPatch, buffer: str
) -> None:
    """A tensor made anew for each step is not the one that the graph reads."""
    prepare = TreeModelState.prepare_inputs

    def moved(self: Any, *args: Any) -> Any:
        setattr(self, buffer, getattr(self, buffer).clone())
        return prepare(self, *args)

    kept = getattr(engine.runner.model_state, buffer)
    monkeypatch.setattr(TreeModelState, "prepare_inputs", moved)
    try:
        assert wrong(tiny_pair, engine, oracle) > 0
    finally:
        setattr(engine.runner.model_state, buffer, kept)


def test_seeded_sampling(tiny_pair: Pair, engine: Engine, oracle: Oracle) -> None:
    prompts = prompts_of(LENGTHS)
    params = [sampling(12, temperature=0.9, seed=i) for i in range(3)]
    expected = tiny_pair.plain.generate(prompts, params)
    oracle.answers.by_prompt = {tuple(p): list(o.outputs[0].token_ids) for p, o in zip(prompts, expected, strict=True)}
    oracle.install(engine)
    assert tokens_of(engine.generate(prompts, params)) == tokens_of(expected)
