"""Everything a user can set: the configuration, the per-request options, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .core.acceptance import MarginRule
    from .core.policy import AcceptanceHistory, TreePolicy

METHOD = "adaptivespec"
"""The ``method`` in ``--speculative-config``, and our key in vLLM's ``additional_config``."""

MAX_TREE_NODES = 64
"""Largest tree: node sets fit one 64-bit word, which the GPU kernels' ancestor masks use."""

MAX_DEPTH = 16

OPTION_PREFIX = "adaptivespec_"

PRESETS = {"lossless": 1.0, "near-lossless": 0.6, "balanced": 0.4}
"""Names for values of ``margin_threshold``.

Chosen by ``bench/quality.py`` on its tuning prompts (SmolLM2-135M-Instruct, HumanEval and chat): the smallest kappa, in
tenths, whose outputs lose on average at most 0.02 (near-lossless) and 0.06 (balanced) nats per token of log-probability
under the target. ``bench/results/quality.json`` has what they cost on other prompts; another model may differ.
"""

Shape = tuple[int, int, int]

DEFAULT_POLICY = {"v1": "throughput", "v2": "adaptive"}
"""``tree_policy`` where it is not set, by model runner of vLLM's (V1: CPUs, V2: GPUs)."""

POLICY_KEYS = {
    "static_shape": "static",
    **dict.fromkeys(
        ("low_confidence_shape", "high_confidence_shape", "confidence_scale", "history_decay", "reset_after"),
        "adaptive",
    ),
}
"""Keys that one policy reads, and which."""


def _fail(key: str, value: object, allowed: str) -> ValueError:
    return ValueError(f"{METHOD}: {key}={_shown(value)} is not allowed; {key} must be {allowed}.")


def _preset_names() -> str:
    return "a name for one: " + ", ".join(f'"{name}" ({kappa})' for name, kappa in PRESETS.items())


def _shown(value: object) -> str:
    """A value in an error message; a preset with what it stands for."""
    return f"{value!r} ({PRESETS[value]})" if isinstance(value, str) and value in PRESETS else repr(value)


def _named(kappa: float) -> str:
    """A kappa in the start-up log, with its preset if it is one."""
    names = [name for name, value in PRESETS.items() if value == kappa]
    return f"{kappa} ({names[0]})" if names else f"{kappa}"


