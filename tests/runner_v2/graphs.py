"""CUDA graphs without CUDA: what a graph keeps of a pass is kept, and nothing else.

A graph remembers kernels with the addresses and numbers they were given. So does a ``Recording``: torch's operations
and Triton's launches, each with the very tensors of the recorded pass. A replay runs them again; no Python of vLLM's or
ours is asked. Whatever was a temporary, a host-side number or a decision while recording stays what it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu import cudagraph_utils

from tests.engine.engines import Engine

HOST_READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)


class Recording(TorchDispatchMode):
    """One captured pass."""

    active: ClassVar[Recording | None] = None

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Callable[[], None]] = []
        self.replays = 0

    def __enter__(self) -> Recording:
        Recording.active = self
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        Recording.active = None
        super().__exit__(*args)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in HOST_READS, f"{func} would wait for the device while a graph is captured"
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if "empty" in func.__name__:
            return result  # memory only
        kept = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]

        def again() -> None:
            new = [t for t in tree_leaves(func(*args, **kwargs)) if isinstance(t, torch.Tensor)]
            for old, fresh in zip(kept, new, strict=True):
                if old.data_ptr() != fresh.data_ptr():
                    old.copy_(fresh)

        self.steps.append(again)
        return result

    def launch(self, executor: Any, run: Callable[..., None], args: Any, kwargs: Any) -> None:
        def again() -> None:
            run(executor, *args, **kwargs)

        with _disable_current_modes():
            again()
        self.steps.append(again)

    @torch.inference_mode()
    def replay(self) -> None:
        self.replays += 1
        for step in self.steps:
            step()


def capture(manager: Any, create_forward_fn: Any, progress_bar_desc: str = "") -> None:
    """In place of ``CudaGraphManager.capture``, which does the same with streams and a memory pool."""
    with torch.inference_mode():
        for desc in manager._capture_descs[CUDAGraphMode.FULL]:
            create_forward_fn(desc, warmup=True)(CUDAGraphMode.NONE)
            forward = create_forward_fn(desc, warmup=False)
            with Recording() as recording:
                forward(CUDAGraphMode.NONE)
            manager.graphs[desc] = recording
    manager._graphs_captured = True


def patch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let graphs be recordings, for as long as the patch lasts."""
    run = GridExecutor.__call__

    def launch(executor: Any, *args: Any, **kwargs: Any) -> None:
        if Recording.active is None:
            run(executor, *args, **kwargs)
        else:
            Recording.active.launch(executor, run, args, kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", launch)
    monkeypatch.setattr(cudagraph_utils.CudaGraphManager, "capture", capture)


def capture_all(engine: Engine, sizes: list[int]) -> list[Any]:
    """Capture FULL graphs of all decoding passes of an engine that was started without any.

    Returns:
        The managers of the target's pass, of the draft's first pass and of its levels.
    """
    runner = engine.runner
    runner.compilation_config.cudagraph_capture_sizes = sizes
    runner.compilation_config.max_cudagraph_capture_size = max(sizes)
    for layer in runner.compilation_config.static_forward_context.values():
        layer.use_direct_call = True  # one opaque operation would hide what is inside
    pool = cudagraph_utils.current_platform.get_global_graph_pool
    cudagraph_utils.current_platform.get_global_graph_pool = lambda: None
    try:
        runner.cudagraph_manager = cudagraph_utils.ModelCudaGraphManager(
            runner.vllm_config,
            runner.device,
            CUDAGraphMode.FULL_DECODE_ONLY,
            decode_query_len=runner.decode_query_len,
        )
        runner.speculator.init_cudagraph_manager(CUDAGraphMode.FULL_DECODE_ONLY)
    finally:
        cudagraph_utils.current_platform.get_global_graph_pool = pool
    # What ``capture_model`` does beyond this needs a GPU's workspace.
    runner.cudagraph_manager.capture(
        runner.model,
        runner.model_state,
        runner.input_buffers,
        None,
        runner.block_tables,
        runner.attn_groups,
        runner.kv_cache_config,
        use_aux_hidden_state_outputs=True,
    )
    speculator = runner.speculator
    speculator.capture()
    return [runner.cudagraph_manager, speculator.prefill_cudagraph_manager, speculator.decode_cudagraph_manager]
