#!/usr/bin/env python3
"""AdaptiveSpec in a script, on the demo's models (after `make env`): .venv/bin/python examples/offline.py.

Three requests in one batch, each with a margin of its own. Another model and head: put their folders below.
"""

import os

from vllm_adaptivespec.cli.engines import native_dtype
from vllm_adaptivespec.cli.models import demo_head, demo_target

# vLLM's CPU worker leaves one core idle by default; both of two cores make a difference.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(str(core) for core in sorted(os.sched_getaffinity(0))))
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

QUESTION = "Explain in a few sentences why the sky is blue."

# What to ask for: the default of the engine below, an own margin, no speculation at all.
REQUESTS = {
    "lossless, the engine's default": None,
    "margin rule, preset balanced": {"adaptivespec_margin_threshold": "balanced"},
    "not speculated": {"adaptivespec_enabled": False},
}


def main() -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(demo_target()),
        dtype=native_dtype(),
        max_model_len=2048,
        max_num_seqs=4,
        kv_cache_memory_bytes=512 << 20,
        enforce_eager=True,  # starts in half a minute; leave it out for speed
        speculative_config={
            "method": "adaptivespec",
            "model": str(demo_head()),
            "num_speculative_tokens": 8,
            # Requests may lower their margin to this; without it the engine's own (1.0, lossless) is the floor.
            "margin_threshold_floor": 0.3,
        },
    )
    answers = llm.chat(
        [[{"role": "user", "content": QUESTION}]] * len(REQUESTS),
        [SamplingParams(temperature=0.0, max_tokens=96, extra_args=extra) for extra in REQUESTS.values()],
    )
    for name, answer in zip(REQUESTS, answers, strict=True):
        print(f"\n== {name}: {len(answer.outputs[0].token_ids)} tokens\n{answer.outputs[0].text.strip()}")


if __name__ == "__main__":
    main()
