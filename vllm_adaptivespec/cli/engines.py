"""Engines side by side, taking turns on the same prompts, so that ratios come from one run.

Absolute speed drifts on a shared machine; the ratio of two engines that alternate prompt by prompt does not. Each
engine is one process (no engine core or worker processes beside it: those cost 8 ms a step on two cores), holds its
model for the whole run and waits on a pipe, idle, while it is another one's turn.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .models import cache_dir
from .prompts import Prompt

# -P: the folder a user happens to stand in is not a place to import from.
WORKER = (sys.executable, "-P", "-m", "vllm_adaptivespec.cli.engine_worker")
LOG_LINES_SHOWN = 40
# An OpenMP runtime spins before it sleeps (libiomp 200 ms): the next engine gets its cores undisturbed.
SETTLE_SECONDS = 0.25


class EngineError(RuntimeError):
    """An engine process ended; carries the end of its log."""


@dataclass(frozen=True)
class EngineSpec:
    """What to start: a name for file names and tables, a label for people, vLLM's speculative_config (or none)."""

    name: str
    label: str
    speculative_config: dict[str, Any] | None = None


def native_dtype(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """`bfloat16` where the CPU multiplies in it, else `float32`.

    Without such instructions bfloat16 matrices are multiplied several times slower than float32's and every row of a
    verification costs as much as the first one, so that no kind of speculation could win.
    """
    flags = set()
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith(("flags", "Features")):  # x86, Arm
                flags = set(line.partition(":")[2].split())
                break
    return "bfloat16" if flags & {"avx512_bf16", "amx_bf16", "bf16"} else "float32"


@dataclass(frozen=True)
class EngineSettings:
    """What all engines of a run have in common."""

    model: Path
    eager: bool = False
    dtype: str = "bfloat16"
    max_model_len: int = 2048
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 512  # every engine start runs that many, and longer prompts go in chunks
    kv_cache_mib: int = 512
    block_size: int | None = None  # None: vLLM's own choice
    threads: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    preload: Path | None = None

    def options(self) -> dict[str, Any]:
        """Arguments of `vllm.LLM`."""
        options = {
            "dtype": self.dtype,
            "enforce_eager": self.eager,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            # By default each engine would take most of the memory there is.
            "kv_cache_memory_bytes": self.kv_cache_mib << 20,
            "distributed_executor_backend": "uni",
            "seed": 0,
        }
        return options if self.block_size is None else {**options, "block_size": self.block_size}

    def environment(self, name: str) -> dict[str, str]:
        """Environment of an engine process.

        The compile cache is per engine: engines with different drafts have been seen to trip over one another's.
        vLLM's ahead-of-time artifacts do not load again on CPUs ("'function' object has no attribute
        'finalize_loading'") and compile anew each time; without them inductor's own cache serves the second start.
        """
        cache = cache_dir() / "vllm" / name
        cores = sorted(os.sched_getaffinity(0))[: self.threads]
        environment = {
            **os.environ,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in cores),  # by default one core stays unused
            "VLLM_CACHE_ROOT": str(cache),
            "VLLM_USE_AOT_COMPILE": "0",
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        environment.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would override kv_cache_memory_bytes
        if self.preload is not None:
            environment["LD_PRELOAD"] = str(self.preload)
        return environment


def intel_openmp() -> Path:
    """The OpenMP runtime that vLLM advises for x86 (it comes with vllm-cpu); for `EngineSettings.preload`."""
    library = Path(sys.prefix) / "lib" / "libiomp5.so"
    if not library.exists():
        raise FileNotFoundError(f"Intel OpenMP is not installed: no {library}")
    return library


@dataclass(frozen=True)
class Run:
    """One engine's turn on one group of prompts."""

    engine: str
    source: str
    batch: int
    round: int
    group: int
    seconds: float
    token_ids: list[list[int]]
    counters: dict[str, int]
    peak_rss_mib: float

    @property
    def tokens(self) -> int:
        """Tokens generated, over all prompts of the group."""
        return sum(len(ids) for ids in self.token_ids)


class Engine:
    """A running engine process; use it as a context manager."""

    def __init__(self, spec: EngineSpec, settings: EngineSettings, log_dir: Path) -> None:
        self.spec = spec
        self.log = log_dir / f"{spec.name}.log"
        log_dir.mkdir(parents=True, exist_ok=True)
        requests_in, requests_out = os.pipe()
        replies_in, replies_out = os.pipe()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*WORKER, str(requests_in), str(replies_out)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=settings.environment(spec.name),
                pass_fds=(requests_in, replies_out),
            )
        os.close(requests_in)
        os.close(replies_out)
        self._requests = os.fdopen(requests_out, "w", buffering=1)
        self._replies = os.fdopen(replies_in)
        started = self._ask(
            {
                "model": str(settings.model),
                "speculative_config": spec.speculative_config,
                "options": settings.options(),
            }
        )
        self.start_seconds: float = started["seconds"]
        self.start_rss_mib: float = started["peak_rss_mib"]

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send one line, wait for one line; EngineError with the end of the log if the process is gone."""
        try:
            print(json.dumps(request), file=self._requests, flush=True)
            line = self._replies.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            status = self.process.wait()
            tail = self.log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
            raise EngineError(
                f"engine '{self.spec.label}' ended with status {status}; the end of {self.log}:\n" + "\n".join(tail)
            )
        return json.loads(line)

    def generate(self, prompts: Sequence[str], max_tokens: int, ignore_eos: bool = False) -> dict[str, Any]:
        """Generate for these prompts at once; see `engine_worker.MeasuredEngine.run`."""
        return self._ask({"prompts": list(prompts), "max_tokens": max_tokens, "ignore_eos": ignore_eos})

    def serve(
        self, prompts: Sequence[str], max_tokens: int, arrivals: Sequence[float], limit: int | None = None
    ) -> dict[str, Any]:
        """Serve prompts that arrive over time, at most `limit` at once; see `engine_worker.MeasuredEngine.serve`."""
        return self._ask(
            {"prompts": list(prompts), "max_tokens": max_tokens, "arrivals": list(arrivals), "limit": limit}
        )

    def stats(self) -> dict[str, Any]:
        """What AdaptiveSpec's worker counted and learned since the start; empty for other engines."""
        return self._ask({"stats": True})

    def close(self) -> None:
        """End the process: it stops at the end of its requests."""
        with contextlib.suppress(BrokenPipeError):
            self._requests.close()
        self._replies.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def running(
    specs: Sequence[EngineSpec],
    settings: EngineSettings,
    log_dir: Path,
    announce: Callable[[EngineSpec, float | None], None] = lambda spec, seconds: None,
) -> Iterator[list[Engine]]:
    """Start engines one after the other (each compiles on all cores); `announce` is told before and after each."""
    with contextlib.ExitStack() as stack:
        engines = []
        for spec in specs:
            announce(spec, None)
            engine = stack.enter_context(Engine(spec, settings, log_dir))
            announce(spec, engine.start_seconds)
            engines.append(engine)
        yield engines


