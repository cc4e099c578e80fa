"""The harness: processes and pipes with a stand-in for the worker, and the order of turns."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_adaptivespec.cli import engine_worker, engines
from vllm_adaptivespec.cli.engines import (
    Engine,
    EngineError,
    EngineSettings,
    EngineSpec,
    alternate,
    groups_of,
    native_dtype,
    running,
)
from vllm_adaptivespec.cli.prompts import Prompt

pytestmark = pytest.mark.usefixtures("stand_in")


@pytest.fixture
def settings():
    return EngineSettings(Path("some-model"), threads=1)


def test_an_engine_answers_and_ends(settings, tmp_path):
    with Engine(EngineSpec("none", "no speculation"), settings, tmp_path) as engine:
        assert engine.start_seconds == 0.5
        answer = engine.generate(["four", "seven.."], max_tokens=5)
        assert answer["token_ids"] == [[4, 5, 1], [7, 5, 1]]
        assert engine.process.poll() is None
    assert engine.process.returncode == 0
    assert (tmp_path / "none.log").read_text() == "what vLLM logs\n"


def test_an_engine_that_does_not_start_shows_its_log(settings, tmp_path):
    with pytest.raises(EngineError, match=r"(?s)engine 'Broken' ended with status 1.*no such method"):
        Engine(EngineSpec("broken", "Broken", {"method": "broken"}), settings, tmp_path)


def test_an_engine_that_dies_shows_its_log(settings, tmp_path):
    with Engine(EngineSpec("none", "n"), settings, tmp_path) as engine:
        with pytest.raises(EngineError, match="out of memory"):
            engine.generate(["die"], max_tokens=5)
        with pytest.raises(EngineError, match="out of memory"):
            engine.generate(["again"], max_tokens=5)


def test_no_engine_outlives_a_failed_start(settings, tmp_path):
    started = []
    specs = [EngineSpec("fine", "Fine"), EngineSpec("broken", "Broken", {"method": "broken"})]
    real = engines.subprocess.Popen

    class Remembering(real):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            started.append(self)

    engines.subprocess.Popen = Remembering
    try:
        with pytest.raises(EngineError), running(specs, settings, tmp_path):
            pytest.fail("must not get here")
    finally:
        engines.subprocess.Popen = real
    assert len(started) == 2
    assert all(process.poll() is not None for process in started)


def test_engines_take_turns_on_every_group(settings, tmp_path):
    specs = [EngineSpec(name, name) for name in "abc"]
    prompts = [Prompt("chat", "x" * length) for length in (1, 2, 3, 4, 5)]
    told = []
    with running(specs, settings, tmp_path, lambda spec, seconds: told.append((spec.name, seconds))) as started:
        runs = list(alternate(started, prompts, source="chat", batch=2, rounds=2, max_tokens=7))
    assert told == [(name, seconds) for name in "abc" for seconds in (None, 0.5)]
    assert [(run.round, run.group, run.engine) for run in runs] == [
        *((0, 0, name) for name in "abc"),
        *((0, 1, name) for name in "bca"),
        *((1, 0, name) for name in "bca"),
        *((1, 1, name) for name in "cab"),
    ]
    for run in runs:
        assert run.token_ids == [[2 * run.group + 1, 7, 1], [2 * run.group + 2, 7, 1]], "the fifth prompt is left out"
        assert run.tokens == 6


def test_too_few_prompts_for_a_batch_are_an_error():
    with pytest.raises(ValueError, match="3 prompts do not fill one batch of 4"):
        groups_of([Prompt("chat", "x")] * 3, 4)


@pytest.mark.parametrize(
    ("cpuinfo", "dtype"),
    [
        ("model name : x\nflags\t\t: fpu avx2 avx512f avx512_bf16\n", "bfloat16"),
        ("flags : fpu avx2 amx_bf16\n", "bfloat16"),
        ("Features : fp asimd bf16\n", "bfloat16"),
        ("flags : fpu avx2 avx512f\nflags : fpu avx2 avx512f\n", "float32"),
        ("bugs : none\n", "float32"),
    ],
)
def test_native_dtype(tmp_path, cpuinfo, dtype):
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    assert native_dtype(tmp_path / "cpuinfo") == dtype
    assert native_dtype(tmp_path / "none") == "float32"


def test_environment_of_an_engine(settings, monkeypatch, tmp_path):
    monkeypatch.setenv("ADAPTIVESPEC_CACHE", str(tmp_path))
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "40")
    environment = settings.environment("stock-k3")
    assert environment["VLLM_CACHE_ROOT"] == str(tmp_path / "vllm" / "stock-k3")
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == str(min(os.sched_getaffinity(0)))
    assert environment["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert "VLLM_CPU_KVCACHE_SPACE" not in environment, "it would override the engines' own small cache"
    assert settings.options()["kv_cache_memory_bytes"] == 512 * 2**20
    assert settings.options()["distributed_executor_backend"] == "uni"


class FakeEngine:
    """Stands for `MeasuredEngine` in the worker's loop."""

    def __init__(self, model, speculative_config, options):
        self.model = model

    def run(self, prompts, max_tokens, ignore_eos):
        return {"heard": [self.model, prompts, max_tokens, ignore_eos]}

    def serve(self, prompts, max_tokens, arrivals, limit):
        return {"served": [prompts, max_tokens, arrivals, limit]}


