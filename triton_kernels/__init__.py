"""Triton kernels of the method; each has its readable torch twin in ``vllm_adaptivespec.core``."""

if __name__ == "triton_kernels":
    # Found under OpenAI's name, because this repository is on Python's path: vLLM wants theirs, so step aside for an
    # installed one, or for vLLM's own copy.
    import importlib
    import importlib.machinery
    import importlib.util
    import os
    import sys

    _root = os.path.realpath(os.path.join(os.path.dirname(__file__), os.pardir))
    _elsewhere = [path for path in sys.path if os.path.realpath(path or os.curdir) != _root]
    _spec = importlib.machinery.PathFinder.find_spec(__name__, _elsewhere)
    if _spec is not None and _spec.loader is not None:
        sys.modules[__name__] = _module = importlib.util.module_from_spec(_spec)
        _spec.loader.exec_module(_module)
    elif "vllm" in sys.modules and importlib.util.find_spec("vllm.third_party.triton_kernels") is not None:
        sys.modules[__name__] = importlib.import_module("vllm.third_party.triton_kernels")
else:
    from .kv_commit import LayerCaches, kv_commit
    from .margin_acceptance import Acceptance, margin_acceptance
    from .tree_attention import tree_attention
    from .tree_growth import GrowthState, grow_level, tree_masks
    from .tree_rows import path_rows, record_step, stage_rows, verify_rows

    __all__ = [
        "Acceptance",
        "GrowthState",
        "LayerCaches",
        "grow_level",
        "kv_commit",
        "margin_acceptance",
        "path_rows",
        "record_step",
        "stage_rows",
        "tree_attention",
        "tree_masks",
        "verify_rows",
    ]
