"""The table of refusals: each row fires on what it names, and on nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_adaptivespec.config import AdaptiveSpecConfig
from vllm_adaptivespec.refusals import (
    ENGINE_SETTINGS,
    ENGINE_SETTINGS_V1,
    ENGINE_SETTINGS_V2,
    SPECULATIVE_KEYS,
    SPECULATIVE_KEYS_V1,
    Refusal,
    refuse_engine_config,
    refuse_speculative_keys,
)


@dataclass
class CUDAGraphMode:
    """vLLM's, as far as the table looks."""

    name: str


def plain_config(**changes: Any) -> SimpleNamespace:
    """What the table reads of a ``VllmConfig`` that it has nothing against; ``part__setting=value`` changes one."""
    values: dict[str, dict[str, Any]] = {
        "device_config": {"device_type": "cpu"},
        "parallel_config": {
            "pipeline_parallel_size": 1,
            "tensor_parallel_size": 1,
            "data_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "prefill_context_parallel_size": 1,
            "enable_batch_sharded_sampling": None,
            "enable_dbo": False,
        },
        "model_config": {
            "is_multimodal_model": False,
            "supports_multimodal_inputs": False,
            "uses_mrope": False,
            "use_mla": False,
            "is_hybrid": False,
            "is_attention_free": False,
            "is_encoder_decoder": False,
            "runner_type": "generate",
            "enable_prompt_embeds": False,
            "return_sampling_mask": False,
        },
        "cache_config": {"cache_dtype": "auto", "kv_sharing_fast_prefill": False},
        "scheduler_config": {"async_scheduling": False, "long_prefill_token_threshold": 0},
        "speculative_config": {"num_speculative_tokens": 8},
        "compilation_config": {"cudagraph_mode": None},
    }
    whole: dict[str, Any] = {
        "lora_config": None,
        "kv_transfer_config": None,
        "watermark_config": None,
        "additional_config": {"adaptivespec": {"tree_policy": "adaptive"}},
        "_get_v2_model_runner_unsupported_features": list,
    }
    for name, value in changes.items():
        part, _, setting = name.partition("__")
        if setting:
            assert setting in values[part]
            values[part][setting] = value
        else:
            assert part in whole
            whole[part] = value
    return SimpleNamespace(**{part: SimpleNamespace(**v) for part, v in values.items()}, **whole)


FEATURES: dict[str, list[dict[str, Any]]] = {
    "a platform other than CPU, CUDA and ROCm": [{"device_config__device_type": "xpu"}],
    "pipeline parallelism": [{"parallel_config__pipeline_parallel_size": 2}],
    "tensor parallelism": [{"parallel_config__tensor_parallel_size": 2}],
    "data parallelism": [{"parallel_config__data_parallel_size": 2}],
    "context parallelism": [
        {"parallel_config__decode_context_parallel_size": 2},
        {"parallel_config__prefill_context_parallel_size": 2},
    ],
    "LoRA": [{"lora_config": object()}],
    "multimodal models": [
        {"model_config__is_multimodal_model": True, "model_config__supports_multimodal_inputs": True}
    ],
    "M-RoPE models": [{"model_config__uses_mrope": True}],
    "MLA models": [{"model_config__use_mla": True}],
    "hybrid and attention-free models": [{"model_config__is_hybrid": True}, {"model_config__is_attention_free": True}],
    "encoder-decoder models": [{"model_config__is_encoder_decoder": True}],
    "pooling models": [{"model_config__runner_type": "pooling"}],
    "prompt embeddings": [{"model_config__enable_prompt_embeds": True}],
    "FP8 KV cache": [{"cache_config__cache_dtype": dtype} for dtype in ("fp8", "fp8_e4m3", "fp8_e5m2")],
    "KV connectors and KV offloading": [{"kv_transfer_config": object()}],
    "KV sharing fast prefill": [{"cache_config__kv_sharing_fast_prefill": True}],
    "a long_prefill_token_threshold of num_speculative_tokens or less": [
        {"scheduler_config__long_prefill_token_threshold": threshold} for threshold in (1, 8)
    ],
}
"""By row: changes of the plain configuration that have the feature."""

