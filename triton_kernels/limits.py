"""Sizes the kernels share, and how a row of logits is split between programs."""

from __future__ import annotations

import triton
import triton.language as tl

MAX_NODES = 64
"""Nodes of one request's tree: bits of a mask word."""
SPLIT = 4096
"""Logits of one row that one program reads at most; another kernel reduces a row's splits."""
MIN_SPLIT = 64
MAX_VOCAB = 64 * SPLIT
NOT_A_TOKEN = tl.constexpr(2**31 - 1)


def split_of(vocab: int) -> int:
    """Logits per program: a power of two, no more than small vocabularies need."""
    return min(max(triton.next_power_of_2(vocab), MIN_SPLIT), SPLIT)
