"""The engines of the suite, under the throughput policy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.engines import Engine, Pair, start_tiny

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
