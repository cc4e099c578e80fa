"""Gumbel noise keyed by seed, position and token: the same wherever a token is looked at, whatever the batch.

One Philox-4x32-10 draw (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3") serves four tokens: draw ``i``'s
words are tokens ``4i`` to ``4i + 3``.
"""

from __future__ import annotations

import torch

MASK = 0xFFFFFFFF
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)


def philox(seed: int, counter: torch.Tensor, position: int) -> torch.Tensor:
    """Random words.

    Args:
        counter: ``[n]`` int64, below 2**32.

    Returns:
        ``[n, 4]`` int64 in ``[0, 2**32)``.
    """
    c0, c1 = counter, torch.full_like(counter, position & MASK)
    c2, c3 = torch.zeros_like(counter), torch.zeros_like(counter)
    key0, key1 = seed & MASK, (seed >> 32) & MASK
    for _ in range(ROUNDS):
        low0, high0 = _product(c0, MULTIPLIERS[0])
        low1, high1 = _product(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0, key1 = (key0 + KEY_STEPS[0]) & MASK, (key1 + KEY_STEPS[1]) & MASK
    return torch.stack((c0, c1, c2, c3), dim=1)


def _product(words: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Low and high 32 bits of a product, without leaving int64."""
    low = (words & 0xFFFF) * factor  # below 2**48
    high = (words >> 16) * factor + (low >> 16)
    return ((high & 0xFFFF) << 16) | (low & 0xFFFF), high >> 16


def gumbel_noise(seed: int, position: int, vocab: int) -> torch.Tensor:
    """``-log(-log(1 - u))`` for every token, u uniform in (0, 1) with 32 random bits.

    Args:
        seed: of the request, 64 bits.
        position: of the token to be emitted.

    Returns:
        ``[vocab]`` float64.
    """
    words = philox(seed, torch.arange(-(-vocab // 4)), position)
    uniform = ((words.double() + 0.5) * 2.0**-32).clamp(max=0.99999994)
    return -torch.log(-torch.log1p(-uniform)).flatten()[:vocab]
