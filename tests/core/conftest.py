"""Property tests on a shared machine: no deadline, and one thread for tensors this small."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

settings.register_profile("core", deadline=None)
settings.load_profile("core")


@pytest.fixture(autouse=True, scope="package")
def single_thread() -> Iterator[None]:
    """Put back afterwards: other tests run models in this process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
