"""The GPU worker that serves with our model runner."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from .runner import AdaptiveSpecGPUModelRunner, TreeRunner


class TreeWorker:
    """What ``LLM.collective_rpc`` can ask a worker with a ``TreeRunner``."""

    model_runner: TreeRunner

    def adaptivespec_stats(self) -> dict[str, Any]:
        """Running totals of speculation."""
        return self.model_runner.model_state.totals.read().as_dict()


class AdaptiveSpecGPUWorker(TreeWorker, Worker):
    """Stock GPU worker; vLLM starts it because ``worker_cls`` names it."""

    def _make_model_runner(self) -> AdaptiveSpecGPUModelRunner:
        return AdaptiveSpecGPUModelRunner(self.vllm_config, self.device)
