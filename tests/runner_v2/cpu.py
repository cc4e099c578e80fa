"""The GPU path on a CPU: vLLM's V2 runner and every Triton kernel in the interpreter, and attention to read."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.worker.cpu import model_runner
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_adaptivespec.runner_v2 import attention
from vllm_adaptivespec.runner_v2.attention import key_value_views
from vllm_adaptivespec.runner_v2.runner import TreeRunner
from vllm_adaptivespec.runner_v2.worker import TreeWorker

attention.BACKENDS.add("CPU_ATTN")


class PlainLayoutAttention(CPUAttentionBackendImpl):
    """Causal attention over a cache in the GPU backends' layout; the CPU's own kernels pack theirs."""

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        rows = (slot_mapping >= 0).nonzero()[:, 0]
        slots, page = slot_mapping[rows], kv_cache.shape[2]
        for cache, new in zip(key_value_views(kv_cache, self.head_size), (key, value), strict=True):
            cache[slots // page, slots % page] = new[rows]

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        if attn_metadata is None:
            return output.zero_()
        page, group = kv_cache.shape[2], self.num_queries_per_kv
        starts = attn_metadata.query_start_loc.tolist()
        for request, length in enumerate(attn_metadata.seq_lens.tolist()):
            rows = slice(starts[request], starts[request + 1])
            queries = query[rows]
            if not len(queries):
                continue
            position = torch.arange(length)
            block = attn_metadata.block_table[request].long()[position // page]
            keys, values = (
                cache[block, position % page].repeat_interleave(group, dim=1)
                for cache in key_value_views(kv_cache, self.head_size)
            )
            seen = position <= position[-len(queries) :, None]
            scores = torch.einsum("qhd,khd->hqk", queries, keys) * self.scale
            weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
            output[rows] = torch.einsum("hqk,khd->qhd", weights, values)
        return output


class PlainLayoutRunner(model_runner.CPUModelRunner):
    """Stock V2 runner for CPUs but for its attention."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        for layer in get_layers_from_vllm_config(self.vllm_config, Attention).values():
            layer.impl.__class__ = PlainLayoutAttention


class TreeCPURunner(TreeRunner, PlainLayoutRunner):
    """What the tests run."""


class TreeCPUWorker(TreeWorker, CPUWorker):
    """``ADAPTIVESPEC_TEST_WORKER`` names it."""

    def init_device(self) -> None:
        # The GPU worker has a method for this.
        with mock.patch.object(model_runner, "CPUModelRunner", TreeCPURunner):
            super().init_device()
