"""The suite of the draft's cache on the GPU path."""

from __future__ import annotations

import pytest

from tests.suite.draft_cache import *  # noqa: F403
from tests.suite.draft_cache import Inside
from vllm_adaptivespec.runner_v2.speculator import TreeSpeculator

pytestmark = pytest.mark.engine


def use_chain_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TreeSpeculator, "_follow_paths", lambda self, *args: None)


@pytest.fixture
def inside() -> Inside:
    return Inside(
        sample="sample",
        blocks=lambda runner, count: runner.block_tables.input_block_tables[0][0, :count].tolist(),
        layers=lambda runner: (runner.model_state.target_layers, runner.speculator.draft_layers),
        use_chain_rows=use_chain_rows,
    )
