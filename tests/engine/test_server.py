"""``vllm serve`` with the plugin: streaming, per-request options, HTTP 400 for bad ones, metrics, one bad start."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from vllm_adaptivespec.cli.models import demo_head, demo_target

pytestmark = pytest.mark.engine

ENVIRONMENT = {
    **os.environ,
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
# The server runs as users run it, with an engine process and a worker process of its own.
ENVIRONMENT.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)


def command(port: int, spec: dict[str, Any]) -> list[str]:
    return [
        str(Path(sys.executable).parent / "vllm"),
        "serve",
        str(demo_target()),
        *("--port", str(port), "--served-model-name", "demo", "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", "512", "--max-num-seqs", "4", "--kv-cache-memory-bytes", str(512 << 20)),
        *("--speculative-config", json.dumps({"method": "adaptivespec", "model": str(demo_head()), **spec})),
    ]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    port = free_port()
    log = tmp_path_factory.mktemp("server") / "log"
    spec = {"num_speculative_tokens": 8, "margin_threshold_floor": 0.3}
    with log.open("w") as out:
        process = subprocess.Popen(
            command(port, spec), env=ENVIRONMENT, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(400):
            if process.poll() is not None:
                pytest.fail(f"the server ended:\n{log.read_text()[-3000:]}")
            try:
                if requests.get(f"{url}/health", timeout=2).ok:
                    break
            except requests.ConnectionError:
                time.sleep(1)
        else:
            pytest.fail(f"the server did not start:\n{log.read_text()[-3000:]}")
        yield url, log
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


def complete(url: str, **body: Any) -> requests.Response:
    request = {"model": "demo", "prompt": "The capital of France is", "max_tokens": 24, "temperature": 0, **body}
    return requests.post(f"{url}/v1/completions", json=request, timeout=120)


def test_streaming_equals_not_streaming_equals_not_speculated(server: tuple[str, Path]) -> None:
    url, _ = server
    text = complete(url).json()["choices"][0]["text"]
    streamed = ""
    for line in complete(url, stream=True).text.splitlines():
        if line.startswith("data: {"):
            streamed += json.loads(line[6:])["choices"][0]["text"]
    off = complete(url, vllm_xargs={"adaptivespec_enabled": "false"}).json()["choices"][0]["text"]
    assert text == streamed == off != ""


@pytest.mark.parametrize(
    ("xargs", "says"),
    [
        ({"adaptivespec_margin_threshold": 0.1}, "from 0.3"),
        ({"adaptivespec_margin_threshold": "high"}, "near-lossless"),
        ({"adaptivespec_enabled": "perhaps"}, "true or false"),
        ({"adaptivespec_treesize": 3}, "adaptivespec_margin_threshold"),
    ],
)
def test_bad_options_are_a_400_that_says_what_is_allowed(
    server: tuple[str, Path], xargs: dict[str, Any], says: str
) -> None:
    url, _ = server
    response = complete(url, vllm_xargs=xargs)
    assert response.status_code == 400
    assert next(iter(xargs)) in response.text
    assert says in response.text
    assert complete(url).ok


def test_per_request_kappa_and_metrics(server: tuple[str, Path]) -> None:
    url, _ = server
    assert complete(url, vllm_xargs={"adaptivespec_margin_threshold": "0.3"}).ok
    metrics = requests.get(f"{url}/metrics", timeout=10).text
    values = {
        line.split("{")[0]: float(line.rsplit(" ", 1)[1])
        for line in metrics.splitlines()
        if line.startswith("vllm:spec_decode_num_") and "per_pos" not in line and "_created" not in line
    }
    drafts, accepted = values["vllm:spec_decode_num_drafts_total"], values["vllm:spec_decode_num_accepted_tokens_total"]
    assert drafts > 0
    assert 0 < accepted <= values["vllm:spec_decode_num_draft_tokens_total"]


def test_start_up_line_says_what_is_in_force(server: tuple[str, Path]) -> None:
    _, log = server
    assert "AdaptiveSpec is on: lossless, but requests may go down to 0.3" in log.read_text()


def test_impossible_configuration_stops_the_start_with_a_sentence() -> None:
    result = subprocess.run(
        command(free_port(), {"num_speculative_tokens": 8, "margin_threshold": 1.5}),
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode != 0
    assert "margin_threshold=1.5 is not allowed" in result.stdout + result.stderr
