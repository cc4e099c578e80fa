"""The whole way from the command to the files, with engines that are processes but hold no vLLM."""

import json

import pytest
from typer.testing import CliRunner

from vllm_adaptivespec.cli import bench, demo, main

run = CliRunner().invoke

pytestmark = pytest.mark.usefixtures("stand_in")


@pytest.fixture(autouse=True)
def target(monkeypatch, tmp_path):
    folder = tmp_path / "target"
    folder.mkdir()
    for module in (demo, bench):
        monkeypatch.setattr(module, "demo_target", lambda: folder)
    return folder


def test_demo(tmp_path):
    out = tmp_path / "out"
    result = run(main.app, ["demo", "--prompts", "4", "--max-tokens", "8", "--out", str(out)])
    assert result.exit_code == 0, result.output
    record = json.loads((out / "demo.json").read_text())
    assert [engine["name"] for engine in record["engines"]] == [
        "none",
        "stock-k3",
        "adaptivespec",
        "adaptivespec-kappa0.3",
    ]
    assert len(record["runs"]) == 4 * 4
    assert [prompt["source"] for prompt in record["prompts"]] == ["humaneval", "chat"] * 2
    assert record["settings"]["max_tokens"] == 8
    for summary in record["summary"]:
        assert summary["exact_match"] == 1.0
        assert summary["acceptance_length"] == (None if summary["engine"] == "none" else 1.7)
    assert (out / "demo.png").is_file()
    assert (out / "logs" / "none.log").is_file()
    assert "AdaptiveSpec, lossless" in result.output


def test_bench_sweeps_first_and_then_compares(tmp_path):
    out = tmp_path / "out"
    options = ["--batches", "1,2", "--prompts", "2", "--rounds", "2", "--sweep", "1,2", "--max-tokens", "8"]
    result = run(main.app, ["bench", "--out", str(out), *options])
    assert result.exit_code == 0, result.output
    sweep = json.loads((out / "sweep.json").read_text())
    assert {engine["name"] for engine in sweep["engines"]} == {"none", "stock-k1", "stock-k2"}
    ladder = json.loads((out / "ladder.json").read_text())
    names = {engine["name"] for engine in ladder["engines"]}
    # The stand-ins are all equally fast, so the first stock engine is the best one in every cell.
    assert names == {"none", "stock-k1", "adaptivespec", "adaptivespec-kappa0.3"}
    assert {(s["source"], s["batch"], s["rounds"]) for s in ladder["summary"]} == {
        (source, batch, 2) for source in ("humaneval", "chat") for batch in (1, 2)
    }
    assert len(ladder["summary"]) == 4 * len(names)


def test_bench_without_a_choice_of_k_needs_no_sweep(tmp_path):
    out = tmp_path / "out"
    options = ["--batches", "1", "--prompts", "1", "--rounds", "1", "--sweep", "3", "--kappas", ""]
    result = run(main.app, ["bench", "--out", str(out), *options])
    assert result.exit_code == 0, result.output
    assert not (out / "sweep.json").exists()
    ladder = json.loads((out / "ladder.json").read_text())
    assert [engine["name"] for engine in ladder["engines"]] == ["none", "stock-k3"]