def _number(key: str, value: object, low: float, high: float, allowed: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _fail(key, value, allowed)
    if not (low < value <= high):  # also refuses NaN
        raise _fail(key, value, allowed)
    return float(value)


def _threshold(key: str, value: object, high: float, allowed: str) -> float:
    """A kappa of the configuration, as a number or by name."""
    kappa = PRESETS.get(value, value) if isinstance(value, str) else value
    try:
        return _number(key, kappa, 0, high, allowed)
    except ValueError:
        raise _fail(key, value, f"{allowed}, or {_preset_names()}") from None


def _count(key: str, value: object, low: int, high: int | None = None) -> int:
    allowed = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        raise _fail(key, value, allowed)
    return value


def _shape(key: str, value: object, max_nodes: int) -> Shape:
    allowed = (
        f"[depth, width, drafted nodes]: integers with 1 <= depth <= {MAX_DEPTH}, 1 <= width, and "
        f"depth <= nodes <= num_speculative_tokens ({max_nodes})"
    )
    if not isinstance(value, (list, tuple)) or len(value) != 3:
        raise _fail(key, value, allowed)
    if any(isinstance(v, bool) or not isinstance(v, int) for v in value):
        raise _fail(key, value, allowed)
    depth, width, nodes = value
    if not (1 <= depth <= MAX_DEPTH and 1 <= width <= MAX_TREE_NODES and depth <= nodes <= max_nodes):
        raise _fail(key, value, allowed)
    return (depth, width, nodes)


def _fit(shape: Shape, max_nodes: int) -> Shape:
    """A default shape within a small ``num_speculative_tokens``."""
    depth, width, nodes = shape
    return (min(depth, max_nodes), width, min(nodes, max_nodes))


@dataclass(frozen=True)
class AdaptiveSpecConfig:
    """The plugin's own keys of ``--speculative-config``; every one has a default.

    Args:
        num_speculative_tokens: most drafted nodes per request and step (vLLM's own key).
        margin_threshold: kappa. A drafted token that is not the target's choice is accepted when
            ``p_target(drafted) / p_target(top-1)`` reaches it. 1.0 is lossless and exact. ``from_dict`` also takes
            a name of ``PRESETS``, here and for the floor.
        margin_threshold_floor: lowest kappa a request may ask for; the server's own ``margin_threshold`` if not set,
            so that callers can make their output more exact but not less.
        max_promotions_per_step: most promotions of one request in one step; null for no limit.
        tree_policy: ``"throughput"`` (what is expected to pay, over the whole batch; on CPUs only, where it is the
            plugin's default), ``"adaptive"`` (by draft confidence and acceptance history) or ``"static"``.
        static_shape: ``[depth, width, drafted nodes]`` of the static policy.
        low_confidence_shape, high_confidence_shape: what the adaptive policy interpolates between. The defaults did
            better than the paper's [3, 4, 3] and [7, 1, 7] in acceptance length per level (bench/results).
        confidence_scale: confidence times acceptance rate at which the high-confidence shape is reached.
        history_decay: weight of the newest step in a request's rolling acceptance rate.
        reset_after: steps in a row with nothing accepted after which the rate starts anew.

    Raises:
        ValueError: from ``from_dict``; names the key, its value and what is allowed.
    """

    num_speculative_tokens: int
    margin_threshold: float = 1.0
    margin_threshold_floor: float = 1.0
    max_promotions_per_step: int | None = None
    tree_policy: str = "adaptive"
    static_shape: Shape = (3, 4, 8)
    low_confidence_shape: Shape = (2, 4, 6)
    high_confidence_shape: Shape = (5, 3, 8)
    confidence_scale: float = 0.5
    history_decay: float = 0.3
    reset_after: int = 5

    @classmethod
    def from_user(cls, given: Mapping[str, Any], runner: str) -> AdaptiveSpecConfig:
        """``from_dict`` of what a user wrote: the default policy is that of the model runner (``"v1"``, ``"v2"``).

        Raises:
            ValueError: also for keys that the policy in force would not read.
        """
        config = cls.from_dict({"tree_policy": DEFAULT_POLICY[runner], **given})
        for key, policy in POLICY_KEYS.items():
            if key in given and config.tree_policy != policy:
                raise ValueError(
                    f'{METHOD}: {key} is read by tree_policy "{policy}", but tree_policy is "{config.tree_policy}"; '
                    f'set "tree_policy": "{policy}" or remove {key}.'
                )
        return config

    @classmethod
    def own_keys(cls) -> frozenset[str]:
        """Keys that are ours alone, which vLLM must not see."""
        return frozenset(f.name for f in fields(cls)) - {"num_speculative_tokens"}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> AdaptiveSpecConfig:
        """Validate the user's values; keys are ours and ``num_speculative_tokens`` only."""
        if "num_speculative_tokens" not in raw:
            raise ValueError(
                f"{METHOD}: num_speculative_tokens is missing; set it to the most drafted nodes per request "
                f"(an integer from 1 to {MAX_TREE_NODES}; 8 is a good start)."
            )
        unknown = sorted(set(raw) - cls.own_keys() - {"num_speculative_tokens"})
        if unknown:
            raise ValueError(f"{METHOD}: unknown key {unknown[0]!r}; allowed are {', '.join(sorted(cls.own_keys()))}.")
        nodes = _count("num_speculative_tokens", raw["num_speculative_tokens"], 1, MAX_TREE_NODES)
        kappa = _threshold("margin_threshold", raw.get("margin_threshold", 1.0), 1, "a number in (0, 1]")
        floor = kappa
        if raw.get("margin_threshold_floor") is not None:
            allowed = f"a number in (0, margin_threshold] ({kappa})"
            floor = _threshold("margin_threshold_floor", raw["margin_threshold_floor"], kappa, allowed)
        promotions = raw.get("max_promotions_per_step")
        if promotions is not None:
            promotions = _count("max_promotions_per_step", promotions, 1)
        policy = raw.get("tree_policy", cls.tree_policy)
        if policy not in ("throughput", "adaptive", "static"):
            raise _fail("tree_policy", policy, '"throughput", "adaptive" or "static"')
        shapes = {
            key: _shape(key, raw[key], nodes) if key in raw else _fit(getattr(cls, key), nodes)
            for key in ("static_shape", "low_confidence_shape", "high_confidence_shape")
        }
        scale = raw.get("confidence_scale", cls.confidence_scale)
        scale = _number("confidence_scale", scale, 0, sys.float_info.max, "a finite number above 0")
        decay = _number("history_decay", raw.get("history_decay", cls.history_decay), 0, 1, "a number in (0, 1]")
        reset_after = _count("reset_after", raw.get("reset_after", cls.reset_after), 1)
        return cls(
            num_speculative_tokens=nodes,
            margin_threshold=kappa,
            margin_threshold_floor=floor,
            max_promotions_per_step=promotions,
            tree_policy=policy,
            confidence_scale=scale,
            history_decay=decay,
            reset_after=reset_after,
            **shapes,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values that survive JSON, for vLLM's ``additional_config``."""
        return {
            f.name: list(value) if isinstance(value := getattr(self, f.name), tuple) else value for f in fields(self)
        }

    def policy(self) -> TreePolicy:
        """The configured policy, if it is one that decides for each request by itself."""
        from .core.policy import AdaptivePolicy, StaticPolicy, TreeShape

        if self.tree_policy == "static":
            return StaticPolicy(TreeShape(*self.static_shape))
        return AdaptivePolicy(
            TreeShape(*self.low_confidence_shape), TreeShape(*self.high_confidence_shape), self.confidence_scale
        )

    def history(self) -> AcceptanceHistory:
        """The acceptance history of a new request."""
        from .core.policy import AcceptanceHistory

        return AcceptanceHistory(self.history_decay, self.reset_after)

    def summary(self) -> str:
        """What is in force, in one line for the start-up log."""
        if self.margin_threshold < 1.0:
            kappa = _named(self.margin_threshold)
            rule = f"LOSSY, margin_threshold={kappa}: output may differ from the target model's own"
        else:
            rule = "lossless"
        if self.tree_policy == "throughput":
            shapes = "sized by what they cost and bring"
        elif self.tree_policy == "static":
            shapes = f"static {list(self.static_shape)}"
        else:
            shapes = f"adaptive {list(self.low_confidence_shape)} to {list(self.high_confidence_shape)}"
        floor = ""
        if self.margin_threshold_floor < self.margin_threshold:
            floor = f", but requests may go down to {_named(self.margin_threshold_floor)} and then differ"
        return f"AdaptiveSpec is on: {rule}{floor}; trees {shapes}, at most {self.num_speculative_tokens} nodes."


_OPTIONS = {
    "margin_threshold": "a number from {floor} (this server's margin_threshold_floor) to 1, or {presets}",
    "enabled": 'true or false (over HTTP "true", "false", 1 or 0)',
}


@dataclass(frozen=True)
class RequestOptions:
    """What one request asked for, through ``SamplingParams.extra_args`` or ``vllm_xargs`` over HTTP.

    Args:
        margin_threshold: kappa of this request.
        enabled: whether the request is speculated at all.
    """

    margin_threshold: float
    enabled: bool

    @classmethod
    def parse(cls, extra_args: Mapping[str, Any] | None, config: AdaptiveSpecConfig) -> RequestOptions:
        """Read a request's ``adaptivespec_*`` arguments; others are left alone.

        Raises:
            ValueError: an unknown ``adaptivespec_*`` key, a wrong type, or a value out of range.
        """
        kappa, enabled = config.margin_threshold, True
        for name, value in (extra_args or {}).items():
            if not name.startswith(OPTION_PREFIX):
                continue
            option = name[len(OPTION_PREFIX) :]
            if option not in _OPTIONS:
                known = ", ".join(OPTION_PREFIX + o for o in _OPTIONS)
                raise ValueError(f"{name} is not an option of AdaptiveSpec; allowed are {known}.")
            allowed = _OPTIONS[option].format(floor=config.margin_threshold_floor, presets=_preset_names())
            if option == "enabled":
                enabled = _boolean(name, value, allowed)
            else:
                kappa = _kappa(name, value, allowed, config.margin_threshold_floor)
        return cls(kappa, enabled)

    def rule(self, config: AdaptiveSpecConfig, protected: frozenset[int]) -> MarginRule:
        """The margin rule in force for the request; ``protected`` are its EOS and stop ids."""
        from .core.acceptance import MarginRule

        return MarginRule(self.margin_threshold, config.max_promotions_per_step, protected)


def _boolean(name: str, value: object, allowed: str) -> bool:
    if isinstance(value, str) and value.lower() in ("true", "false", "1", "0"):
        return value.lower() in ("true", "1")
    if isinstance(value, (bool, int, float)) and value in (0, 1):
        return bool(value)
    raise ValueError(f"{name}={value!r} is not allowed; it must be {allowed}.")


def _kappa(name: str, value: object, allowed: str, floor: float) -> float:
    error = ValueError(f"{name}={_shown(value)} is not allowed; it must be {allowed}.")
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise error
    try:
        kappa = float(PRESETS.get(value, value) if isinstance(value, str) else value)
    except (ValueError, OverflowError):
        raise error from None
    if not floor <= kappa <= 1.0:  # also refuses NaN
        raise error
    return kappa
