"""Cache blocks for tree branches: a pool beside the scheduler's, and what each request has of it."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field

from vllm.v1.kv_cache_interface import KVCacheConfig

MAX_SHARE = 0.1
"""Most of the KV cache's memory that goes to branch blocks. Requests that find none left draft chains."""


def plan_branch_blocks(available_bytes: int, block_bytes: int, max_num_seqs: int, max_branches: int) -> int:
    """How many blocks to set aside so that every request can have its branches, within ``MAX_SHARE``."""
    return min(max_num_seqs * max_branches, int(available_bytes * MAX_SHARE) // block_bytes)


def why_no_branches(config: KVCacheConfig) -> str | None:
    """Why this cache cannot have branch blocks, or None where it can."""
    if len(config.kv_cache_groups) != 1:
        return "it has more than one KV cache group, each with its own block tables"
    if any(t.layer_stride != t.block_stride * config.num_blocks for t in config.kv_cache_tensors):
        return "its KV cache keeps blocks outside layers, so that layers cannot be lengthened"
    return None


def with_branch_blocks(config: KVCacheConfig, num_blocks: int) -> KVCacheConfig:
    """The same cache with ``num_blocks`` more blocks per layer, whose ids the scheduler does not know."""
    config = deepcopy(config)
    old, new = config.num_blocks, config.num_blocks + num_blocks
    for tensor in config.kv_cache_tensors:
        tensor.size = tensor.size // old * new
        tensor.layer_stride = tensor.block_stride * new
        tensor.offset = tensor.offset // old * new
    config.num_blocks = new
    return config


@dataclass
class RequestBranches:
    """Branch blocks of one request, and how far they mirror its tail block.

    Branch ``i`` (from 1) lies in ``blocks[i - 1]``. All of them hold the tail block's committed tokens at positions
    below ``synced_to``, for tail block number ``tail``.
    """

    blocks: list[int] = field(default_factory=list)
    tail: int = -1
    synced_to: int = -1

    def in_sync(self, tail: int, length: int) -> bool:
        return self.tail == tail and self.synced_to == length


class BranchPool:
    """Free branch blocks, and the requests that hold some."""

    def __init__(self, first_block: int, num_blocks: int) -> None:
        self.free = list(range(first_block, first_block + num_blocks))
        self.requests: dict[str, RequestBranches] = {}

    def of(self, request_id: str) -> RequestBranches | None:
        return self.requests.get(request_id)

    def available(self, request_id: str) -> int:
        """Branches the request could have."""
        held = self.requests.get(request_id)
        return len(self.free) + (len(held.blocks) if held else 0)

    def ensure(self, request_id: str, num_branches: int) -> RequestBranches:
        """Branches of the request, at least ``num_branches`` (at most ``available``) of them."""
        held = self.requests.setdefault(request_id, RequestBranches())
        while len(held.blocks) < num_branches:
            held.blocks.append(self.free.pop())
            held.synced_to = -1
        return held

    def release(self, request_id: str) -> None:
        """Take back all blocks of a request; unknown ids are fine."""
        held = self.requests.pop(request_id, None)
        if held is not None:
            self.free.extend(held.blocks)
