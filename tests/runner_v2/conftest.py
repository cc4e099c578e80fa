"""Engines on vLLM's V2 model runner in Triton's interpreter: float32, eager, in this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

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

from tests.engine.engines import Engine, Pair, start_tiny
from tests.tiny_models import make_tiny_models


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A random target on which context matters, and a random head for it, with heads the kernels take."""
    return make_tiny_models(tmp_path_factory.mktemp("tiny"), head_dim=64)


@pytest.fixture(scope="session")
def tiny_pair(tiny: tuple[Path, Path]) -> Pair:
    """The tiny target plain and with the plugin."""
    target, head = tiny
    return Pair(start_tiny(target, None, 64), start_tiny(target, head, 64))