FEATURES_V1: dict[str, list[dict[str, Any]]] = {
    "asynchronous scheduling": [{"scheduler_config__async_scheduling": True}],
}

FEATURES_V2: dict[str, list[dict[str, Any]]] = {
    'tree_policy "throughput" on a GPU': [{"additional_config": {"adaptivespec": {"tree_policy": "throughput"}}}],
    "what vLLM's V2 model runner does not support": [
        {"_get_v2_model_runner_unsupported_features": lambda: ["a feature"]}
    ],
    "more than 63 num_speculative_tokens on a GPU": [{"speculative_config__num_speculative_tokens": 64}],
    "full CUDA graphs of mixed batches": [{"compilation_config__cudagraph_mode": CUDAGraphMode("FULL")}],
    "watermarking": [{"watermark_config": object()}],
    "batch-sharded sampling": [{"parallel_config__enable_batch_sharded_sampling": True}],
    "dual batch overlap": [{"parallel_config__enable_dbo": True}],
    "sampling masks in the output": [{"model_config__return_sampling_mask": True}],
}

BY_RUNNER = {
    "v1": ((*ENGINE_SETTINGS, *ENGINE_SETTINGS_V1), FEATURES | FEATURES_V1),
    "v2": ((*ENGINE_SETTINGS, *ENGINE_SETTINGS_V2), FEATURES | FEATURES_V2),
}
"""All rows of each path, and what has the features."""

HARMLESS: list[dict[str, Any]] = [
    {},
    {"cache_config__cache_dtype": "bfloat16"},
    {"model_config__is_multimodal_model": True},  # served with language_model_only
    {"scheduler_config__async_scheduling": None},
    {"scheduler_config__long_prefill_token_threshold": 9},
]


@pytest.mark.parametrize("runner", BY_RUNNER)
class TestTable:
    def test_every_row_is_tested(self, runner: str) -> None:
        rows, features = BY_RUNNER[runner]
        assert [r.what for r in rows] == list(dict.fromkeys(r.what for r in rows))
        assert {r.what for r in rows} == set(features)

    def test_every_row_has_a_reason(self, runner: str) -> None:
        for refusal in BY_RUNNER[runner][0]:
            assert len(refusal.reason.split()) >= 3
            assert not refusal.reason.endswith(".")  # the message ends the sentence

    def test_rows_fire_alone(self, runner: str) -> None:
        rows, features = BY_RUNNER[runner]
        for what, with_it in features.items():
            for changes in with_it:
                config = plain_config(**changes)
                fired: list[Refusal] = [r for r in rows if r.applies(config)]
                assert [r.what for r in fired] == [what]
                message = f"adaptivespec does not support {what}: {fired[0].reason}."
                with pytest.raises(ValueError, match="^" + re.escape(message)):
                    refuse_engine_config(config, runner)

    @pytest.mark.parametrize("changes", HARMLESS)
    def test_all_are_silent_otherwise(self, runner: str, changes: dict[str, Any]) -> None:
        config = plain_config(**changes)
        assert [r.what for r in BY_RUNNER[runner][0] if r.applies(config)] == []
        refuse_engine_config(config, runner)

    def test_asynchronous_scheduling_is_the_gpus(self, runner: str) -> None:
        config = plain_config(scheduler_config__async_scheduling=True)
        assert [r.what for r in BY_RUNNER[runner][0] if r.applies(config)] == (
            ["asynchronous scheduling"] if runner == "v1" else []
        )


