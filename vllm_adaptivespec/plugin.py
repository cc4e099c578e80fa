"""The ``vllm.general_plugins`` entry point.

vLLM calls ``register`` in every process it starts, used or not, possibly more than once. It installs three small
seams, each of which does nothing unless the user chose ``method: "adaptivespec"``; a fourth follows with the engine.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from .config import METHOD, AdaptiveSpecConfig, RequestOptions

WORKER_CLASSES = {
    "v1": "vllm_adaptivespec.runner_v1.worker.AdaptiveSpecCPUWorker",
    "v2": "vllm_adaptivespec.runner_v2.worker.AdaptiveSpecGPUWorker",
}
"""By model runner of vLLM's."""

_MARK = "_adaptivespec_seam"


def register() -> None:
    """Install the seams; safe to call again."""
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

    _wrap(EngineArgs, "create_speculative_config", _translate_speculative_config)
    _wrap(EngineArgs, "create_engine_config", _check_engine_config)
    _choose_runner(VllmConfig)


def _wrap(owner: type, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = getattr(owner, name)
    if getattr(original, _MARK, False):
        return
    wrapper = functools.wraps(original)(make(original))
    setattr(wrapper, _MARK, True)
    setattr(owner, name, wrapper)


def config_of(vllm_config: Any) -> AdaptiveSpecConfig | None:
    """The plugin's configuration inside a ``VllmConfig``, or None where the plugin is not in use."""
    additional = vllm_config.additional_config
    if not isinstance(additional, dict) or METHOD not in additional:
        return None
    return AdaptiveSpecConfig.from_dict(additional[METHOD])


def _translate_speculative_config(original: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM knows neither our method nor our keys: hand it ``eagle3`` and keep ours in ``additional_config``.

    The user's dictionary is put back afterwards: a second engine configuration made from the same arguments must see
    ``adaptivespec`` again, or it would silently be stock EAGLE-3.
    """

    def create_speculative_config(self: Any, target_model_config: Any, target_parallel_config: Any) -> Any:
        user = self.speculative_config
        keys = {k.replace("-", "_"): v for k, v in user.items()} if isinstance(user, dict) else {}
        if keys.get("method") != METHOD:
            stray = sorted(set(keys) & AdaptiveSpecConfig.own_keys())
            if stray:
                raise ValueError(
                    f"speculative_config has {stray[0]!r}, an AdaptiveSpec key, but its method is "
                    f'{keys.get("method")!r}; set "method": "{METHOD}". (A --model in speculators format brings its '
                    "own method: name the target as --model and the head as speculative_config's model instead.)"
                )
            return original(self, target_model_config, target_parallel_config)

        from .compat import TEST_WORKER, check_environment, runner
        from .refusals import refuse_async_scheduling, refuse_speculative_keys

        check_environment()
        chosen = runner()
        worker_class = os.environ.get(TEST_WORKER, WORKER_CLASSES[chosen])
        own_keys = AdaptiveSpecConfig.own_keys()
        theirs = {k: v for k, v in keys.items() if k not in own_keys}
        refuse_speculative_keys(theirs, chosen)
        if self.async_scheduling and chosen == "v1":
            refuse_async_scheduling()
        shared = ("num_speculative_tokens",)
        given = {k: v for k, v in keys.items() if k in own_keys or k in shared}
        if self.spec_tokens is not None:  # vLLM's --spec-tokens, which it merges into the dictionary later
            given.setdefault("num_speculative_tokens", self.spec_tokens)
        config = AdaptiveSpecConfig.from_user(given, chosen)
        if target_parallel_config.worker_cls not in ("auto", worker_class):
            raise ValueError(
                f"{METHOD} brings its own worker, but worker_cls is {target_parallel_config.worker_cls!r}; "
                "leave worker_cls unset."
            )
        if not isinstance(self.additional_config, dict):
            raise ValueError(f"{METHOD} needs additional_config to be a dictionary; it is {self.additional_config!r}.")
        target_parallel_config.worker_cls = worker_class
        self.additional_config = {**self.additional_config, METHOD: config.to_dict()}
        self.speculative_config = {**theirs, "method": "eagle3"}
        if chosen == "v1":
            # Unpadded drafter batches are what makes it accept a list of ragged drafts, one per request.
            self.speculative_config["disable_padded_drafter_batch"] = True
        try:
            return original(self, target_model_config, target_parallel_config)
        finally:
            self.speculative_config = user

    return create_speculative_config


def _check_engine_config(original: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse what we cannot do where the user still sees it: in the process that was started."""

    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        user = self.speculative_config
        ours = isinstance(user, dict) and user.get("method") == METHOD
        if not ours and isinstance(self.additional_config, dict) and METHOD in self.additional_config:
            # Left by an earlier engine made from the same arguments.
            self.additional_config = {k: v for k, v in self.additional_config.items() if k != METHOD}
        vllm_config = original(self, *args, **kwargs)
        config = config_of(vllm_config)
        if config is not None:
            from .compat import runner
            from .refusals import refuse_engine_config

            refuse_engine_config(vllm_config, runner())
            _install_request_validation()
            _log_start(config)
        return vllm_config

    return create_engine_config


def _log_start(config: AdaptiveSpecConfig) -> None:
    from vllm.logger import init_logger

    logger = init_logger("vllm.adaptivespec")
    if config.margin_threshold < 1.0 or config.margin_threshold_floor < 1.0:
        logger.warning(config.summary())
    else:
        logger.info(config.summary())


def _install_request_validation() -> None:
    """The fourth seam, in the front end of an engine that uses us; importing its module takes a second elsewhere."""
    from vllm.v1.engine.input_processor import InputProcessor

    _wrap(InputProcessor, "_build_logits_processors_params_validator", _add_request_validation)


def _add_request_validation(original: Callable[..., Any]) -> Callable[..., Any]:
    """Check ``adaptivespec_*`` request arguments in the front end, where an error becomes an HTTP 400."""

    def _build_logits_processors_params_validator(self: Any) -> Callable[[Any], None]:
        validate = original(self)
        config = config_of(self.vllm_config)
        if config is None:
            return validate

        runs_v2 = self.vllm_config.use_v2_model_runner

        def validate_with_options(params: Any) -> None:
            from vllm.exceptions import VLLMValidationError

            validate(params)
            try:
                RequestOptions.parse(params.extra_args, config)
            except ValueError as error:
                raise VLLMValidationError(str(error), parameter="vllm_xargs") from error
            if runs_v2 and getattr(params, "logprob_token_ids", None):
                raise VLLMValidationError(
                    "logprob_token_ids is not supported with speculative decoding on vLLM's V2 model runner, which "
                    "would leave them out; ask for logprobs instead.",
                    parameter="logprob_token_ids",
                )

        return validate_with_options

    return _build_logits_processors_params_validator


def _choose_runner(vllm_config_class: Any) -> None:
    """Each path is built on one of vLLM's model runners; vLLM would choose by whether Triton is usable."""
    original = vllm_config_class.use_v2_model_runner
    if getattr(original.fget, _MARK, False):
        return

    @functools.wraps(original.fget)
    def use_v2_model_runner(self: Any) -> bool:
        if not isinstance(self.additional_config, dict) or METHOD not in self.additional_config:
            return original.fget(self)
        from .compat import runner

        return runner() == "v2"

    setattr(use_v2_model_runner, _MARK, True)
    vllm_config_class.use_v2_model_runner = property(use_v2_model_runner)
