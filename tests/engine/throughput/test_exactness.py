"""The suite of exactness under the throughput policy."""

from __future__ import annotations

import pytest

from tests.suite.exactness import *  # noqa: F403

pytestmark = pytest.mark.engine
