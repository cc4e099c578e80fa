"""The table of refusals: each row fires on what it names, and on nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_adaptivespec.config import AdaptiveSpecConfig
from vllm_adaptivespec.refusals import (
    ENGINE_SETTINGS,
    SPECULATIVE_KEYS,
    Refusal,
    refuse_engine_config,
    refuse_speculative_keys,
)


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
        },
        "cache_config": {"cache_dtype": "auto", "kv_sharing_fast_prefill": False},
        "scheduler_config": {"async_scheduling": False, "long_prefill_token_threshold": 0},
        "speculative_config": {"num_speculative_tokens": 8},
    }
    whole: dict[str, Any] = {"lora_config": None, "kv_transfer_config": None}
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
    "a platform other than CPU": [{"device_config__device_type": "cuda"}, {"device_config__device_type": "xpu"}],
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
    "asynchronous scheduling": [{"scheduler_config__async_scheduling": True}],
}
"""By row: changes of the plain configuration that have the feature."""

HARMLESS: list[dict[str, Any]] = [
    {},
    {"cache_config__cache_dtype": "bfloat16"},
    {"model_config__is_multimodal_model": True},  # served with language_model_only
    {"scheduler_config__async_scheduling": None},
    {"scheduler_config__long_prefill_token_threshold": 9},
]


def rows(what: str) -> list[Refusal]:
    return [refusal for refusal in ENGINE_SETTINGS if refusal.what == what]


class TestTable:
    def test_every_row_is_tested(self) -> None:
        assert [r.what for r in ENGINE_SETTINGS] == list(dict.fromkeys(r.what for r in ENGINE_SETTINGS))
        assert {r.what for r in ENGINE_SETTINGS} == set(FEATURES)

    @pytest.mark.parametrize("refusal", ENGINE_SETTINGS, ids=lambda r: r.what)
    def test_every_row_has_a_reason(self, refusal: Refusal) -> None:
        assert len(refusal.reason.split()) >= 3
        assert not refusal.reason.endswith(".")  # the message ends the sentence

    @pytest.mark.parametrize(
        ("what", "changes"), [(what, changes) for what, features in FEATURES.items() for changes in features]
    )
    def test_row_fires_alone(self, what: str, changes: dict[str, Any]) -> None:
        config = plain_config(**changes)
        assert [r.what for r in ENGINE_SETTINGS if r.applies(config)] == [what]
        (refusal,) = rows(what)
        with pytest.raises(
            ValueError, match="^" + re.escape(f"adaptivespec does not support {what}: {refusal.reason}.")
        ):
            refuse_engine_config(config)

    @pytest.mark.parametrize("changes", HARMLESS)
    def test_all_are_silent_otherwise(self, changes: dict[str, Any]) -> None:
        config = plain_config(**changes)
        assert [r.what for r in ENGINE_SETTINGS if r.applies(config)] == []
        refuse_engine_config(config)


class TestWithVllm:
    """The same on vLLM's own configurations: the settings are where the table looks for them."""

    def test_supported(
        self, engine_args: Callable[..., Any], speculative_config: Callable[..., dict[str, Any]]
    ) -> None:
        refuse_engine_config(engine_args(speculative_config=speculative_config()).create_engine_config())

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

    def test_speculative_keys_are_vllms(self) -> None:
        from vllm.config import SpeculativeConfig

        assert set(SPECULATIVE_KEYS) <= {f.name for f in fields(SpeculativeConfig)}


class TestSpeculativeKeys:
    @pytest.mark.parametrize("key", SPECULATIVE_KEYS)
    def test_refused_whatever_the_value(self, key: str) -> None:
        for value in (True, False, None, 1):
            with pytest.raises(ValueError) as error:
                refuse_speculative_keys({"method": "adaptivespec", "model": "head", key: value})
            assert f"does not take {key} in speculative_config: {SPECULATIVE_KEYS[key]}" in str(error.value)

    def test_every_key_has_a_reason(self) -> None:
        assert all(len(reason.split()) >= 3 for reason in SPECULATIVE_KEYS.values())

    def test_others_are_silent(self) -> None:
        refuse_speculative_keys(
            {"method": "adaptivespec", "model": "head", "num_speculative_tokens": 8, "revision": "x"}
        )

    def test_own_keys_are_not_refused(self) -> None:
        assert not AdaptiveSpecConfig.own_keys() & set(SPECULATIVE_KEYS)
