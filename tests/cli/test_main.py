"""The command line: light to import, clear about mistakes, and what it hands on."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from vllm_adaptivespec.cli import bench, demo, main
from vllm_adaptivespec.cli.engines import EngineError

run = CliRunner().invoke


def test_import_is_light():
    code = (
        "import sys, vllm_adaptivespec.cli.main; "
        "print([m for m in ('torch', 'vllm', 'transformers', 'matplotlib') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_demo_passes_its_options_on(monkeypatch, tmp_path):
    heard = []
    monkeypatch.setattr(demo, "demo", lambda *arguments: heard.append(arguments))
    result = run(main.app, ["demo", "--prompts", "4", "--max-tokens", "8", "--eager", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert heard == [(None, None, 4, 8, True, "auto", tmp_path)]


def test_a_model_without_its_head_is_refused(tmp_path):
    result = run(main.app, ["demo", "--model", str(tmp_path), "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "belong together" in result.output
    result = run(main.app, ["bench", "--head", str(tmp_path), "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "belong together" in result.output


def test_a_failed_engine_is_shown_without_a_traceback(monkeypatch, tmp_path):
    def broken(*arguments):
        raise EngineError("engine 'x' ended with status 1")

    monkeypatch.setattr(demo, "demo", broken)
    result = run(main.app, ["demo", "--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "adaptivespec: engine 'x' ended with status 1" in result.output


def test_bench_passes_its_options_on(monkeypatch, tmp_path):
    heard = {}
    monkeypatch.setattr(bench, "bench", lambda **options: heard.update(options))
    result = run(main.app, ["bench", "--out", str(tmp_path), "--batches", "1,4", "--sweep", "2", "--kappas", ""])
    assert result.exit_code == 0, result.output
    assert (heard["batches"], heard["sweep"], heard["kappas"]) == ([1, 4], [2], [])


def test_methods_are_what_a_user_would_write(four_specs, tmp_path):
    assert [spec.speculative_config for spec in four_specs] == [
        None,
        {"method": "eagle3", "model": str(tmp_path), "num_speculative_tokens": 3},
        {"method": "adaptivespec", "model": str(tmp_path), "num_speculative_tokens": 8},
        {"method": "adaptivespec", "model": str(tmp_path), "num_speculative_tokens": 8, "margin_threshold": 0.3},
    ]
    assert len({spec.name for spec in four_specs}) == 4


def test_bench_takes_the_best_stock_of_each_cell(make_run):
    from vllm_adaptivespec.cli.measure import summarise

    seconds = {("chat", 1): (3.0, 1.0, 2.0), ("chat", 4): (3.0, 5.0, 4.0)}
    runs = [
        make_run(engine, value, source=source, batch=batch)
        for (source, batch), values in seconds.items()
        for engine, value in zip(("none", "stock-k2", "stock-k3"), values, strict=True)
    ]
    # At batch 4 no stock engine beats none; the best of them is still what we are compared with.
    assert bench.best_stock(summarise(runs, "none")) == {("chat", 1): "stock-k2", ("chat", 4): "stock-k3"}


@pytest.mark.parametrize(("batch", "count"), [(1, 6), (4, 8), (16, 32)])
def test_bench_fills_two_batches(batch, count):
    cells = bench.Plan([batch], prompts=6, max_tokens=8).cells()
    assert {cell: len(prompts) for cell, prompts in cells.items()} == {
        ("humaneval", batch): count,
        ("chat", batch): count,
    }
