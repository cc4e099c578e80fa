"""The seams in vLLM: they translate our method, and do nothing for anybody else."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_adaptivespec import plugin
from vllm_adaptivespec.config import AdaptiveSpecConfig
from vllm_adaptivespec.plugin import WORKER_CLASSES, config_of

WORKER_CLASS = WORKER_CLASSES["v1"]

STOCK_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"

MakeArgs = Callable[..., Any]
MakeDict = Callable[..., dict[str, Any]]


def seams() -> list[Any]:
    """The four places the plugin changes, as they are now."""
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.input_processor import InputProcessor

    return [
        EngineArgs.create_speculative_config,
        EngineArgs.create_engine_config,
        InputProcessor._build_logits_processors_params_validator,
        VllmConfig.use_v2_model_runner.fget,
    ]


def test_register_twice_installs_once() -> None:
    plugin.register()
    plugin._install_request_validation()
    first = seams()
    plugin.register()
    plugin._install_request_validation()
    assert all(now is before for now, before in zip(seams(), first, strict=True))
    for wrapper in first:
        assert wrapper.__module__ == inspect.unwrap(wrapper).__module__
        assert wrapper.__wrapped__ is inspect.unwrap(wrapper), "wrapped more than once"
        assert not hasattr(inspect.unwrap(wrapper), plugin._MARK)


class TestOurMethod:
    def test_becomes_eagle3_with_our_worker(self, engine_args: MakeArgs, speculative_config: MakeDict) -> None:
        config = engine_args(speculative_config=speculative_config(margin_threshold=0.5)).create_engine_config()
        assert config.parallel_config.worker_cls == WORKER_CLASS
        assert config.speculative_config.method == "eagle3"
        assert config.speculative_config.num_speculative_tokens == 8
        assert config.speculative_config.disable_padded_drafter_batch
        assert not config.scheduler_config.async_scheduling
        assert config_of(config) == AdaptiveSpecConfig.from_user(
            {"num_speculative_tokens": 8, "margin_threshold": 0.5}, "v1"
        )

    def test_worker_class_exists(self) -> None:
        from vllm.utils.import_utils import resolve_obj_by_qualname

        from vllm_adaptivespec.runner_v1.worker import AdaptiveSpecCPUWorker

        assert resolve_obj_by_qualname(WORKER_CLASS) is AdaptiveSpecCPUWorker

    def test_users_dictionary_is_neither_changed_nor_lost(
        self, engine_args: MakeArgs, speculative_config: MakeDict
    ) -> None:
        """A second engine from the same arguments must not be stock EAGLE-3."""
        own = {"margin_threshold": 0.5, "tree_policy": "static", "static_shape": [3, 4, 8]}
        user = speculative_config(**own)
        before = copy.deepcopy(user)
        args = engine_args(speculative_config=user)
        for _ in range(3):
            config = args.create_engine_config()
            assert config.parallel_config.worker_cls == WORKER_CLASS
            assert config_of(config) == AdaptiveSpecConfig.from_dict({"num_speculative_tokens": 8, **own})
            assert args.speculative_config is user
            assert user == before

    def test_users_dictionary_is_back_after_an_error(self, engine_args: MakeArgs, speculative_config: MakeDict) -> None:
        user = speculative_config(not_a_key_of_anybody=1)
        args = engine_args(speculative_config=user)
        with pytest.raises(ValueError, match="not_a_key_of_anybody"):
            args.create_engine_config()
        assert args.speculative_config is user
        assert user == speculative_config(not_a_key_of_anybody=1)

    def test_dashes_in_keys(self, engine_args: MakeArgs, speculative_config: MakeDict) -> None:
        """vLLM takes ``num-speculative-tokens`` for ``num_speculative_tokens``, so ours may have dashes too."""
        user = {key.replace("_", "-"): value for key, value in speculative_config(margin_threshold=0.5).items()}
        assert "num-speculative-tokens" in user
        config = engine_args(speculative_config=user).create_engine_config()
        assert config.parallel_config.worker_cls == WORKER_CLASS
        assert config_of(config) == AdaptiveSpecConfig.from_user(
            {"num_speculative_tokens": 8, "margin_threshold": 0.5}, "v1"
        )

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"margin_threshold": 1.5}, "margin_threshold=1.5 is not allowed"),
            ({"margin_threshold": "high"}, "margin_threshold='high' is not allowed"),
            ({"static-shape": [9, 9, 9]}, r"static_shape=\[9, 9, 9\] is not allowed"),
            (
                {"static_shape": [3, 4, 8]},
                'static_shape is read by tree_policy "static", but tree_policy is "throughput"',
            ),
            ({"num_speculative_tokens": 65}, "num_speculative_tokens=65 is not allowed"),
            ({"parallel_drafting": True}, "does not take parallel_drafting"),
            ({"rejection-sample-method": "strict"}, "does not take rejection_sample_method"),
        ],
    )
    def test_bad_values(
        self, engine_args: MakeArgs, speculative_config: MakeDict, values: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            engine_args(speculative_config=speculative_config(**values)).create_engine_config()

    def test_throughput_is_refused_on_gpus(
        self, engine_args: MakeArgs, speculative_config: MakeDict, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from vllm_adaptivespec import compat

        monkeypatch.setattr(compat, "runner", lambda: "v2")
        monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)
        user = speculative_config(tree_policy="throughput")
        with pytest.raises(ValueError, match=r'does not support tree_policy "throughput" on a GPU: .*"adaptive"'):
            engine_args(speculative_config=user).create_engine_config()

    def test_missing_num_speculative_tokens(self, engine_args: MakeArgs, speculative_config: MakeDict) -> None:
        user = speculative_config()
        del user["num_speculative_tokens"]
        with pytest.raises(ValueError, match="num_speculative_tokens is missing"):
            engine_args(speculative_config=user).create_engine_config()

    def test_set_worker_class(self, engine_args: MakeArgs, speculative_config: MakeDict) -> None:
        args = engine_args(speculative_config=speculative_config(), worker_cls="my.Worker")
        with pytest.raises(ValueError, match=r"brings its own worker, but worker_cls is 'my\.Worker'"):
            args.create_engine_config()

    def test_additional_config_is_kept(self, engine_args: MakeArgs, speculative_config: MakeDict) -> None:
        user = {"another_plugin": {"x": 1}}
        config = engine_args(speculative_config=speculative_config(), additional_config=user).create_engine_config()
        assert config.additional_config["another_plugin"] == {"x": 1}
        assert config_of(config) is not None
        assert user == {"another_plugin": {"x": 1}}

    def test_additional_config_of_another_kind(self, engine_args: MakeArgs, speculative_config: MakeDict) -> None:
        args = engine_args(speculative_config=speculative_config(), additional_config=3)
        with pytest.raises(ValueError, match="needs additional_config to be a dictionary; it is 3"):
            args.create_engine_config()

    def test_runs_on_the_v1_runner(
        self, engine_args: MakeArgs, speculative_config: MakeDict, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Where Triton is usable vLLM would choose V2; here the environment stands in for that."""
        ours = engine_args(speculative_config=speculative_config()).create_engine_config()
        plain = engine_args().create_engine_config()
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
        assert plain.use_v2_model_runner is True
        assert ours.use_v2_model_runner is False

    def test_gpus_get_the_v2_runner_and_keep_asynchronous_scheduling(
        self, engine_args: MakeArgs, speculative_config: MakeDict, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As far as a machine without one can tell: the platform is this one's, our choice is the other."""
        from vllm_adaptivespec import compat

        monkeypatch.setattr(compat, "runner", lambda: "v2")
        monkeypatch.setattr("vllm.config.vllm.HAS_TRITON", True)
        user = speculative_config(num_speculative_tokens_per_batch_size=[[1, 4, 8], [5, 256, 4]])
        config = engine_args(speculative_config=user, async_scheduling=True).create_engine_config()
        ours = config_of(config)
        assert ours is not None
        assert ours.tree_policy == "adaptive"  # the default there
        assert config.parallel_config.worker_cls == WORKER_CLASSES["v2"]
        assert config.use_v2_model_runner is True
        assert not config.speculative_config.disable_padded_drafter_batch
        assert config.speculative_config.num_speculative_tokens_per_batch_size == [(1, 4, 8), (5, 256, 4)]

    @pytest.mark.parametrize(
        ("values", "level", "text"),
        [
            ({}, "INFO", "lossless"),
            ({"margin_threshold": 0.3}, "WARNING", "LOSSY, margin_threshold=0.3"),
            ({"margin_threshold": "balanced"}, "WARNING", "LOSSY, margin_threshold=0.4 (balanced)"),
            ({"margin_threshold_floor": 0.3}, "WARNING", "may go down to 0.3"),  # some request may be lossy
        ],
    )
    def test_start_up_line(
        self,
        engine_args: MakeArgs,
        speculative_config: MakeDict,
        monkeypatch: pytest.MonkeyPatch,
        values: dict[str, Any],
        level: str,
        text: str,
    ) -> None:
        import vllm.logger

        real, lines = vllm.logger.init_logger, []
        ours = SimpleNamespace(
            warning=lambda text: lines.append(("WARNING", text)), info=lambda text: lines.append(("INFO", text))
        )
        monkeypatch.setattr(
            vllm.logger, "init_logger", lambda name: ours if name == "vllm.adaptivespec" else real(name)
        )
        engine_args(speculative_config=speculative_config(**values)).create_engine_config()
        ((seen_level, line),) = lines
        assert seen_level == level
        assert "AdaptiveSpec is on" in line
        assert text in line


class TestEverybodyElse:
    def test_no_speculation(self, engine_args: MakeArgs) -> None:
        """The configuration is the one that unwrapped vLLM makes."""
        config = engine_args().create_engine_config()
        assert config.parallel_config.worker_cls == STOCK_WORKER
        assert config.speculative_config is None
        assert config.additional_config == {}
        assert config_of(config) is None

    def test_stock_eagle3(self, engine_args: MakeArgs, speculative_config: MakeDict) -> None:
        user = speculative_config(method="eagle3")
        config = engine_args(speculative_config=user).create_engine_config()
        assert config.parallel_config.worker_cls == STOCK_WORKER
        assert config.speculative_config.method == "eagle3"
        assert not config.speculative_config.disable_padded_drafter_batch
        assert config.additional_config == {}

    def test_set_worker_class(self, engine_args: MakeArgs) -> None:
        assert engine_args(worker_cls="my.Worker").create_engine_config().parallel_config.worker_cls == "my.Worker"

    @pytest.mark.parametrize("key", sorted(AdaptiveSpecConfig.own_keys()))
    def test_stray_own_key(self, engine_args: MakeArgs, speculative_config: MakeDict, key: str) -> None:
        """Silently dropping it would serve something else than was asked for."""
        with pytest.raises(ValueError, match=f"{key}', an AdaptiveSpec key, but its method is 'eagle3'"):
            engine_args(speculative_config=speculative_config(method="eagle3", **{key: 1})).create_engine_config()

    def test_stray_own_key_with_dashes_and_no_method(self, engine_args: MakeArgs, speculative_config: MakeDict) -> None:
        user = speculative_config(**{"margin-threshold": 0.5})
        del user["method"]
        with pytest.raises(ValueError, match="'margin_threshold', an AdaptiveSpec key, but its method is None"):
            engine_args(speculative_config=user).create_engine_config()

    @pytest.mark.parametrize("later", ["nothing", "eagle3"])
    def test_same_arguments_without_us_afterwards(
        self, engine_args: MakeArgs, speculative_config: MakeDict, later: str
    ) -> None:
        """What an earlier engine left in ``additional_config`` must not switch anything on."""
        args = engine_args(speculative_config=speculative_config(), additional_config={"another_plugin": 1})
        args.create_engine_config()
        args.speculative_config = None if later == "nothing" else speculative_config(method="eagle3")
        config = args.create_engine_config()
        assert config.parallel_config.worker_cls == STOCK_WORKER
        assert config.additional_config == {"another_plugin": 1}
        assert config_of(config) is None

    @pytest.mark.parametrize("additional", [None, {}, {"another_plugin": 1}, object()])
    def test_config_of(self, additional: Any) -> None:
        assert config_of(SimpleNamespace(additional_config=additional)) is None


class TestRequests:
    """Request arguments are checked in the front end, so that an error is the caller's (HTTP 400)."""

    @staticmethod
    def check(vllm_config: Any, extra_args: dict[str, Any] | None, **params: Any) -> None:
        """Validate a request as vLLM's input processor does."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine.input_processor import InputProcessor

        plugin._install_request_validation()
        processor = SimpleNamespace(vllm_config=vllm_config, model_config=vllm_config.model_config)
        validate = InputProcessor._build_logits_processors_params_validator(processor)
        validate(SamplingParams(extra_args=extra_args, **params))

    @pytest.fixture
    def ours(self, engine_args: MakeArgs, speculative_config: MakeDict) -> Any:
        return engine_args(speculative_config=speculative_config(margin_threshold=0.5)).create_engine_config()

    @pytest.mark.parametrize(
        "extra_args",
        [
            None,
            {},
            {"adaptivespec_enabled": "false", "adaptivespec_margin_threshold": "0.7"},
            {"adaptivespec_margin_threshold": "lossless"},
            {"another_plugin": "x"},
        ],
    )
    def test_fine(self, ours: Any, extra_args: dict[str, Any] | None) -> None:
        self.check(ours, extra_args)

    @pytest.mark.parametrize(
        ("extra_args", "message"),
        [
            ({"adaptivespec_margin_threshold": 0.4}, "a number from 0.5"),
            ({"adaptivespec_margin_threshold": "high"}, '"near-lossless"'),
            ({"adaptivespec_enabled": "maybe"}, "true or false"),
            ({"adaptivespec_kappa": 0.5}, "allowed are adaptivespec_margin_threshold, adaptivespec_enabled"),
        ],
    )
    def test_wrong(self, ours: Any, extra_args: dict[str, Any], message: str) -> None:
        from vllm.exceptions import VLLMValidationError

        with pytest.raises(VLLMValidationError, match=message):
            self.check(ours, extra_args)

    def test_scores_of_given_tokens_on_a_gpu(self, ours: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """vLLM's V2 runner would leave them out of a speculated batch."""
        from vllm.exceptions import VLLMValidationError

        from vllm_adaptivespec import compat

        wants_scores = {"logprobs": 1, "logprob_token_ids": [3, 4]}
        self.check(ours, None, **wants_scores)
        monkeypatch.setattr(compat, "runner", lambda: "v2")
        self.check(ours, None)
        with pytest.raises(VLLMValidationError, match="logprob_token_ids is not supported"):
            self.check(ours, None, **wants_scores)

    def test_without_us_nobody_checks(self, engine_args: MakeArgs) -> None:
        self.check(engine_args().create_engine_config(), {"adaptivespec_kappa": "anything"})

    def test_vllms_own_check_still_runs(self, ours: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        def stock_check(processors: Any, params: Any) -> None:
            raise ValueError("stock check")

        monkeypatch.setattr("vllm.v1.sample.logits_processor.validate_logits_processors_parameters", stock_check)
        with pytest.raises(ValueError, match="stock check"):
            self.check(ours, None)
