"""Engine configurations for tiny models; no engine is started here, and vLLM is imported by the tests that need it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import make_tiny_models


@pytest.fixture(scope="package")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a random target and of a random EAGLE-3 head for it."""
    return make_tiny_models(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def speculative_config(tiny: tuple[Path, Path]) -> Callable[..., dict[str, Any]]:
    """A user's dictionary for the plugin, with more keys or other values."""

    def make(**values: Any) -> dict[str, Any]:
        return {"method": "adaptivespec", "model": str(tiny[1]), "num_speculative_tokens": 8, **values}

    return make


@pytest.fixture
def engine_args(tiny: tuple[Path, Path]) -> Callable[..., Any]:
    """vLLM's ``EngineArgs`` for the tiny target, with the plugin registered as vLLM would."""
    from vllm.engine.arg_utils import EngineArgs

    from vllm_adaptivespec.plugin import register

    register()

    def make(**values: Any) -> Any:
        return EngineArgs(model=str(tiny[0]), skip_tokenizer_init=True, max_model_len=256, **values)

    return make
