"""SmolLM2 with its trained head in float32: sampling, the margin rule and options of single requests."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.engines import Engine, Pair, sampling, static
from tests.engine.smol import assert_equal

pytestmark = pytest.mark.engine

SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9}


@pytest.fixture(scope="module")
def greedy(smol_pair: Pair, smol_prompts: list[list[int]]) -> list[Any]:
    """Plain vLLM's greedy output of some of the prompts, stops included."""
    return smol_pair.plain.generate(smol_prompts[:12], sampling(48, ignore_eos=False))


@pytest.mark.slow
def test_seeded_sampling_whatever_the_batch_and_the_trees(
    smol_pair: Pair, smol_spec: Engine, smol_prompts: list[list[int]]
) -> None:
    params = [sampling(48, seed=100 + i, logprobs=1, **SAMPLED) for i in range(12)]
    reference = smol_pair.plain.generate(smol_prompts[:12], params)
    assert_equal(smol_spec.generate(smol_prompts[:12], params), reference)
    smol_spec.runner.policy = static(2, 3, 6)
    one_by_one = [smol_spec.generate([p], s)[0] for p, s in zip(smol_prompts[:6], params, strict=False)]
    assert_equal(one_by_one, reference[:6])
    smol_spec.runner.policy = static(4, 1, 4)
    assert_equal(smol_spec.generate(smol_prompts[:12][::-1], params[::-1]), reference[::-1])


def test_negative_control_one_draw_per_emitted_token(
    smol_pair: Pair, smol_spec: Engine, smol_prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sampler that draws once more per step must be seen by the test above."""
    from vllm_adaptivespec.runner_v1 import sampler

    params = [sampling(48, seed=100 + i, **SAMPLED) for i in range(4)]
    original = sampler.TreeSampler._walk_by_level

    def draws_too_often(self: Any, walks: Any, first_rows: Any, logits: Any, metadata: Any) -> Any:
        for generator in metadata.generators.values():
            import torch

            torch.randint(0, 2, (1,), generator=generator)
        return original(self, walks, first_rows, logits, metadata)

    monkeypatch.setattr(sampler.TreeSampler, "_walk_by_level", draws_too_often)
    assert smol_spec.tokens(smol_prompts[:4], params) != smol_pair.plain.tokens(smol_prompts[:4], params)


def test_margin_rule_promotes_and_counts(smol_spec: Engine, smol_prompts: list[list[int]], greedy: list[Any]) -> None:
    """Lower kappa, more promotions and longer acceptance; requests with their own kappa share a batch."""
    from dataclasses import replace

    smol_spec.runner.adaptivespec = replace(smol_spec.runner.adaptivespec, margin_threshold_floor=0.05)
    params = [
        sampling(48, ignore_eos=False, extra_args={"adaptivespec_margin_threshold": k}) for k in (1.0, 0.3, 0.05) * 4
    ]
    stats = smol_spec.runner.stats
    promoted = stats.promoted
    # vLLM checked the arguments against the server's floor when the engine started; here only the runner's counts.
    smol_spec.llm.llm_engine.input_processor.validate_logits_processors_params = lambda params: None
    outputs = smol_spec.tokens(smol_prompts[:12], params)
    assert stats.promoted > promoted
    expected = [list(o.outputs[0].token_ids)[:48] for o in greedy[:12]]
    exact = [output == reference for output, reference in zip(outputs, expected, strict=True)]
    assert all(exact[0::3])
    assert not all(exact[2::3])


def test_speculation_switched_off_per_request(
    smol_spec: Engine, smol_prompts: list[list[int]], greedy: list[Any]
) -> None:
    stats = smol_spec.runner.stats
    before = stats.verifications
    off = sampling(24, ignore_eos=False, extra_args={"adaptivespec_enabled": "false"})
    assert smol_spec.tokens(smol_prompts[:2], off) == [list(o.outputs[0].token_ids)[:24] for o in greedy[:2]]
    assert stats.verifications == before


@pytest.mark.parametrize(
    "extra_args",
    [
        {"adaptivespec_margin_threshold": 0.5},  # below the floor
        {"adaptivespec_margin_threshold": "x"},
        {"adaptivespec_kappa": 0.5},
        {"adaptivespec_enabled": "maybe"},
    ],
)
def test_bad_request_arguments_are_refused(
    smol_pair: Pair, smol_prompts: list[list[int]], extra_args: dict[str, Any]
) -> None:
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match="adaptivespec_"):
        smol_pair.spec.tokens(smol_prompts[:1], sampling(4, extra_args=extra_args))
    assert len(smol_pair.spec.tokens(smol_prompts[:1], sampling(4))[0]) == 4  # and nobody else is hurt
