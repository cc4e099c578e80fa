"""Nothing of ours in a step makes the host wait for the device."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import vllm_adaptivespec
from tests.engine.engines import Engine, Pair, sampling
from tests.suite.oracle import prompts_of
from vllm_adaptivespec import triton_kernels
from vllm_adaptivespec.runner_v2 import model_state

pytestmark = pytest.mark.engine

OURS = tuple(str(Path(p.__file__).resolve().parent) for p in (vllm_adaptivespec, triton_kernels))
TORCH = str(Path(torch.__file__).resolve().parent)

WAITS = {
    "item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__complex__", "numpy", "cpu",
    "nonzero", "masked_select", "unique", "unique_consecutive", "argwhere", "equal", "allclose", "is_nonzero",
    # Values that come from the host's pageable memory: the copy waits until they are there.
    "tensor", "as_tensor", "from_numpy",
}  # fmt: skip


class HostSyncs(TorchFunctionMode):
    """Records where our code asks torch for something that would wait on a GPU; on a CPU everything looks alike."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.found: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame: Any = sys._getframe(1)
        while frame.f_code.co_filename.startswith(TORCH):
            frame = frame.f_back
        if frame.f_code.co_filename.startswith(OURS):
            self.calls += 1
            name = getattr(func, "__name__", "")
            by_mask = name in ("__getitem__", "__setitem__") and any(
                isinstance(i, torch.Tensor) and i.dtype == torch.bool
                for i in (args[1] if isinstance(args[1], tuple) else (args[1],))
            )
            if name in WAITS or by_mask or (name == "where" and len(args) == 1):
                self.found.add(f"{name} in {Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
        return func(*args, **(kwargs or {}))


def run(engine: Engine) -> HostSyncs:
    prompts = prompts_of((5, 70, 9))  # a chunked prompt among trees and chains
    params = [sampling(12, logprobs=1), sampling(12, temperature=0.8, seed=1), sampling(12, repetition_penalty=1.2)]
    with HostSyncs() as syncs:
        engine.tokens(prompts, params)
    return syncs


def test_none(tiny_pair: Pair, tiny_spec: Engine) -> None:
    syncs = run(tiny_spec)
    assert syncs.calls > 500
    assert syncs.found == set()


def test_one_would_be_found(tiny_pair: Pair, tiny_spec: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "def broken(*args):\n    int(args[1].max())\n    return original(*args)\n"
    namespace: dict[str, Any] = {"original": model_state.stage_rows}
    exec(compile(source, f"{OURS[0]}/broken.py", "exec"), namespace)
    monkeypatch.setattr(model_state, "stage_rows", namespace["broken"])
    assert run(tiny_spec).found == {"__int__ in broken.py:2"}
