"""Engines on vLLM's V2 model runner in Triton's interpreter: float32, eager, in this process."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

# Read by Triton and vLLM when they are imported.
os.environ.update(
    TRITON_INTERPRET="1",
    ADAPTIVESPEC_TEST_WORKER="tests.runner_v2.cpu.TreeCPUWorker",
    OMP_NUM_THREADS="1",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_CI_ENV="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)
sys.path.append(str(Path(__file__).parent / "interpreter"))

import pytest

import tests.runner_v2.cpu  # noqa: F401 - what it changes in vLLM holds for the plain engines too
from tests.interpreter import hasten
from tests.runner_v2.oracle import ANSWERS, OracleSpeculator
from tests.suite.fixtures import crowded, crowded_engine, tiny_pair, tiny_spec  # noqa: F401
from tests.suite.oracle import Oracle, Size
from tests.tiny_models import make_tiny_models

hasten()

SMALL: dict[str, Any] = {"tree_policy": "static", "static_shape": [2, 2, 4]}
"""Few levels: where the oracle drafts, what the draft itself would say is soon told."""


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random target on which context matters, and a random head for it: heads the kernels take, and few of them."""
    return make_tiny_models(tmp_path_factory.mktemp("tiny"), head_dim=64, kv_heads=1, layers=3)


@pytest.fixture(scope="session")
def spec_options() -> dict[str, Any]:
    """The plugin's keys beside the head."""
    return SMALL


@pytest.fixture
def oracle() -> Oracle:
    """A drafter that knows the answer; a test tells it what that is."""
    ANSWERS.by_prompt, ANSWERS.seed = {}, 0
    return Oracle("speculator", OracleSpeculator, ANSWERS)


@pytest.fixture(scope="session")
def size() -> Size:
    """How much each test of the suite runs."""
    return Size(lengths=(5, 33, 70, 1), num_tokens=40, parameter_tokens=20, crowded_tokens=56, cache_tokens=50)
