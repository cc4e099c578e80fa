"""What needs a tokenizer: structured output, stop strings."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.engine.engines import Engine, Pair

pytestmark = pytest.mark.engine

QUESTION = [{"role": "user", "content": "Describe a dog as JSON with name and age."}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 20}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def chat(engine: Engine, params: Any) -> list[Any]:
    return engine.llm.chat([QUESTION] * len(params), params, use_tqdm=False)


def test_structured_output_is_valid_and_the_targets(smol_pair: Pair, smol_spec: Engine) -> None:
    """Chains only, beside a request with trees; lossy requests stay within the grammar too."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    params = [
        SamplingParams(temperature=0, max_tokens=48, structured_outputs=StructuredOutputsParams(json=SCHEMA)),
        SamplingParams(temperature=0, max_tokens=48),
    ]
    stats = smol_spec.runner.stats
    before = stats.chains, stats.verifications
    outputs = chat(smol_spec, params)
    chains, verified = stats.chains - before[0], stats.verifications - before[1]
    assert 0 < chains < verified
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in chat(smol_pair.plain, params)]
    assert set(json.loads(outputs[0].outputs[0].text)) == {"name", "age"}


def test_stop_string_inside_an_accepted_path(smol_pair: Pair, smol_spec: Engine) -> None:
    from vllm import SamplingParams

    free = chat(smol_pair.plain, [SamplingParams(temperature=0, max_tokens=48)])[0].outputs[0].text
    stop = free[40:46]
    params = [SamplingParams(temperature=0, max_tokens=48, stop=[stop])]
    ours, plain = chat(smol_spec, params)[0].outputs[0], chat(smol_pair.plain, params)[0].outputs[0]
    assert ours.text == plain.text == free[: free.index(stop)]
    assert ours.finish_reason == plain.finish_reason == "stop"