def test_worker_speaks_the_protocol(monkeypatch):
    monkeypatch.setattr(engine_worker, "MeasuredEngine", FakeEngine)
    lines = [
        {"model": "m", "speculative_config": None, "options": {}},
        {"prompts": ["p"], "max_tokens": 3, "ignore_eos": False},
        {"prompts": ["p", "q"], "max_tokens": 3, "arrivals": [0.0, 0.5], "limit": None},
    ]
    requests = iter([json.dumps(line) + "\n" for line in lines] + [""])
    answers = []
    engine_worker.serve(lambda: next(requests), answers.append)
    assert set(answers[0]) == {"seconds", "peak_rss_mib"}
    assert answers[1:] == [{"heard": ["m", ["p"], 3, False]}, {"served": [["p", "q"], 3, [0.0, 0.5], None]}]


class FakeLLMEngine:
    """Each step takes a second of its own clock and brings every request one of `tokens` tokens."""

    def __init__(self, tokens):
        self.now, self.tokens, self.left, self.first, self.at_once = 100.0, tokens, {}, {}, []

    def submit(self, index):
        self.left[index] = self.tokens

    def sleep(self, seconds):
        assert not self.left, "an engine with requests is stepped"
        self.now += seconds

    def step(self):
        self.at_once.append(len(self.left))
        self.now += 1.0
        outputs = []
        for index in list(self.left):
            self.left[index] -= 1
            self.first.setdefault(index, self.now)
            finished = self.left[index] == 0
            metrics = SimpleNamespace(first_token_ts=self.first[index])
            outputs.append(SimpleNamespace(request_id=str(index), finished=finished, metrics=metrics))
            if finished:
                del self.left[index]
        return outputs


def driven(arrivals, limit, tokens=2):
    fake = FakeLLMEngine(tokens)
    outputs, times = engine_worker.drive(fake, fake.submit, arrivals, limit, lambda: fake.now, fake.sleep)
    assert sorted(outputs) == list(range(len(arrivals)))
    return fake, times


def test_a_closed_loop_keeps_as_many_requests_going_as_it_may():
    fake, times = driven([0.0] * 4, limit=2)
    assert fake.at_once == [2, 2, 2, 2]
    assert times == [[0, 1, 2], [0, 1, 2], [2, 3, 4], [2, 3, 4]]


def test_an_open_loop_waits_for_arrivals_and_not_for_answers():
    fake, times = driven([0.5, 1.0, 9.0], limit=None)
    assert fake.at_once == [1, 2, 1, 1, 1], "the second one arrives in the first one's first step"
    assert times == [[0.5, 1.5, 2.5], [1.5, 2.5, 3.5], [9.0, 10.0, 11.0]]


def test_counters_are_differences():
    assert engine_worker.difference({"drafts": 3}, {"drafts": 10, "accepted": 4}) == {"drafts": 7, "accepted": 4}


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from /proc")
def test_peak_memory_follows_an_allocation_and_forgets_it():
    engine_worker.restart_peak_rss()
    before = engine_worker.peak_rss_mib()
    block = bytearray(64 << 20)
    block[::4096] = b"x" * len(block[::4096])
    after = engine_worker.peak_rss_mib()
    assert after >= before + 60
    del block
    engine_worker.restart_peak_rss()
    assert engine_worker.peak_rss_mib() < after - 30