def groups_of(prompts: Sequence[Prompt], batch: int) -> list[list[Prompt]]:
    """Cut prompts into full groups of `batch`; a last, smaller one would be another measurement: left out."""
    groups = [list(prompts[start : start + batch]) for start in range(0, len(prompts) - batch + 1, batch)]
    if not groups:
        raise ValueError(f"{len(prompts)} prompts do not fill one batch of {batch}")
    return groups


def turn_order(engines: Sequence[Engine], turn: int) -> list[Engine]:
    """Round robin whose first engine changes every turn, so that none always follows the same other one."""
    shift = turn % len(engines)
    return [*engines[shift:], *engines[:shift]]


def alternate(
    engines: Sequence[Engine],
    prompts: Sequence[Prompt],
    *,
    source: str,
    batch: int,
    rounds: int,
    max_tokens: int,
    ignore_eos: bool = False,
) -> Iterable[Run]:
    """Yield the turns of all engines on all groups of prompts, `rounds` times over.

    Every engine first runs the first group for a few tokens, unrecorded: the first call of a shape compiles or warms
    up something in every engine.
    """
    groups = groups_of(prompts, batch)
    for engine in engines:
        engine.generate([prompt.text for prompt in groups[0]], max_tokens=16)
    for round_ in range(rounds):
        for index, group in enumerate(groups):
            for engine in turn_order(engines, round_ + index):
                time.sleep(SETTLE_SECONDS)
                answer = engine.generate([prompt.text for prompt in group], max_tokens, ignore_eos)
                yield Run(engine.spec.name, source, batch, round_, index, **answer)


def describe(engine: Engine) -> dict[str, Any]:
    """An engine's entry in the record of a run."""
    return {**asdict(engine.spec), "start_seconds": round(engine.start_seconds, 1)}
