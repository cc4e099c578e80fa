"""The demo's models in one vLLM engine inside this process, for measurements that look into its runner."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from vllm_adaptivespec.cli.models import demo_head, demo_target
from vllm_adaptivespec.cli.prompts import SOURCES, load_prompts
from vllm_adaptivespec.cli.record import git_revision, machine, portable, versions


def start(*, dtype: str, batch: int, eager: bool, kv_cache_bytes: int = 1 << 30, **speculative: Any) -> Any:
    """An ``LLM`` on all cores; ``speculative`` goes into our part of its speculative_config."""
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", cores)
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR", HF_HUB_OFFLINE="1")
    os.environ.update(VLLM_NO_USAGE_STATS="1", VLLM_USE_AOT_COMPILE="0")
    from vllm import LLM

    return LLM(
        model=str(demo_target()),
        dtype=dtype,
        max_model_len=1024,
        max_num_seqs=batch,
        max_num_batched_tokens=1024,
        kv_cache_memory_bytes=kv_cache_bytes,
        enforce_eager=eager,
        distributed_executor_backend="uni",
        speculative_config={"method": "adaptivespec", "model": str(demo_head()), **speculative},
    )


def runner_of(llm: Any) -> Any:
    """The engine's model runner."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def prompt_ids(llm: Any, count: int) -> list[list[int]]:
    """``count`` prompts of each kind as token ids, one user turn each."""
    tokenizer = llm.get_tokenizer()
    return [
        list(
            tokenizer.apply_chat_template(
                [{"role": "user", "content": p.text}], add_generation_prompt=True, return_dict=False
            )
        )
        for source in SOURCES
        for p in load_prompts(source, count)
    ]


def header(script: str, options: argparse.Namespace) -> dict[str, Any]:
    """What a result's JSON says of how and where it was made."""
    return {
        "command": portable([f"bench/{script}", *sys.argv[1:]]),
        "git": git_revision(),
        "versions": versions(),
        "machine": machine(),
        "options": {k: v for k, v in vars(options).items() if k != "out"},
    }
