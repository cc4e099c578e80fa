"""The check of the installed vLLM: silent on this one, and a sentence on one that moved something."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import pytest

from vllm_adaptivespec import compat


class TestVersion:
    @pytest.mark.parametrize(
        "version", ["0.32.0", "0.32.1", "0.33.0", "0.33.1", "0.32.0+cpu", "0.33.0rc1", "0.33.1.dev7+gabc1234"]
    )
    def test_supported(self, version: str) -> None:
        compat.check_version(version)

    @pytest.mark.parametrize("version", ["0.31.9", "0.9.2", "0.34.0", "0.34.0rc1", "1.0.0", "1.32.0", "0.320.0"])
    def test_other_versions(self, version: str) -> None:
        with pytest.raises(RuntimeError) as error:
            compat.check_version(version)
        assert "supports vLLM 0.32 up to, but not including, 0.34" in str(error.value)
        assert f"this is {version}" in str(error.value)

    @pytest.mark.parametrize("version", ["", "dev", "0", "main.branch", "0.x.1", "v0.32.0"])
    def test_unreadable(self, version: str) -> None:
        with pytest.raises(RuntimeError, match="cannot read the version"):
            compat.check_version(version)

    def test_range_is_the_packages_own(self) -> None:
        """pip and the check at start-up must not disagree."""
        from importlib.metadata import requires

        (vllm,) = [r for r in requires("vllm-adaptivespec") or [] if r.startswith("vllm")]
        (low, high) = compat.SUPPORTED
        assert f">={low[0]}.{low[1]}" in vllm
        assert f"<{high[0]}.{high[1]}" in vllm


@pytest.mark.upstream
class TestSurface:
    @pytest.mark.parametrize("runner", ["v1", "v2"])
    def test_installed_vllm_has_it_all(self, runner: str) -> None:
        assert compat.surface_problems(runner) == []

    def test_each_path_looks_at_its_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.v1.worker.gpu_worker import Worker

        monkeypatch.delattr(Worker, "_make_model_runner")
        assert compat.surface_problems("v1") == []
        assert compat.surface_problems("v2") == ["vllm.v1.worker.gpu_worker:Worker._make_model_runner is missing"]

    def test_renamed_method(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.v1.sample.sampler import Sampler

        monkeypatch.setattr(Sampler, "collect_logprobs", Sampler.gather_logprobs, raising=False)
        monkeypatch.delattr(Sampler, "gather_logprobs")
        assert compat.surface_problems("v1") == ["vllm.v1.sample.sampler:Sampler.gather_logprobs is missing"]
        with pytest.raises(RuntimeError, match=r"does not fit this vLLM .*gather_logprobs is missing"):
            compat.check_environment()

    def test_renamed_parameter(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.v1.sample.sampler import Sampler

        def sample(self: Any, scores: Any, sampling_metadata: Any) -> None: ...

        monkeypatch.setattr(Sampler, "sample", sample)
        assert compat.surface_problems("v1") == ["vllm.v1.sample.sampler:Sampler.sample has no parameter 'logits'"]

    def test_renamed_class(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(importlib.import_module("vllm.v1.sample.rejection_sampler"), "RejectionSampler")
        assert compat.surface_problems("v1") == ["vllm.v1.sample.rejection_sampler:RejectionSampler is missing"]

    def test_wrapped_by_us_is_still_seen_through(self) -> None:
        """Our own seams take ``*args``; the parameters checked are vLLM's."""
        from vllm_adaptivespec.plugin import register

        register()
        assert compat.surface_problems("v1") == []

    @pytest.mark.parametrize(
        ("module", "name"),
        [
            ("v1.worker", "AdaptiveSpecCPUWorker"),
            ("v1.runner", "AdaptiveSpecModelRunner"),
            ("v1.proposer", "TreeProposer"),
            ("v1.sampler", "TreeSampler"),
            ("v2.worker", "AdaptiveSpecGPUWorker"),
            ("v2.runner", "AdaptiveSpecGPUModelRunner"),
            ("v2.model_state", "TreeModelState"),
            ("v2.rejection_sampler", "TreeRejectionSampler"),
            ("v2.speculator", "TreeSpeculator"),
        ],
    )
    def test_every_override_is_listed(self, module: str, name: str) -> None:
        """A method of vLLM's that we replace but do not list would be missed by the check when it moves."""
        ours = getattr(importlib.import_module(f"vllm_adaptivespec.runner_{module}"), name)
        theirs = [base for base in ours.__mro__[1:-1] if not base.__module__.startswith("vllm_adaptivespec")]
        listed = {
            method
            for place, methods in compat.SURFACES[module[:2]].items()
            for method in methods
            if any(f"{base.__module__}:{base.__name__}" == place for base in theirs)
        }
        overridden = {
            method
            for base in ours.__mro__[:-1]
            if base not in theirs
            for method, function in vars(base).items()
            if inspect.isfunction(function) and any(hasattr(b, method) for b in theirs)
        }
        overridden -= {"__init__"}
        assert overridden
        assert overridden <= listed


class TestEnvironment:
    def test_fine_here(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
        compat.check_environment()
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
        compat.check_environment()

    @pytest.mark.parametrize("value", ["1", "true", "True"])
    def test_other_runner_forced(self, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", value)
        with pytest.raises(ValueError, match=f"V1 model runner, but VLLM_USE_V2_MODEL_RUNNER={value} is set"):
            compat.check_environment()

    @pytest.mark.parametrize("value", ["0", "false"])
    def test_other_runner_forced_on_a_gpu(self, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
        monkeypatch.setattr(compat, "runner", lambda: "v2")
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", value)
        with pytest.raises(ValueError, match=f"V2 model runner, but VLLM_USE_V2_MODEL_RUNNER={value} is set"):
            compat.check_environment()
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
        compat.check_environment()

    def test_runner_goes_by_the_platform(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.platforms import current_platform

        monkeypatch.delenv(compat.TEST_WORKER, raising=False)
        assert compat.runner() == "v1"
        monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
        assert compat.runner() == "v2"

    def test_other_version_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import vllm

        monkeypatch.setattr(vllm, "__version__", "0.34.0")
        with pytest.raises(RuntimeError, match=r"this is 0\.34\.0"):
            compat.check_environment()
