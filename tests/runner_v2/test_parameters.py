"""The suite of request parameters on the GPU path."""

from __future__ import annotations

import pytest

from tests.suite.parameters import *  # noqa: F403

pytestmark = pytest.mark.engine
