"""SmolLM2 with its trained head: the GPU path drafts the CPU path's trees, and accepts the same of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from vllm.sampling_params import StructuredOutputsParams

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


def test_grammars_get_chains(smol: Engine, plain_smol: Engine) -> None:
    """Beside a request with trees, one whose masks are computed along the list of its drafts."""
    tokenizer = smol.llm.get_tokenizer()
    prompts = [list(tokenizer.encode(text)) for text in PROMPTS]
    grammar = StructuredOutputsParams(regex="(Rhine|Danube), (Rhone|Volga) and the (Thames|Seine)")

    def params() -> list[Any]:
        return [
            sampling(8),
            sampling(20, structured_outputs=grammar, ignore_eos=False, detokenize=True),
        ]

    expected = plain_smol.generate(prompts, params())
    before = smol.llm.collective_rpc("adaptivespec_stats")[0]
    outputs = smol.generate(prompts, params())
    after = smol.llm.collective_rpc("adaptivespec_stats")[0]
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
    assert re.fullmatch(grammar.regex, outputs[1].outputs[0].text.strip())
    chains, verified = (after[k] - before[k] for k in ("chains", "verifications"))
    assert 0 < chains < verified
