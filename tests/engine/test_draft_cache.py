"""The suite of the draft's cache on the CPU path."""

from __future__ import annotations

from typing import Any

import pytest

from tests.suite.draft_cache import *  # noqa: F403
from tests.suite.draft_cache import Inside
from vllm_adaptivespec.runner_v1.proposer import EagleProposer, TreeProposer

pytestmark = pytest.mark.engine


def use_chain_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def chain_rows(self: Any, metadata: Any, sampled: Any, counts: Any) -> Any:
        result, rows = EagleProposer.prepare_inputs(self, metadata, sampled, counts)
        result.slot_mapping = self.runner.chain_slots[rows]
        return result, rows

    monkeypatch.setattr(TreeProposer, "prepare_inputs", chain_rows)


@pytest.fixture
def inside() -> Inside:
    return Inside(
        sample="_sample",
        blocks=lambda runner, count: runner.input_batch.block_table[0].block_table.np[0, :count].tolist(),
        layers=lambda runner: (runner.target_layers, runner.draft_layers),
        use_chain_rows=use_chain_rows,
    )
