"""What the plugin refuses at start-up, and why: one table for keys, one for engine settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from .config import MAX_TREE_NODES, METHOD

SPECULATIVE_KEYS = {
    "disable_padded_drafter_batch": "it is set by the plugin",
    "parallel_drafting": "trees are drafted level by level",
    "use_heterogeneous_vocab": "the draft head must share the target's tokenizer",
    "kv_cache_dtype": "the draft's cache must be the target's kind",
    "use_local_argmax_reduction": "trees need the draft's distribution, not only its best token",
    "rejection_sample_method": "acceptance is the plugin's; use margin_threshold for lossy acceptance",
    "draft_sample_method": "trees are deterministic; sampled requests stay exact without draft probabilities",
    "synthetic_acceptance_rates": "acceptance is the plugin's",
    "synthetic_acceptance_length": "acceptance is the plugin's",
    "enable_adaptive_verification": "the tree policy chooses how much is verified",
}
"""Keys of vLLM's speculative_config that do not go with our method."""

SPECULATIVE_KEYS_V1 = {
    "num_speculative_tokens_per_batch_size": "the tree policy chooses how much is drafted",
}
"""Further ones on CPUs."""


@dataclass(frozen=True)
class Refusal:
    """One thing the plugin does not do.

    Args:
        what: the setting, as a user would name it.
        reason: why, and what to do.
        applies: whether a ``VllmConfig`` has it.
    """

    what: str
    reason: str
    applies: Callable[[Any], bool]


ASYNC_SCHEDULING = Refusal(
    "asynchronous scheduling",
    "ragged trees need the drafted tokens on the host; drop --async-scheduling",
    lambda c: bool(c.scheduler_config.async_scheduling),
)

ENGINE_SETTINGS = (
    Refusal(
        "a platform other than CPU, CUDA and ROCm",
        "it was built for these only",
        lambda c: c.device_config.device_type not in ("cpu", "cuda"),
    ),
    Refusal(
        "pipeline parallelism",
        "draft trees live on the last stage, positions on the first",
        lambda c: c.parallel_config.pipeline_parallel_size > 1,
    ),
    Refusal(
        "tensor parallelism",
        "not proved yet: ranks must agree on every tree",
        lambda c: c.parallel_config.tensor_parallel_size > 1,
    ),
    Refusal(
        "data parallelism",
        "every rank would have to draft the same number of levels; run one server per replica",
        lambda c: c.parallel_config.data_parallel_size > 1,
    ),
    Refusal(
        "context parallelism",
        "a tree's rows must see the whole context",
        lambda c: (
            c.parallel_config.decode_context_parallel_size > 1 or c.parallel_config.prefill_context_parallel_size > 1
        ),
    ),
    Refusal("LoRA", "not tested with trees; serve the merged model", lambda c: c.lora_config is not None),
    Refusal(
        "multimodal models",
        "the draft head sees text embeddings only",
        lambda c: c.model_config.is_multimodal_model and c.model_config.supports_multimodal_inputs,
    ),
    Refusal("M-RoPE models", "tree nodes have one position each", lambda c: c.model_config.uses_mrope),
    Refusal("MLA models", "their cache has another layout", lambda c: c.model_config.use_mla),
    Refusal(
        "hybrid and attention-free models",
        "recurrent state cannot branch",
        lambda c: c.model_config.is_hybrid or c.model_config.is_attention_free,
    ),
    Refusal("encoder-decoder models", "only decoders are drafted for", lambda c: c.model_config.is_encoder_decoder),
    Refusal("pooling models", "they do not generate", lambda c: c.model_config.runner_type == "pooling"),
    Refusal("prompt embeddings", "the draft head needs token ids", lambda c: c.model_config.enable_prompt_embeds),
    Refusal(
        "FP8 KV cache",
        "not tested with trees; leave kv_cache_dtype at auto",
        lambda c: str(c.cache_config.cache_dtype).startswith("fp8"),
    ),
    Refusal(
        "KV connectors and KV offloading",
        "they read blocks before accepted nodes are committed",
        lambda c: c.kv_transfer_config is not None,
    ),
    Refusal(
        "KV sharing fast prefill",
        "its layers have no cache of their own",
        lambda c: c.cache_config.kv_sharing_fast_prefill,
    ),
    Refusal(
        "a long_prefill_token_threshold of num_speculative_tokens or less",
        "vLLM's scheduler would cut a request's drafts below what it asserts; raise the threshold",
        lambda c: 0 < c.scheduler_config.long_prefill_token_threshold <= c.speculative_config.num_speculative_tokens,
    ),
)
"""Engine settings that are refused everywhere; ``adaptivespec doctor`` lists them."""

