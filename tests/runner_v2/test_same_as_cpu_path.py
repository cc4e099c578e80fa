"""SmolLM2 with its trained head: the GPU path drafts the CPU path's trees, and accepts the same of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.engines import Engine, sampling
from tests.engine.smol import assert_equal
from tests.runner_v2.record_cpu_path import PROMPTS, Tree, run, start_smol
from vllm_adaptivespec.runner_v2.speculator import TreeSpeculator

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def cpu_path(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("cpu-path") / "record.json"
    env = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "ADAPTIVESPEC_TEST_WORKER")}
    command = [sys.executable, "-m", "tests.runner_v2.record_cpu_path", str(out)]
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(out.read_text())


@pytest.fixture(scope="module")
def smol() -> Engine:
    return start_smol()


@pytest.fixture(scope="module")
def plain_smol() -> Engine:
    return start_smol(speculative=False)


def test_same_trees_same_tokens_same_acceptance(
    smol: Engine, cpu_path: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    trees: list[Tree] = []
    propose = TreeSpeculator.propose

    def recorded(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        drafts = propose(self, batch, *args, **kwargs)
        store = self.model_state.store
        for row, slot in enumerate(batch.idx_mapping.tolist()):
            count = int(store.num_nodes[slot])
            trees.append((drafts[row, :count].tolist(), store.parents[slot, :count].tolist()))
        return drafts

    monkeypatch.setattr(TreeSpeculator, "propose", recorded)
    record = run(smol, trees)
    assert record["tokens"] == cpu_path["tokens"]
    stats, expected = record["stats"], cpu_path["stats"]
    assert expected["emitted"] / expected["verifications"] > 1.5  # the head is really used
    assert expected["chains"] < expected["verifications"]
    for got, want in zip(record["trees"], cpu_path["trees"], strict=True):
        # What is drafted in the last step nobody verifies.
        assert got[:-1] == want[: len(got) - 1]
    for count in ("verifications", "emitted", "accepted", "drafted", "depth_sum", "chains"):
        assert stats[count] == expected[count], count


def test_log_probs_are_those_without_speculation(smol: Engine, plain_smol: Engine) -> None:
    tokenizer = smol.llm.get_tokenizer()
    prompts = [list(tokenizer.encode(PROMPTS[1]))]
    for params in (sampling(10, logprobs=1), sampling(10, logprobs=1, temperature=0.8, top_p=0.9, seed=7)):
        assert_equal(smol.generate(prompts, params), plain_smol.generate(prompts, params))