class TestWithVllm:
    """The same on vLLM's own configurations: the settings are where the table looks for them."""

    def test_supported(
        self, engine_args: Callable[..., Any], speculative_config: Callable[..., dict[str, Any]]
    ) -> None:
        refuse_engine_config(engine_args(speculative_config=speculative_config()).create_engine_config(), "v1")

    @pytest.mark.parametrize(
        ("settings", "what"),
        [
            ({"pipeline_parallel_size": 2}, "pipeline parallelism"),
            ({"tensor_parallel_size": 2}, "tensor parallelism"),
            ({"data_parallel_size": 2}, "data parallelism"),
            ({"enable_lora": True}, "LoRA"),
            ({"kv_cache_dtype": "fp8"}, "FP8 KV cache"),
            ({"kv_offloading_size": 1}, "KV connectors and KV offloading"),
            ({"enable_prompt_embeds": True}, "prompt embeddings"),
            ({"runner": "pooling"}, "pooling models"),
            (
                {"long_prefill_token_threshold": 8},
                "a long_prefill_token_threshold of num_speculative_tokens or less",
            ),
        ],
        ids=lambda value: "" if isinstance(value, dict) else value,
    )
    def test_refused_at_start_up(
        self,
        engine_args: Callable[..., Any],
        speculative_config: Callable[..., dict[str, Any]],
        settings: dict[str, Any],
        what: str,
    ) -> None:
        args = engine_args(speculative_config=speculative_config(), **settings)
        with pytest.raises(ValueError, match=re.escape(f"adaptivespec does not support {what}: ")):
            args.create_engine_config()
        # Without the plugin it is none of our business.
        engine_args(**settings).create_engine_config()

    def test_settings_of_the_gpu_path_are_where_it_looks(
        self, engine_args: Callable[..., Any], speculative_config: Callable[..., dict[str, Any]]
    ) -> None:
        user = speculative_config(tree_policy="adaptive")
        refuse_engine_config(engine_args(speculative_config=user).create_engine_config(), "v2")

    def test_full_graphs_of_mixed_batches(
        self, engine_args: Callable[..., Any], speculative_config: Callable[..., dict[str, Any]]
    ) -> None:
        from vllm.config.compilation import CUDAGraphMode

        user = speculative_config(tree_policy="adaptive")
        config = engine_args(speculative_config=user).create_engine_config()
        for mode in CUDAGraphMode:
            config.compilation_config.cudagraph_mode = mode
            if mode == CUDAGraphMode.FULL:
                with pytest.raises(ValueError, match="full CUDA graphs of mixed batches"):
                    refuse_engine_config(config, "v2")
            else:
                refuse_engine_config(config, "v2")

    def test_speculative_keys_are_vllms(self) -> None:
        from vllm.config import SpeculativeConfig

        assert set(SPECULATIVE_KEYS | SPECULATIVE_KEYS_V1) <= {f.name for f in fields(SpeculativeConfig)}


@pytest.mark.parametrize("runner", ["v1", "v2"])
class TestSpeculativeKeys:
    def test_refused_whatever_the_value(self, runner: str) -> None:
        for key, reason in SPECULATIVE_KEYS.items():
            for value in (True, False, None, 1):
                with pytest.raises(ValueError) as error:
                    refuse_speculative_keys({"method": "adaptivespec", "model": "head", key: value}, runner)
                assert f"does not take {key} in speculative_config: {reason}" in str(error.value)

    def test_node_tiers_are_the_gpus(self, runner: str) -> None:
        keys = {"num_speculative_tokens_per_batch_size": [[1, 4, 8]]}
        assert set(SPECULATIVE_KEYS_V1) == set(keys)
        if runner == "v2":
            refuse_speculative_keys(keys, runner)
            return
        with pytest.raises(ValueError, match="does not take num_speculative_tokens_per_batch_size"):
            refuse_speculative_keys(keys, runner)

    def test_every_key_has_a_reason(self, runner: str) -> None:
        assert all(len(reason.split()) >= 3 for reason in (SPECULATIVE_KEYS | SPECULATIVE_KEYS_V1).values())

    def test_others_are_silent(self, runner: str) -> None:
        keys = {"method": "adaptivespec", "model": "head", "num_speculative_tokens": 8, "revision": "x"}
        refuse_speculative_keys(keys, runner)

    def test_own_keys_are_not_refused(self, runner: str) -> None:
        assert not AdaptiveSpecConfig.own_keys() & set(SPECULATIVE_KEYS | SPECULATIVE_KEYS_V1)
