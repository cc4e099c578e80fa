"""The CPU worker that serves with our model runner."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from ..plugin import config_of
from .branch_blocks import plan_branch_blocks
from .runner import AdaptiveSpecModelRunner


class AdaptiveSpecCPUWorker(CPUWorker):
    """Stock CPU worker; vLLM starts it because ``worker_cls`` names it."""

    model_runner: AdaptiveSpecModelRunner

    def init_device(self) -> None:
        config = config_of(self.vllm_config)
        if config is None:
            raise RuntimeError("adaptivespec's worker was started without adaptivespec's configuration.")
        super().init_device()
        # Built by vLLM, then given our class: what its constructor registered (kernel warm-ups) stays registered.
        self.model_runner.__class__ = AdaptiveSpecModelRunner
        self.model_runner.init_adaptivespec(config)

    def determine_available_memory(self) -> int:
        available = super().determine_available_memory()
        runner = self.model_runner
        specs = self.get_kv_cache_spec().values()
        block_bytes = sum(spec.page_size_bytes for spec in specs)
        if runner.adaptivespec.tree_policy == "throughput":
            # Beside every cached token lie the hidden states that the draft may have yet to read.
            state_bytes = max(s.block_size for s in specs) * runner.draft_state_size * runner.dtype.itemsize
            available = available * block_bytes // (block_bytes + state_bytes)
        runner.num_branch_blocks = plan_branch_blocks(
            available,
            block_bytes,
            self.scheduler_config.max_num_seqs,
            runner.adaptivespec.num_speculative_tokens - 1,
        )
        return available - runner.num_branch_blocks * block_bytes

    def adaptivespec_stats(self) -> dict[str, Any]:
        """Running totals of speculation, for ``LLM.collective_rpc("adaptivespec_stats")``."""
        stats = self.model_runner.stats.as_dict()
        throughput = self.model_runner.throughput
        return stats if throughput is None else stats | {"policy": throughput.policy.as_dict()}

    def adaptivespec_leaks(self) -> dict[str, int]:
        """What the plugin still holds for requests; all zero when no request is running."""
        runner = self.model_runner
        return {
            "requests": len(runner.speculation),
            "branch_blocks": sum(len(b.blocks) for b in runner.branches.requests.values()),
            "branch_requests": len(runner.branches.requests),
        }
