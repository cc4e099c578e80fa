"""The served ladder at its smallest, on the demo's models: it measures, goes on where it stopped, and draws."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SCRIPT = Path(__file__).parents[2] / "bench" / "serve_ladder.py"


@pytest.fixture(scope="module")
def ladder() -> Any:
    spec = importlib.util.spec_from_file_location("serve_ladder", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["serve_ladder"] = module
    spec.loader.exec_module(module)
    return module


def test_run_resume_and_plot(ladder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    serve = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "4"]
    serve += ["--kv-cache-memory-bytes", str(256 << 20)]
    small = ["--pair", "smollm2", "--out", str(tmp_path), "--loads", "1", "2", "--rounds", "1", "--prompts", "2"]
    small += ["--max-tokens", "8", "--methods", "none", "tree-strict"]
    ladder.main(["run", *small, "--serve-args", *serve])
    out = tmp_path / "smollm2"
    record = json.loads((out / "ladder.json").read_text())
    rows = {(row["method"], row["load"]): row for row in record["summary"]}
    assert set(rows) == {(method, load) for method in ("none", "tree-strict") for load in (1, 2)}
    for (method, _), row in rows.items():
        assert row["tokens_per_second"]["median"] > 0
        assert row["ratio"]["median"] == 1.0 if method == "none" else row["ratio"]["median"] > 0
        assert (row["acceptance_length"] is None) == (method == "none")
    assert rows["tree-strict", 1]["acceptance_length"] > 1
    assert str(tmp_path) not in json.dumps({k: record[k] for k in ("pair", "methods", "machine")})
    assert (out / "ladder.png").stat().st_size > 10_000

    # Only what is missing is measured again.
    lost = ladder.cell_file(out, "tree-strict", 0, 2)
    kept = ladder.cell_file(out, "tree-strict", 0, 1).stat().st_mtime_ns
    lost.unlink()
    measured = []
    monkeypatch.setattr(ladder, "measure", lambda *args: measured.append(args[-2:]))

    class NoServer:
        def __init__(self, *args: Any) -> None: ...
        def __enter__(self) -> str:
            return "http://nowhere"

        def __exit__(self, *args: Any) -> None: ...

    monkeypatch.setattr(ladder, "server", NoServer)
    ladder.main(["run", *small, "--serve-args", *serve])
    assert measured == [(0, 2)]
    assert ladder.cell_file(out, "tree-strict", 0, 1).stat().st_mtime_ns == kept


def test_a_server_that_does_not_start_says_why(ladder: Any, tmp_path: Path) -> None:
    pair = ladder.Pair(str(tmp_path / "no-model"), "no-head")
    with pytest.raises(RuntimeError, match="did not start"), ladder.server(pair, None, [], tmp_path / "log"):
        pass


def test_every_method_of_ours_is_a_configuration(ladder: Any) -> None:
    from vllm_adaptivespec.config import AdaptiveSpecConfig

    ours = {n: c for n, c in ladder.methods("head").items() if c and c["method"] == "adaptivespec"}
    assert set(ours) == {"chain-strict", "tree-strict", "chain-margin", "tree-margin"}
    for name, config in ours.items():
        made = AdaptiveSpecConfig.from_dict({k: v for k, v in config.items() if k not in ("method", "model")})
        assert (made.margin_threshold < 1) == name.endswith("margin")
        assert (made.policy().largest.width == 1) == name.startswith("chain")


def test_lm_evals_options_are_its_own(ladder: Any) -> None:
    """The package is not installed here; the command names what its documentation does."""
    command = ladder.accuracy_command("http://host", ["gsm8k_cot"], 5, Path("out"))
    assert command[:4] == [sys.executable, "-m", "lm_eval", "--model"]
    assert command[-2:] == ["--limit", "5"]


def test_help(ladder: Any) -> None:
    result = subprocess.run([sys.executable, str(SCRIPT), "--help"], capture_output=True, text=True, check=True)
    assert "serve_ladder.py run --pair llama-3.1-8b" in result.stdout
