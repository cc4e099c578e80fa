"""What is imported when: vLLM loads the plugin in each of its processes, used or not, so that must stay cheap."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import vllm_adaptivespec

PACKAGE = Path(vllm_adaptivespec.__file__).parent


def heavy_modules_after(statement: str) -> list[str]:
    code = f"{statement}\nimport sys\nprint([m for m in ('torch', 'transformers', 'vllm') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return list(ast.literal_eval(result.stdout))


@pytest.mark.parametrize("module", ["plugin", "config", "refusals", "compat"])
def test_light_modules(module: str) -> None:
    assert heavy_modules_after(f"import vllm_adaptivespec.{module}") == []


def test_heavy_import_would_show() -> None:
    assert heavy_modules_after("import vllm_adaptivespec.core.tree") == ["torch"]


def test_entry_point_is_the_light_module() -> None:
    from importlib.metadata import entry_points

    from vllm_adaptivespec.plugin import register

    (entry_point,) = [e for e in entry_points(group="vllm.general_plugins") if e.name == "adaptivespec"]
    assert entry_point.load() is register


def imported_modules(source: str) -> set[str]:
    """Absolute modules a source imports anywhere, also inside functions."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            modules.add(str(node.module).split(".")[0])
        elif isinstance(node, ast.ImportFrom) and node.level > 1:
            modules.add("vllm_adaptivespec, outside core")
    return modules


@pytest.mark.parametrize("path", sorted((PACKAGE / "core").rglob("*.py")), ids=lambda path: path.name)
def test_core_imports_torch_numpy_and_the_standard_library_only(path: Path) -> None:
    assert imported_modules(path.read_text()) - sys.stdlib_module_names <= {"torch", "numpy"}


def test_import_inside_a_function_would_show() -> None:
    assert imported_modules("def f():\n    from vllm.config import VllmConfig\n") == {"vllm"}
    assert imported_modules("from ..plugin import register") == {"vllm_adaptivespec, outside core"}


REPOSITORY = PACKAGE.parent


def run_in(folder: Path, code: str, *path: Path) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=True
    ).stdout.strip()


def test_our_kernels_do_not_take_openais_name(tmp_path: Path) -> None:
    """Installed, there is no top-level package of ours called triton_kernels."""
    code = "import importlib.util as u; s = u.find_spec('triton_kernels'); print(s and s.origin)"
    assert not run_in(tmp_path, code).startswith(str(REPOSITORY))


def test_openais_kernels_are_found_in_our_repository_too(tmp_path: Path) -> None:
    """With the repository's root first on the path, as where Python was started in it."""
    theirs = tmp_path / "triton_kernels"
    theirs.mkdir()
    (theirs / "__init__.py").write_text("")
    (theirs / "matmul.py").write_text("PrecisionConfig = 'theirs'\n")
    code = "import triton_kernels; from triton_kernels.matmul import PrecisionConfig; print(triton_kernels.__file__)"
    assert run_in(tmp_path, code, REPOSITORY, tmp_path) == str(theirs / "__init__.py")
    nothing_of_ours = "import triton_kernels; print(hasattr(triton_kernels, 'margin_acceptance'))"
    assert run_in(tmp_path / "..", nothing_of_ours, REPOSITORY) == "False"
