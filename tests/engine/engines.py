"""Helpers around in-process vLLM engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm_adaptivespec.core.policy import StaticPolicy, TreePolicy, TreeShape

PARTS = ("drafter", "rejection_sampler", "speculator", "model_state")
"""Of the model runners, whichever has them."""
SETTINGS = ("policy", "adaptivespec")
KEPT: list[Engine] = []
"""Every engine of this process: one that is collected takes the process groups of all others with it."""


@dataclass
class Engine:
    """One ``vllm.LLM`` and what tests look at inside it."""

    llm: Any
    last_hit: int = 0
    """Tokens the last looked-at request found in the prefix cache."""

    @property
    def runner(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner

    @property
    def scheduler(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def generate(self, prompts: Sequence[Sequence[int]], params: Any) -> list[Any]:
        """One output per prompt of token ids; ``params`` is one SamplingParams or a list of them."""
        requests = [{"prompt_token_ids": list(p)} for p in prompts]
        return self.llm.generate(requests, params, use_tqdm=False)

    def tokens(self, prompts: Sequence[Sequence[int]], params: Any) -> list[list[int]]:
        return [list(o.outputs[0].token_ids) for o in self.generate(prompts, params)]

    def reset_cache(self) -> None:
        assert self.llm.reset_prefix_cache()

    @property
    def free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    def leaks(self) -> dict[str, int]:
        """What the plugin holds for requests, once the runner has heard that the last ones finished."""
        self.tokens([[1, 2, 3]], sampling(max_tokens=1))  # finished ids reach the worker with the next step
        held = self.llm.collective_rpc("adaptivespec_leaks")[0]
        return {"requests": held["requests"] - 1, "branch_blocks": held["branch_blocks"]}

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Put back the classes of the runner and of its parts, and its own settings, after a test."""
        runner = self.runner
        parts = [runner, *(getattr(runner, name, None) for name in PARTS)]
        classes = [(part, type(part)) for part in parts if part is not None]
        kept = {name: getattr(runner, name) for name in SETTINGS if hasattr(runner, name)}
        processor = self.llm.llm_engine.input_processor
        validate = processor.validate_logits_processors_params
        try:
            yield
        finally:
            processor.validate_logits_processors_params = validate
            for part, original in classes:
                part.__class__ = original
            for name, value in kept.items():
                setattr(runner, name, value)
            self.reset_cache()

    @contextmanager
    def lossy_down_to(self, floor: float) -> Iterator[None]:
        """Let requests ask for a kappa down to ``floor``, in the front end and in the runner."""
        processor = self.llm.llm_engine.input_processor
        owner = self.runner if hasattr(self.runner, "speculation") else self.runner.model_state.settings
        name = "adaptivespec" if owner is self.runner else "config"
        validate, config = processor.validate_logits_processors_params, getattr(owner, name)
        processor.validate_logits_processors_params = lambda params: None
        setattr(owner, name, replace(config, margin_threshold_floor=floor))
        try:
            yield
        finally:
            processor.validate_logits_processors_params = validate
            setattr(owner, name, config)


@dataclass
class Pair:
    """The same target without and with speculation."""

    plain: Engine
    spec: Engine


def start(spec: dict[str, Any] | None, **kwargs: Any) -> Engine:
    """A float32 eager engine; ``spec`` holds the plugin's configuration or is None."""
    from vllm import LLM

    if spec is not None:
        spec = {"method": "adaptivespec", **spec}
    engine = Engine(
        LLM(
            dtype="float32",
            enforce_eager=True,
            distributed_executor_backend="uni",
            speculative_config=spec,
            enable_prefix_caching=True,
            disable_log_stats=False,
            seed=0,
            **kwargs,
        )
    )
    KEPT.append(engine)
    return engine


def start_tiny(model: Path, head: Path | None, num_blocks: int, **spec: Any) -> Engine:
    """A tiny model on few and small blocks, so that boundaries, sharing and preemption come often."""
    return start(
        None if head is None else {"model": str(head), "num_speculative_tokens": 8, **spec},
        model=str(model),
        skip_tokenizer_init=True,
        max_model_len=256,
        max_num_seqs=6,
        max_num_batched_tokens=64,
        block_size=32,
        num_gpu_blocks_override=num_blocks,
    )


def sampling(max_tokens: int, **kwargs: Any) -> Any:
    """Greedy unless told otherwise, and without a tokenizer."""
    from vllm import SamplingParams

    kwargs = {"temperature": 0.0, "ignore_eos": True, "detokenize": False, **kwargs}
    return SamplingParams(max_tokens=max_tokens, **kwargs)


def static(depth: int, width: int, nodes: int) -> TreePolicy:
    return StaticPolicy(TreeShape(depth, width, nodes))