ENGINE_SETTINGS_V1 = (ASYNC_SCHEDULING,)
"""Further ones on CPUs."""


def _v2_lacks(config: Any) -> bool:
    return bool(config._get_v2_model_runner_unsupported_features())


def _wants_throughput(config: Any) -> bool:
    return bool(config.additional_config[METHOD]["tree_policy"] == "throughput")


ENGINE_SETTINGS_V2 = (
    Refusal(
        'tree_policy "throughput" on a GPU',
        "it decides from times and probabilities on the host, where the GPU path reads nothing back; set tree_policy "
        'to "adaptive"',
        _wants_throughput,
    ),
    Refusal(
        "what vLLM's V2 model runner does not support",
        "the GPU path is built on it; vLLM's own message says which setting it is",
        _v2_lacks,
    ),
    Refusal(
        f"more than {MAX_TREE_NODES - 1} num_speculative_tokens on a GPU",
        "a tree and its root must fit the bits of one word",
        lambda c: c.speculative_config.num_speculative_tokens >= MAX_TREE_NODES,
    ),
    Refusal(
        "full CUDA graphs of mixed batches",
        "a graph of prefills cannot have trees in it; set cudagraph_mode to FULL_AND_PIECEWISE, FULL_DECODE_ONLY, "
        "PIECEWISE or NONE",
        lambda c: getattr(c.compilation_config.cudagraph_mode, "name", None) == "FULL",
    ),
    Refusal(
        "watermarking",
        "its draws are keyed by the tokens before, which differ between branches",
        lambda c: getattr(c, "watermark_config", None) is not None,
    ),
    Refusal(
        "batch-sharded sampling",
        "trees are accepted whole on every rank",
        lambda c: c.parallel_config.enable_batch_sharded_sampling,
    ),
    Refusal(
        "dual batch overlap",
        "a tree's rows must stay in one batch",
        lambda c: c.parallel_config.enable_dbo,
    ),
    Refusal(
        "sampling masks in the output",
        "they follow the order of rows, not of the accepted path",
        lambda c: c.model_config.return_sampling_mask,
    ),
)
"""Further ones on GPUs."""


def refuse_speculative_keys(keys: Mapping[str, Any], runner: str) -> None:
    """Raise ValueError for a key of vLLM's that contradicts the method."""
    refused = SPECULATIVE_KEYS | (SPECULATIVE_KEYS_V1 if runner == "v1" else {})
    for key, reason in refused.items():
        if key in keys:
            raise ValueError(f"{METHOD} does not take {key} in speculative_config: {reason}. Remove the key.")


def _refuse(refusal: Refusal) -> NoReturn:
    raise ValueError(f"{METHOD} does not support {refusal.what}: {refusal.reason}.")


def refuse_async_scheduling() -> NoReturn:
    """Raise before vLLM does: it would blame a key that the plugin set and the user never saw."""
    _refuse(ASYNC_SCHEDULING)


def refuse_engine_config(vllm_config: Any, runner: str) -> None:
    """Raise ValueError for the first engine setting the plugin does not support."""
    for refusal in (*ENGINE_SETTINGS, *(ENGINE_SETTINGS_V1 if runner == "v1" else ENGINE_SETTINGS_V2)):
        if refusal.applies(vllm_config):
            _refuse(refusal)
