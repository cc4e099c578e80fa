"""Turns and records that no engine was started for."""

import pytest

from vllm_adaptivespec.cli import methods
from vllm_adaptivespec.cli.engines import Run


@pytest.fixture
def make_run():
    """A turn of one prompt (unless `token_ids` says otherwise) that took `seconds`."""

    def make(engine, seconds, token_ids=None, **values):
        defaults = {"source": "chat", "batch": 1, "round": 0, "group": 0, "counters": {}, "peak_rss_mib": 100.0}
        return Run(engine=engine, seconds=seconds, token_ids=token_ids or [[1, 2, 3, 4]], **(defaults | values))

    return make


@pytest.fixture
def four_specs(tmp_path):
    """The demo's engines."""
    return [
        methods.no_speculation(),
        methods.stock_eagle3(tmp_path, 3),
        methods.adaptivespec(tmp_path),
        methods.adaptivespec(tmp_path, 0.3),
    ]
