"""Turns and records that no engine was started for."""

import sys

import pytest

from vllm_adaptivespec.cli import engines, methods
from vllm_adaptivespec.cli.engines import Run

# Speaks the protocol without vLLM: the prompts' lengths, max_tokens and a setting are its "tokens".
STAND_IN = """
import json, os, sys
requests, replies = os.fdopen(int(sys.argv[1])), os.fdopen(int(sys.argv[2]), "w")
first = json.loads(requests.readline())
print("what vLLM logs", flush=True)
if first["speculative_config"] == {"method": "broken"}:
    sys.exit("no such method")
print(json.dumps({"seconds": 0.5, "peak_rss_mib": 10.0}), file=replies, flush=True)
for line in requests:
    request = json.loads(line)
    if "stats" in request:
        print("{}", file=replies, flush=True)
        continue
    if request["prompts"] == ["die"]:
        sys.exit("out of memory")
    bound = int(os.environ["VLLM_CPU_OMP_THREADS_BIND"] != "")
    token_ids = [[len(text), request["max_tokens"], bound] for text in request["prompts"]]
    counters = {"drafts": 10, "drafted": 30, "accepted": 7} if first["speculative_config"] else {}
    answer = {"seconds": 0.1, "token_ids": token_ids, "counters": counters, "peak_rss_mib": 11.0}
    if "arrivals" in request:
        answer["times"] = [[arrival, arrival + 0.25, arrival + 1.0] for arrival in request["arrivals"]]
        answer["seconds"] = answer["times"][-1][2]
    print(json.dumps(answer), file=replies, flush=True)
"""


@pytest.fixture
def stand_in(monkeypatch):
    """Engines are processes as always, but without vLLM in them."""
    monkeypatch.setattr(engines, "WORKER", (sys.executable, "-c", STAND_IN))
    monkeypatch.setattr(engines, "SETTLE_SECONDS", 0)


@pytest.fixture
def make_run():
    """A turn of one prompt (unless `token_ids` says otherwise) that took `seconds`."""

    def make(engine, seconds, token_ids=None, **values):
        defaults = {"source": "chat", "batch": 1, "round": 0, "group": 0, "counters": {}, "peak_rss_mib": 100.0}
        return Run(engine=engine, seconds=seconds, token_ids=token_ids or [[1, 2, 3, 4]], **(defaults | values))

    return make


@pytest.fixture
def four_specs(tmp_path):
    """The demo's engines."""
    return [
        methods.no_speculation(),
        methods.stock_eagle3(tmp_path, 3),
        methods.adaptivespec(tmp_path),
        methods.adaptivespec(tmp_path, 0.3),
    ]
