"""What a request allows, decided when it arrives."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams, StructuredOutputsParams

from vllm_adaptivespec.config import AdaptiveSpecConfig
from vllm_adaptivespec.runner_v2.requests import SlotSettings

SLOTS = 4


def settings(chains_only: bool = False, **config: Any) -> SlotSettings:
    config = {"num_speculative_tokens": 8, "margin_threshold": 0.5, **config}
    return SlotSettings(AdaptiveSpecConfig.from_dict(config), SLOTS, 199, chains_only, torch.device("cpu"))


def added(made: SlotSettings, slot: int = 2, prompt_len: int = 10, **params: Any) -> dict[str, Any]:
    made.add(slot, SamplingParams(**params), prompt_len)
    made.apply()
    names = ("log_kappas", "max_promotions", "widths", "last_positions")
    return {name: getattr(made, name)[slot].item() for name in names}


@pytest.mark.parametrize(
    ("params", "width"),
    [
        ({}, 8),
        ({"temperature": 0.7, "top_k": 5, "min_tokens": 3, "logit_bias": {5: 1.0}}, 8),
        ({"presence_penalty": 0.1}, 1),
        ({"frequency_penalty": 0.1}, 1),
        ({"repetition_penalty": 1.1}, 1),
        ({"bad_words": ["no"]}, 1),
        ({"thinking_token_budget": 10}, 1),
        ({"structured_outputs": StructuredOutputsParams(choice=["a", "b"])}, 1),
        ({"extra_args": {"adaptivespec_enabled": False}}, 0),
        ({"repetition_penalty": 1.1, "extra_args": {"adaptivespec_enabled": False}}, 0),
    ],
    ids=str,
)
def test_trees_chains_or_nothing(params: dict[str, Any], width: int) -> None:
    assert added(settings(), **params)["widths"] == width
    assert added(settings(chains_only=True), **params)["widths"] == min(width, 1)


def test_kappa() -> None:
    assert added(settings())["log_kappas"] == pytest.approx(math.log(0.5))
    assert added(settings(), extra_args={"adaptivespec_margin_threshold": 1.0})["log_kappas"] == 0.0
    assert added(settings(margin_threshold=1.0))["log_kappas"] == 0.0
    assert added(settings())["max_promotions"] == -1
    assert added(settings(max_promotions_per_step=2))["max_promotions"] == 2


@pytest.mark.parametrize(("max_tokens", "last"), [(1, 9), (2, 10), (50, 58), (1000, 199), (None, 199)])
def test_last_position_worth_drafting_from(max_tokens: int | None, last: int) -> None:
    """With one token to go, the step that emits it has nothing to verify."""
    assert added(settings(), prompt_len=10, max_tokens=max_tokens)["last_positions"] == last


def test_stop_ids_of_any_number() -> None:
    made = settings()
    few, many = [7, 3], list(range(100, 120))
    added(made, slot=1, stop_token_ids=few)
    first = made.protected
    added(made, slot=3, stop_token_ids=many)
    assert made.protected[1].tolist()[:2] == sorted(few)
    assert (made.protected[1, 2:] == -1).all()
    assert made.protected[3].tolist()[: len(many)] == many
    assert (made.protected[[0, 2]] <= 0).all()
    assert first.shape[1] < made.protected.shape[1]
    # A later request in the slot has its own.
    added(made, slot=3)
    assert (made.protected[3] == -1).all()


def test_other_tensors_stay_where_they_are() -> None:
    """Captured graphs read them."""
    made = settings()
    names = ("log_kappas", "max_promotions", "widths", "last_positions")
    before = [getattr(made, name).data_ptr() for name in names]
    for slot in range(SLOTS):
        added(made, slot=slot, stop_token_ids=list(range(40)))
    assert [getattr(made, name).data_ptr() for name in names] == before
