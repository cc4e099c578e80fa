"""Run by the tests in a process of its own, for the two paths do not share one: what the CPU path does with SmolLM2."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from tests.engine.engines import Engine, sampling, start
from vllm_adaptivespec.cli.models import demo_head, demo_target

PROMPTS = ("Write a Python function that reverses a list.", "Name three rivers in Europe.")
NUM_TOKENS = 14
Tree = tuple[list[int], list[int]]


def start_smol(speculative: bool = True) -> Engine:
    return start(
        {"model": str(demo_head()), "num_speculative_tokens": 8, "tree_policy": "adaptive"} if speculative else None,
        model=str(demo_target()),
        max_model_len=128,
        max_num_seqs=2,
        block_size=32,
        num_gpu_blocks_override=32,
    )


def run(engine: Engine, trees: list[Tree]) -> dict[str, Any]:
    """Greedy output of each prompt by itself, the trees drafted on the way, and what was counted.

    Args:
        trees: a list that the engine's drafter appends to.
    """
    tokenizer = engine.llm.get_tokenizer()
    outputs, drafted = [], []
    for text in PROMPTS:
        trees.clear()
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        outputs += engine.tokens([list(prompt)], sampling(NUM_TOKENS))
        drafted.append([[list(part) for part in tree] for tree in trees])
    stats = engine.llm.collective_rpc("adaptivespec_stats")[0]
    return {"tokens": outputs, "trees": drafted, "stats": stats}


def main() -> None:
    from vllm_adaptivespec.runner_v1.proposer import TreeProposer

    trees: list[Tree] = []
    propose = TreeProposer.propose

    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        drafts = propose(self, *args, **kwargs)
        for request_id in self.runner.input_batch.req_ids:
            tree = self.runner.speculation[request_id].tree
            trees.append((list(tree.tokens), list(tree.parents)) if tree else ([], []))
        return drafts

    TreeProposer.propose = recorded
    engine = start_smol()
    trees.clear()
    with open(sys.argv[1], "w") as file:
        json.dump(run(engine, trees), file)
    os._exit(0)  # vLLM's threads need not be waited for


if __name__ == "__main__":
    main()
