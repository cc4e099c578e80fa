"""The JSON of a measurement holds what its table and plot need, and nothing of the machine's folders."""

import io
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_adaptivespec.cli import record as records
from vllm_adaptivespec.cli import report
from vllm_adaptivespec.cli.engines import EngineSettings
from vllm_adaptivespec.cli.measure import summarise
from vllm_adaptivespec.cli.models import ROOT
from vllm_adaptivespec.cli.prompts import Prompt


@pytest.fixture
def content(make_run, four_specs, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/adaptivespec", "demo", "--model", "/elsewhere/my-model"])
    runs = [
        make_run(
            spec.name,
            1.0 + index,
            counters={"drafts": 2, "drafted": 6, "accepted": 1} if spec.speculative_config else {},
            round=round_,
        )
        for round_ in (0, 1)
        for index, spec in enumerate(four_specs)
    ]
    engines = [SimpleNamespace(spec=spec, start_seconds=1.26) for spec in four_specs]
    return records.record(
        "demo",
        EngineSettings(Path("/elsewhere/my-model")),
        engines,
        [Prompt("chat", "Why?")],
        runs,
        summarise(runs, "none"),
        {"max_tokens": 4, "head": ROOT / "examples" / "models" / "smollm2-135m-eagle3"},
    )


def test_record_says_what_ran_where(content):
    assert content["command"] == ["adaptivespec", "demo", "--model", "my-model"]
    assert content["settings"]["model"] == "my-model"
    assert content["settings"]["head"] == "examples/models/smollm2-135m-eagle3"
    assert {"python", "torch", "triton", "vllm", "vllm-adaptivespec"} <= set(content["versions"])
    assert content["machine"]["cores"] >= 1
    assert content["machine"]["cpu"]
    assert content["engines"][0] == {
        "name": "none",
        "label": "no speculation",
        "speculative_config": None,
        "start_seconds": 1.3,
    }
    assert len(content["runs"]) == 8
    assert [("token_ids" in run) for run in content["runs"]] == [True] * 4 + [False] * 4


def test_record_names_no_folder_of_the_machine(content, tmp_path):
    text = json.dumps(content)
    for folder in (str(ROOT), str(Path.home()), str(tmp_path), sys.prefix, "/elsewhere", "/somewhere"):
        assert folder not in text


def test_written_record_reads_back(content, tmp_path):
    records.write(content, tmp_path / "new" / "demo.json")
    text = (tmp_path / "new" / "demo.json").read_text()
    assert json.loads(text) == json.loads(json.dumps(content))
    assert len(text.splitlines()) < 50


def test_table_and_plot_need_the_record_alone(content, tmp_path):
    from rich.console import Console

    records.write(content, tmp_path / "demo.json")
    read = json.loads((tmp_path / "demo.json").read_text())
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(report.table(read))
    shown = console.export_text()
    for label in ("no speculation", "stock EAGLE-3, K = 3", "AdaptiveSpec, lossless", "AdaptiveSpec, kappa = 0.3"):
        assert label in shown
    row = next(line for line in shown.splitlines() if "stock EAGLE-3" in line)
    assert "0.50x" in row
    assert "1.50" in row
    report.plot(read, tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


def test_revision_marks_changed_files(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "ROOT", tmp_path)
    assert records.git_revision() is None
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@example.org"]
    (tmp_path / "file").write_text("one")
    for arguments in (["init", "-q"], ["add", "file"], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *arguments], check=True)
    clean = records.git_revision()
    assert clean is not None
    assert len(clean) == 12
    (tmp_path / "file").write_text("two")
    assert records.git_revision() == f"{clean}+"
