"""Engines for the exactness tests: float32, eager, in this process, so that a test can look inside and break things."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Read by vLLM when it is imported or when an engine starts.
os.environ.update(
    # Two threads that wait for each other crawl as soon as anything else runs on two cores.
    OMP_NUM_THREADS="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_CI_ENV="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)

import pytest

from tests.engine.engines import Engine, Pair, start
from tests.engine.oracle import ANSWERS, OracleProposer
from tests.suite.fixtures import crowded, crowded_engine, tiny_pair, tiny_spec  # noqa: F401
from tests.suite.oracle import Oracle, Size
from tests.tiny_models import make_tiny_models
from vllm_adaptivespec.cli.models import demo_head, demo_target


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random target on which context matters, and a random head for it."""
    return make_tiny_models(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def spec_options() -> dict[str, Any]:
    """The plugin's keys beside the head."""
    return {"tree_policy": "adaptive"}


@pytest.fixture
def oracle() -> Oracle:
    """A drafter that knows the answer; a test tells it what that is."""
    ANSWERS.by_prompt, ANSWERS.seed = {}, 0
    return Oracle("drafter", OracleProposer, ANSWERS)


@pytest.fixture(scope="session")
def size() -> Size:
    """How much each test of the suite runs."""
    return Size(
        lengths=(5, 33, 70, 1, 100, 62), num_tokens=90, parameter_tokens=40, crowded_tokens=90, cache_tokens=120
    )


@pytest.fixture(scope="session")
def smol_pair() -> Pair:
    """SmolLM2-135M-Instruct and its trained head, plain and with the plugin."""
    common = dict(model=str(demo_target()), max_model_len=512, max_num_seqs=8, block_size=64)
    spec = {"model": str(demo_head()), "num_speculative_tokens": 8, "tree_policy": "adaptive"}
    return Pair(start(None, **common), start(spec, **common))


@pytest.fixture(scope="session")
def smol_prompts(smol_pair: Pair) -> list[list[int]]:
    """Held-out chat prompts, as token ids."""
    tokenizer = smol_pair.plain.llm.get_tokenizer()
    lines = (demo_head() / "heldout.jsonl").read_text().splitlines()[:32]
    return [
        list(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": json.loads(line)["prompt"]}], add_generation_prompt=True, return_dict=False
            )
        )
        for line in lines
    ]


@pytest.fixture
def smol_spec(smol_pair: Pair) -> Iterator[Engine]:
    """The speculating SmolLM2 engine, restored after the test."""
    with smol_pair.spec.restored():
        yield smol_pair.spec
