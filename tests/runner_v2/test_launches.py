"""What a step launches beside the two models, as `docs/gpu.md` tells: ours, and stock EAGLE-3's at the same K.

``ADAPTIVESPEC_WRITE=1`` writes the file the documentation quotes.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm.v1.worker.gpu
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

import vllm_adaptivespec
from tests.engine.engines import Engine, sampling, start_tiny
from tests.suite.oracle import prompts_of
from vllm_adaptivespec import triton_kernels

pytestmark = pytest.mark.engine

RECORD = Path(__file__).parents[2] / "bench" / "results" / "launches.json"
PACKAGE = Path(vllm_adaptivespec.__file__).parent
OURS, CORE, KERNELS = (str(p) for p in (PACKAGE / "runner_v2", PACKAGE / "core", Path(triton_kernels.__file__).parent))
STOCK = str(Path(vllm.v1.worker.gpu.__file__).parent / "spec_decode")
THROUGH = tuple(str(Path(m.__file__).parent) for m in (torch, sys.modules["triton"]))
K = 8


class Launches(TorchDispatchMode):
    """Counts what would be launched on a GPU, by the function that asks for it."""

    def __init__(self, owner: str) -> None:
        super().__init__()
        self.owner = owner
        self.counts: Counter[tuple[str, str]] = Counter()
        self.calls: Counter[str] = Counter()

    def note(self, kind: str) -> None:
        frame: Any = sys._getframe(2)
        while frame.f_code.co_filename.startswith((*THROUGH, CORE, KERNELS, __file__)):
            frame = frame.f_back
        if frame.f_code.co_filename.startswith(self.owner):
            self.counts[frame.f_code.co_name, kind] += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        storages = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        is_view = not func._schema.is_mutable and all(t.untyped_storage().data_ptr() in storages for t in made)
        if made and not is_view and "empty" not in func.__name__ and "detach" not in func.__name__:
            self.note("torch")
        return result


def count(engine: Engine, owner: str, monkeypatch: pytest.MonkeyPatch, params: Any) -> dict[str, dict[str, float]]:
    """Launches of two steps in the middle of decoding, by function and per step."""
    prompts = prompts_of((9, 12))
    launches = Launches(owner)
    run = GridExecutor.__call__

    def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
        launches.note("triton")
        with _disable_current_modes():
            run(executor, *args, **kwargs)

    runner = type(engine.runner)
    execute, step = runner.execute_model, 0

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal step
        step += 1
        if step == 3:
            monkeypatch.setattr(GridExecutor, "__call__", launch)
            launches.__enter__()
        elif step == 5:
            launches.__exit__(None, None, None)
            monkeypatch.setattr(GridExecutor, "__call__", run)
        return execute(self, *args, **kwargs)

    monkeypatch.setattr(runner, "execute_model", counted)
    engine.tokens(prompts, params)
    monkeypatch.setattr(runner, "execute_model", execute)
    assert step >= 5
    by_function: dict[str, dict[str, float]] = {}
    for (function, kind), number in sorted(launches.counts.items()):
        by_function.setdefault(function, {"triton": 0, "torch": 0})[kind] = number / 2
    return by_function


def test_launches_are_those_on_record(tiny: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    target, head = tiny
    shape = {"tree_policy": "static", "static_shape": [3, 3, K]}
    ours = count(start_tiny(target, head, 64, **shape), OURS, monkeypatch, sampling(7))
    stock = count(
        start_tiny(target, head, 64, method="eagle3", num_speculative_tokens=3), STOCK, monkeypatch, sampling(7)
    )
    counted = {
        "what": "launches per step by function, beside the two models' own; two greedy requests, no log-probs",
        "adaptivespec, static [3, 3, 8]": ours,
        "stock EAGLE-3, K = 3": stock,
    }
    if os.environ.get("ADAPTIVESPEC_WRITE"):
        RECORD.write_text(json.dumps(counted, indent=1) + "\n")
    assert counted == json.loads(RECORD.read_text())
