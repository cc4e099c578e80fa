"""The GPU path on a CPU: vLLM's V2 runner and every Triton kernel in the interpreter, and attention to read."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.worker.cpu import model_runner
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_adaptivespec.runner_v2 import attention
from vllm_adaptivespec.runner_v2.attention import key_value_views
from vllm_adaptivespec.runner_v2.runner import TreeRunner
from vllm_adaptivespec.runner_v2.worker import TreeWorker

attention.BACKENDS.add("CPU_ATTN")
# vLLM's Triton kernel for top-k and top-p is none the interpreter can run; this is vLLM's own other way.
topk_topp_sampler.apply_top_k_top_p_triton = topk_topp_sampler.apply_top_k_top_p_pytorch


class PlainLayoutAttention(CPUAttentionBackendImpl):
    """Causal attention over a cache in the GPU backends' layout; the CPU's own kernels pack theirs.

    Like a GPU's it never looks at a value on the host.
    """

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        rows, page = len(slot_mapping), kv_cache.shape[2]
        slots = slot_mapping.clamp(min=0)  # padding goes to the null block
        for cache, new in zip(key_value_views(kv_cache, self.head_size), (key, value), strict=True):
            cache[slots // page, slots % page] = new[:rows]

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
        num_rows = attn_metadata.num_actual_tokens
        starts, lengths = attn_metadata.query_start_loc, attn_metadata.seq_lens
        row = torch.arange(num_rows)
        request = (starts[1:] <= row[:, None]).sum(dim=1).clamp(max=len(lengths) - 1)
        position = lengths[request] - (starts[request + 1] - row)
        seen = torch.arange(attn_metadata.max_seq_len)
        block = attn_metadata.block_table.long()[:, seen // page]
        keys, values = (
            cache[block, seen % page][request].repeat_interleave(group, dim=2)
            for cache in key_value_views(kv_cache, self.head_size)
        )
        scores = torch.einsum("qhd,qkhd->qhk", query[:num_rows], keys) * self.scale
        weights = scores.masked_fill((seen > position[:, None])[:, None], -torch.inf).softmax(dim=-1)
        output[:num_rows] = torch.einsum("qhk,qkhd->qhd", weights, values)
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
