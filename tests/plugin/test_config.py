"""Configuration and request options: everything wrong is refused with the key, the value and what is allowed."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_adaptivespec.config import MAX_DEPTH, MAX_TREE_NODES, POLICY_KEYS, PRESETS, AdaptiveSpecConfig, RequestOptions
from vllm_adaptivespec.core.acceptance import MarginRule
from vllm_adaptivespec.core.policy import AdaptivePolicy, StaticPolicy, TreeShape

NAN, INF = math.nan, math.inf
HUGE = 10**400
"""A valid JSON integer that no float can hold."""

NOT_NUMBERS: list[Any] = ["0.5", None, True, False, [0.5], {"a": 1}]
WRONG_NAMES: list[Any] = ["", "lossy", "Balanced", " balanced", "near_lossless", "1.0", "nan"]
NOT_COUNTS: list[Any] = ["1", None, True, False, 1.0, 2.5, NAN, [1], 0, -1]
NOT_SHAPES: list[Any] = [
    None,
    3,
    "3,4,8",
    {"depth": 3},
    [],
    [3, 4],
    [3, 4, 8, 1],
    [3, 4, 8.0],
    [3, "4", 8],
    [True, 4, 8],
    [3, True, 8],
    [3, None, 8],
    [0, 4, 8],  # no level
    [3, 0, 8],  # no child
    [-1, 4, 8],
    [3, -4, 8],
    [3, 4, 2],  # fewer nodes than levels
    [3, 4, 9],  # more nodes than num_speculative_tokens
    [9, 1, 8],
    [3, MAX_TREE_NODES + 1, 8],
    [3, HUGE, 8],
]
BAD_VALUES = {
    "num_speculative_tokens": [*NOT_COUNTS, MAX_TREE_NODES + 1, HUGE],
    "margin_threshold": [*NOT_NUMBERS, *WRONG_NAMES, NAN, 0, 0.0, -0.1, 1.0001, 2, INF, -INF, HUGE, -HUGE],
    "margin_threshold_floor": [v for v in [*NOT_NUMBERS, *WRONG_NAMES] if v is not None]
    + [NAN, 0, -0.1, 0.51, 1.0, INF, HUGE],
    "max_promotions_per_step": [v for v in NOT_COUNTS if v is not None],
    "tree_policy": ["Adaptive", "dynamic", "", None, True, 1, ["static"], {"static": 1}],
    "static_shape": NOT_SHAPES,
    "low_confidence_shape": NOT_SHAPES,
    "high_confidence_shape": NOT_SHAPES,
    "confidence_scale": [*NOT_NUMBERS, NAN, 0, -0.5, INF, -INF, HUGE],
    "history_decay": [*NOT_NUMBERS, NAN, 0, -0.3, 1.01, INF, HUGE],
    "reset_after": NOT_COUNTS,
}
ALLOWED = {
    "num_speculative_tokens": "an integer from 1 to 64",
    "margin_threshold": "a number in (0, 1]",
    "margin_threshold_floor": "a number in (0, margin_threshold] (0.5)",
    "max_promotions_per_step": "an integer of at least 1",
    "tree_policy": '"throughput", "adaptive" or "static"',
    "confidence_scale": "a finite number above 0",
    "history_decay": "a number in (0, 1]",
    "reset_after": "an integer of at least 1",
    "static_shape": "depth <= nodes <= num_speculative_tokens (8)",
    "low_confidence_shape": "depth <= nodes <= num_speculative_tokens (8)",
    "high_confidence_shape": "depth <= nodes <= num_speculative_tokens (8)",
}


def config_of(**values: Any) -> AdaptiveSpecConfig:
    return AdaptiveSpecConfig.from_dict({"num_speculative_tokens": 8, **values})


def lists_presets(message: str) -> bool:
    return all(f'"{name}" ({kappa})' in message for name, kappa in PRESETS.items())


class TestPresets:
    def test_values(self) -> None:
        """Named values are a promise: a change is one to what callers get."""
        assert PRESETS == {"lossless": 1.0, "near-lossless": 0.6, "balanced": 0.4}
        assert all(type(kappa) is float for kappa in PRESETS.values())

    def test_values_are_the_measured_ones(self) -> None:
        quality = Path(__file__).parents[2] / "bench" / "results" / "quality.json"
        assert json.loads(quality.read_text(encoding="utf-8"))["presets"] == PRESETS

    @pytest.mark.parametrize("name", PRESETS)
    def test_name_is_its_value(self, name: str) -> None:
        config = config_of(margin_threshold=name)
        assert config == config_of(margin_threshold=PRESETS[name])
        assert type(config.margin_threshold) is type(config.margin_threshold_floor) is float
        assert config_of(margin_threshold_floor=name) == config_of(margin_threshold_floor=PRESETS[name])

    def test_names_and_numbers_mix(self) -> None:
        config = config_of(margin_threshold="near-lossless", margin_threshold_floor="balanced")
        assert (config.margin_threshold, config.margin_threshold_floor) == (0.6, 0.4)
        assert config_of(margin_threshold="balanced", margin_threshold_floor=0.1).margin_threshold_floor == 0.1

    def test_floor_above_the_threshold(self) -> None:
        with pytest.raises(ValueError) as error:
            config_of(margin_threshold="balanced", margin_threshold_floor="near-lossless")
        message = str(error.value)
        assert "margin_threshold_floor='near-lossless' (0.6) is not allowed" in message
        assert "a number in (0, margin_threshold] (0.4)" in message

    @pytest.mark.parametrize("value", ["low", "0.5", 0, 1.5])
    @pytest.mark.parametrize("key", ["margin_threshold", "margin_threshold_floor"])
    def test_errors_list_the_names(self, key: str, value: Any) -> None:
        with pytest.raises(ValueError) as error:
            config_of(**{key: value})
        assert lists_presets(str(error.value))

    def test_summary_names_value_and_preset(self) -> None:
        summary = config_of(margin_threshold="near-lossless", margin_threshold_floor=0.4).summary()
        assert "LOSSY, margin_threshold=0.6 (near-lossless): output" in summary
        assert "requests may go down to 0.4 (balanced) and" in summary
        assert "(" not in config_of(margin_threshold=0.45, margin_threshold_floor=0.05).summary()
        assert "is on: lossless;" in config_of(margin_threshold="lossless").summary()

    @pytest.mark.parametrize("name", PRESETS)
    def test_of_a_request(self, name: str) -> None:
        assert parsed(adaptivespec_margin_threshold=name).margin_threshold == PRESETS[name]

    def test_of_a_request_at_the_floor(self) -> None:
        config = config_of(margin_threshold_floor="balanced")
        assert parsed(config, adaptivespec_margin_threshold="balanced").margin_threshold == 0.4

    def test_of_a_request_below_the_floor(self) -> None:
        """Refused as the number is, and says which number it is."""
        config = config_of(margin_threshold="near-lossless")
        with pytest.raises(ValueError) as error:
            parsed(config, adaptivespec_margin_threshold="balanced")
        message = str(error.value)
        assert "adaptivespec_margin_threshold='balanced' (0.4) is not allowed" in message
        assert "a number from 0.6 (this server's margin_threshold_floor) to 1" in message
        with pytest.raises(ValueError) as number:
            parsed(config, adaptivespec_margin_threshold=0.4)
        assert message.partition("; ")[2] == str(number.value).partition("; ")[2]


class TestFromDict:
    def test_every_key_is_tested(self) -> None:
        assert set(BAD_VALUES) == set(ALLOWED) == {f.name for f in fields(AdaptiveSpecConfig)}

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            pytest.param(key, value, id=f"{key}={value!r:.20}-{i}")
            for key, values in BAD_VALUES.items()
            for i, value in enumerate(values)
        ],
    )
    def test_bad_value_is_named_with_what_is_allowed(self, key: str, value: Any) -> None:
        with pytest.raises(ValueError) as error:
            config_of(**{"margin_threshold": 0.5, key: value})
        message = str(error.value)
        assert f"{key}={value!r} is not allowed" in message
        assert ALLOWED[key] in message
        assert lists_presets(message) == key.startswith("margin_threshold")

    def test_missing_num_speculative_tokens(self) -> None:
        with pytest.raises(ValueError, match=r"num_speculative_tokens is missing.*an integer from 1 to 64"):
            AdaptiveSpecConfig.from_dict({"margin_threshold": 0.5})

    @pytest.mark.parametrize("key", ["margin_treshold", "kappa", "model", "Margin_threshold", "margin-threshold"])
    def test_unknown_key(self, key: str) -> None:
        with pytest.raises(ValueError, match=f"unknown key '{key}'; allowed are .*margin_threshold, "):
            config_of(**{key: 0.5})

    def test_defaults(self) -> None:
        """Lossless, and everything else as the class says."""
        config = config_of()
        assert config == AdaptiveSpecConfig(num_speculative_tokens=8)
        assert config.margin_threshold == config.margin_threshold_floor == 1.0
        assert config.max_promotions_per_step is None

    def test_floor_follows_the_threshold(self) -> None:
        """Callers can make their output more exact, not less, unless the operator says otherwise."""
        assert config_of(margin_threshold=0.3).margin_threshold_floor == 0.3
        assert config_of(margin_threshold=0.3, margin_threshold_floor=None).margin_threshold_floor == 0.3
        assert config_of(margin_threshold=0.3, margin_threshold_floor=0.1).margin_threshold_floor == 0.1
        assert config_of(margin_threshold_floor=0.1).margin_threshold == 1.0

    @pytest.mark.parametrize(
        "values",
        [
            {"margin_threshold": 1},
            {"margin_threshold": 1e-12},
            {"margin_threshold": 0.5, "margin_threshold_floor": 0.5},
            {"max_promotions_per_step": None},
            {"max_promotions_per_step": 1},
            {"static_shape": [1, 1, 1]},
            {"static_shape": (8, MAX_TREE_NODES, 8)},
            {"confidence_scale": 100},
            {"history_decay": 1},
            {"reset_after": 1},
        ],
    )
    def test_ends_of_the_ranges_are_allowed(self, values: dict[str, Any]) -> None:
        config = config_of(**values)
        for key, value in values.items():
            assert getattr(config, key) == (tuple(value) if isinstance(value, list) else value)

    def test_whole_numbers_become_floats(self) -> None:
        config = config_of(margin_threshold=1, margin_threshold_floor=1, confidence_scale=2, history_decay=1)
        for key in ("margin_threshold", "margin_threshold_floor", "confidence_scale", "history_decay"):
            assert type(getattr(config, key)) is float

    def test_deepest_shape(self) -> None:
        deepest = [MAX_DEPTH, 1, MAX_TREE_NODES]
        config = config_of(num_speculative_tokens=MAX_TREE_NODES, high_confidence_shape=deepest)
        assert config.high_confidence_shape == tuple(deepest)
        with pytest.raises(ValueError, match=f"1 <= depth <= {MAX_DEPTH}"):
            config_of(num_speculative_tokens=MAX_TREE_NODES, high_confidence_shape=[MAX_DEPTH + 1, 1, MAX_TREE_NODES])

    @pytest.mark.parametrize("nodes", [1, 2, 3, 5, 7, 64])
    def test_default_shapes_fit_any_num_speculative_tokens(self, nodes: int) -> None:
        config = config_of(num_speculative_tokens=nodes)
        for key in ("static_shape", "low_confidence_shape", "high_confidence_shape"):
            depth, width, drafted = getattr(config, key)
            assert 1 <= depth <= drafted <= nodes
            assert width >= 1
        # What was made to fit is also accepted when it is said.
        assert AdaptiveSpecConfig.from_dict(config.to_dict()) == config

    @settings(deadline=None)
    @given(
        st.dictionaries(
            st.sampled_from(sorted(BAD_VALUES)),
            st.recursive(
                st.none()
                | st.booleans()
                | st.integers()
                | st.floats()
                | st.sampled_from(["throughput", "adaptive", "static", "1", *PRESETS]),
                lambda inner: st.lists(inner, max_size=3),
            )
            | st.lists(st.integers(0, 9), min_size=3, max_size=3)
            | st.floats(0, 1),
        )
    )
    def test_anything_json_is_valid_or_a_value_error_with_a_key(self, raw: dict[str, Any]) -> None:
        try:
            config = AdaptiveSpecConfig.from_dict({"num_speculative_tokens": 8} | raw)
        except ValueError as error:
            message = str(error)
        else:
            self.check_valid(config)
            return
        assert any(key in message for key in raw)

    @staticmethod
    def check_valid(config: AdaptiveSpecConfig) -> None:
        assert 0 < config.margin_threshold_floor <= config.margin_threshold <= 1
        assert 0 < config.confidence_scale < INF
        assert AdaptiveSpecConfig.from_dict(json.loads(json.dumps(config.to_dict(), allow_nan=False))) == config


class TestPolicyInForce:
    def test_default_is_the_runners(self) -> None:
        for runner, policy in (("v1", "throughput"), ("v2", "adaptive")):
            assert AdaptiveSpecConfig.from_user({"num_speculative_tokens": 8}, runner).tree_policy == policy

    @pytest.mark.parametrize("key", POLICY_KEYS)
    @pytest.mark.parametrize("policy", ["throughput", "adaptive", "static"])
    def test_keys_that_nobody_would_read(self, key: str, policy: str) -> None:
        default = getattr(AdaptiveSpecConfig(num_speculative_tokens=8), key)
        given = {"num_speculative_tokens": 8, "tree_policy": policy, key: default}
        if POLICY_KEYS[key] == policy:
            assert AdaptiveSpecConfig.from_user(given, "v1").tree_policy == policy
            return
        with pytest.raises(
            ValueError, match=f'{key} is read by tree_policy .* set "tree_policy": "{POLICY_KEYS[key]}"'
        ):
            AdaptiveSpecConfig.from_user(given, "v1")


class TestDerived:
    def test_json_round_trip(self) -> None:
        """The worker gets the configuration through vLLM's ``additional_config``."""
        config = config_of(
            margin_threshold=0.3,
            margin_threshold_floor=0.1,
            max_promotions_per_step=2,
            tree_policy="static",
            static_shape=(2, 3, 5),
            low_confidence_shape=[1, 2, 3],
            high_confidence_shape=[4, 2, 6],
            confidence_scale=0.7,
            history_decay=0.2,
            reset_after=9,
        )
        assert all(getattr(config, f.name) != f.default for f in fields(config)), "or the trip proves little"
        assert AdaptiveSpecConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config

    def test_own_keys_are_all_but_vllms(self) -> None:
        assert AdaptiveSpecConfig.own_keys() == set(BAD_VALUES) - {"num_speculative_tokens"}

    def test_own_keys_are_no_keys_of_vllm(self) -> None:
        """Or a stock speculative_config with one of them would be refused as stray."""
        from vllm.config import SpeculativeConfig

        assert not AdaptiveSpecConfig.own_keys() & {f.name for f in fields(SpeculativeConfig)}

    def test_policy(self) -> None:
        shapes = {"low_confidence_shape": [1, 2, 3], "high_confidence_shape": [4, 2, 6], "static_shape": [2, 3, 5]}
        assert config_of(confidence_scale=0.7, **shapes).policy() == AdaptivePolicy(
            TreeShape(1, 2, 3), TreeShape(4, 2, 6), 0.7
        )
        assert config_of(tree_policy="static", **shapes).policy() == StaticPolicy(TreeShape(2, 3, 5))

    def test_history_is_new_for_every_request(self) -> None:
        config = config_of(history_decay=0.2, reset_after=9)
        first, second = config.history(), config.history()
        assert (first.decay, first.reset_after) == (0.2, 9)
        first.observe(3, 3)
        assert first != second

    def test_summary_says_what_is_lossy(self) -> None:
        assert "lossless" in config_of().summary()
        assert "LOSSY" not in config_of().summary()
        lossy = config_of(margin_threshold=0.3).summary()
        assert "LOSSY, margin_threshold=0.3" in lossy
        assert "lossless" not in lossy
        assert "requests may go down to 0.1" in config_of(margin_threshold_floor=0.1).summary()
        assert "sized by what they cost and bring" in config_of(tree_policy="throughput").summary()
        assert "static [2, 3, 5]" in config_of(tree_policy="static", static_shape=[2, 3, 5]).summary()


