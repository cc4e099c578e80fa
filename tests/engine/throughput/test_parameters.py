"""The suite of request parameters under the throughput policy."""

from __future__ import annotations

import pytest

from tests.suite.parameters import *  # noqa: F403

pytestmark = pytest.mark.engine
