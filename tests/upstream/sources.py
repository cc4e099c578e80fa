"""Python sources of a vLLM that is not installed, read from its wheel without running them."""

from __future__ import annotations

import ast
import functools
import zipfile
from pathlib import Path


class WheelSources:
    """Classes and methods of a wheel, through imports and base classes."""

    def __init__(self, wheel: Path) -> None:
        self.archive = zipfile.ZipFile(wheel)
        self.files = set(self.archive.namelist())

    @functools.cached_property
    def version(self) -> str:
        (name,) = [f for f in self.files if f.endswith(".dist-info/METADATA")]
        lines = self.archive.read(name).decode().splitlines()
        return next(line.removeprefix("Version: ") for line in lines if line.startswith("Version: "))

    @functools.cache  # noqa: B019 - one instance for all tests
    def module(self, name: str) -> ast.Module | None:
        """The parsed module; None where the wheel has none of that name."""
        for path in (name.replace(".", "/") + ".py", name.replace(".", "/") + "/__init__.py"):
            if path in self.files:
                return ast.parse(self.archive.read(path))
        return None

    def resolve(self, module_name: str, class_name: str) -> tuple[str, ast.ClassDef] | None:
        """The class a module calls by that name, and the module that defines it."""
        module = self.module(module_name)
        for node in ast.walk(module) if module else ():
            if isinstance(node, ast.ClassDef) and node.name == class_name:
                return module_name, node
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == class_name:
                        return self.resolve(self._absolute(module_name, node), alias.name)
        return None

    def _absolute(self, module_name: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return str(node.module)
        package = module_name.split(".")
        is_package = module_name.replace(".", "/") + "/__init__.py" in self.files
        package = package[: len(package) - node.level + is_package]
        return ".".join([*package, *([node.module] if node.module else [])])

    def parameters(self, module_name: str, class_name: str, method: str) -> list[str] | None:
        """Parameters of a method, its own or inherited, or of a module's function (no class); None if there is none."""
        if not class_name:
            module = self.module(module_name)
            return self._own_parameters(module, method) if module else None
        found = self.resolve(module_name, class_name)
        if found is None:
            return None
        defined_in, node = found
        own = self._own_parameters(node, method)
        if own is not None:
            return own
        for base in node.bases:
            name = base.value if isinstance(base, ast.Subscript) else base
            if isinstance(name, ast.Name):
                inherited = self.parameters(defined_in, name.id, method)
                if inherited is not None:
                    return inherited
        return None

    @staticmethod
    def _own_parameters(owner: ast.Module | ast.ClassDef, function: str) -> list[str] | None:
        for item in owner.body:
            if isinstance(item, ast.FunctionDef) and item.name == function:
                arguments = item.args
                return [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        return None
