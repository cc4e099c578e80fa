"""Triton's interpreter without what it does again and again, for tests that run whole engines in it."""

from __future__ import annotations

import dataclasses
import importlib
from types import SimpleNamespace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def hasten() -> None:
    """Several times faster, and the same arithmetic.

    Left out: making ``triton.language`` interpreted anew at every call inside a kernel, checks for integer overflow
    (the kernels' own tests have them), and small tiles, which only a GPU needs.
    """
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    patch_lang = interpreter._patch_lang
    active: list[Any] = []

    everything = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})

    def patch_once(fn: Any) -> Any:
        if active:
            return interpreter._LangPatchScope()
        scope = patch_lang(everything)
        active.append(scope)
        restore = scope.restore

        def restore_all() -> None:
            active.clear()
            restore()

        scope.restore = restore_all
        return scope

    interpreter._patch_lang = patch_once

    tree_attention = importlib.import_module("vllm_adaptivespec.triton_kernels.tree_attention")
    launch_shape = tree_attention.launch_shape

    def large_tiles(max_queries: int, group: int, head_size: int, element_size: int) -> dict[str, int]:
        rows = 1 << (max_queries * group - 1).bit_length()
        return {**launch_shape(max_queries, group, head_size, element_size), "BLOCK_M": max(rows, 16), "BLOCK_N": 256}

    tree_attention.launch_shape = large_tiles