LOSSY = config_of(margin_threshold=0.5, margin_threshold_floor=0.2, max_promotions_per_step=3)


def parsed(config: AdaptiveSpecConfig = LOSSY, **extra_args: Any) -> RequestOptions:
    return RequestOptions.parse(extra_args, config)


class TestRequestOptions:
    @pytest.mark.parametrize("extra_args", [None, {}, {"margin_threshold": 7, "other_plugin": object(), "": None}])
    def test_foreign_keys_are_left_alone(self, extra_args: dict[str, Any] | None) -> None:
        assert RequestOptions.parse(extra_args, LOSSY) == RequestOptions(margin_threshold=0.5, enabled=True)

    @pytest.mark.parametrize("value", [True, 1, 1.0, "true", "True", "TRUE", "1"])
    def test_enabled(self, value: Any) -> None:
        assert parsed(adaptivespec_enabled=value).enabled is True

    @pytest.mark.parametrize("value", [False, 0, 0.0, "false", "False", "FALSE", "0"])
    def test_disabled(self, value: Any) -> None:
        """Over HTTP ``vllm_xargs`` are strings or numbers: "false" must not be a true string."""
        assert parsed(adaptivespec_enabled=value).enabled is False

    @pytest.mark.parametrize("value", [None, "", "yes", "no", 2, -1, 0.5, NAN, [], [False], {}])
    def test_not_a_boolean(self, value: Any) -> None:
        with pytest.raises(ValueError) as error:
            parsed(adaptivespec_enabled=value)
        assert f"adaptivespec_enabled={value!r} is not allowed" in str(error.value)
        assert "true or false" in str(error.value)

    @pytest.mark.parametrize(
        ("value", "kappa"), [(0.2, 0.2), ("0.2", 0.2), (0.7, 0.7), (1, 1.0), ("1", 1.0), ("1.0", 1.0), (1.0, 1.0)]
    )
    def test_margin_threshold(self, value: Any, kappa: float) -> None:
        assert parsed(adaptivespec_margin_threshold=value).margin_threshold == kappa

    @pytest.mark.parametrize(
        "value",
        [
            None,
            True,
            False,
            "",
            "low",
            "Balanced",
            "near_lossless",
            "nan",
            "inf",
            NAN,
            INF,
            -INF,
            0,
            -1,
            0.1999,
            "0.1999",
            1.01,
            "2",
            HUGE,
            [0.5],
            {},
        ],
    )
    def test_margin_threshold_out_of_range(self, value: Any) -> None:
        with pytest.raises(ValueError) as error:
            parsed(adaptivespec_margin_threshold=value)
        assert f"adaptivespec_margin_threshold={value!r} is not allowed" in str(error.value)
        assert "a number from 0.2 (this server's margin_threshold_floor) to 1" in str(error.value)
        assert lists_presets(str(error.value))

    def test_lossless_server_stays_lossless(self) -> None:
        assert parsed(config_of(), adaptivespec_margin_threshold=1.0).margin_threshold == 1.0
        with pytest.raises(ValueError, match=r"from 1\.0"):
            parsed(config_of(), adaptivespec_margin_threshold=0.99)

    @pytest.mark.parametrize("name", ["adaptivespec_kappa", "adaptivespec_", "adaptivespec_Enabled"])
    def test_unknown_option(self, name: str) -> None:
        with pytest.raises(ValueError) as error:
            parsed(**{name: 1})
        assert f"{name} is not an option" in str(error.value)
        assert "adaptivespec_margin_threshold, adaptivespec_enabled" in str(error.value)

    def test_both(self) -> None:
        options = parsed(adaptivespec_margin_threshold="0.3", adaptivespec_enabled="false", other=1)
        assert options == RequestOptions(margin_threshold=0.3, enabled=False)

    def test_rule(self) -> None:
        rule = parsed(adaptivespec_margin_threshold=0.3).rule(LOSSY, frozenset({2, 7}))
        assert rule == MarginRule(kappa=0.3, max_promotions=3, protected=frozenset({2, 7}))
