"""The engines of the suite, under the throughput policy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.engines import Engine, Pair, start, start_tiny
from vllm_adaptivespec.cli.models import demo_head, demo_target

THROUGHPUT: dict[str, Any] = {"tree_policy": "throughput"}


@pytest.fixture(scope="session")
def tiny_pair(tiny: tuple[Path, Path]) -> Pair:
    """The tiny target plain and with the plugin."""
    target, head = tiny
    return Pair(start_tiny(target, None, 64), start_tiny(target, head, 64, **THROUGHPUT))


@pytest.fixture
def tiny_spec(tiny_pair: Pair) -> Iterator[Engine]:
    """The speculating tiny engine, restored after the test."""
    with tiny_pair.spec.restored():
        yield tiny_pair.spec


@pytest.fixture(scope="session")
def crowded_engine(tiny: tuple[Path, Path]) -> Engine:
    """Six requests on blocks for about three."""
    return start_tiny(*tiny, 14, **THROUGHPUT)


@pytest.fixture
def crowded(crowded_engine: Engine) -> Iterator[Engine]:
    """The crowded engine, restored after the test."""
    with crowded_engine.restored():
        yield crowded_engine


@pytest.fixture(scope="session")
def smol_pair() -> Pair:
    """SmolLM2 and its trained head."""
    common = dict(model=str(demo_target()), max_model_len=512, max_num_seqs=8, block_size=64)
    spec = {"model": str(demo_head()), "num_speculative_tokens": 8, **THROUGHPUT}
    return Pair(start(None, **common), start(spec, **common))


@pytest.fixture
def smol_spec(smol_pair: Pair) -> Iterator[Engine]:
    """The speculating SmolLM2 engine, restored after the test."""
    with smol_pair.spec.restored():
        yield smol_pair.spec
