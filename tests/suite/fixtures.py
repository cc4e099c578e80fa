"""Fixtures that both adapters' tests have; their conftests say how the models are made and how the plugin is set."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine.engines import Engine, Pair, start_tiny


@pytest.fixture(scope="session")
def tiny_pair(tiny: tuple[Path, Path], spec_options: dict[str, Any]) -> Pair:
    """The tiny target plain and with the plugin."""
    target, head = tiny
    return Pair(start_tiny(target, None, 64), start_tiny(target, head, 64, **spec_options))


@pytest.fixture
def tiny_spec(tiny_pair: Pair) -> Iterator[Engine]:
    """The speculating tiny engine, with everything a test may have changed put back afterwards."""
    with tiny_pair.spec.restored():
        yield tiny_pair.spec


@pytest.fixture(scope="session")
def crowded_engine(tiny: tuple[Path, Path], spec_options: dict[str, Any]) -> Engine:
    """Six requests on blocks for about three: requests are preempted and resumed all the time."""
    return start_tiny(*tiny, 14, **spec_options)


@pytest.fixture
def crowded(crowded_engine: Engine) -> Iterator[Engine]:
    """The crowded engine, restored after the test."""
    with crowded_engine.restored():
        yield crowded_engine
