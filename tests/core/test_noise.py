"""Noise that any implementation of Philox gives, and that is Gumbel's."""

from __future__ import annotations

import math

import torch

from vllm_adaptivespec.core.noise import gumbel_noise, philox


def test_known_answer() -> None:
    """Philox-4x32-10's published answer for an all-zero counter and key."""
    words = philox(0, torch.tensor([0]), 0)[0].tolist()
    assert [f"{word:08x}" for word in words] == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]


def test_every_part_of_the_key_counts() -> None:
    base = gumbel_noise(7, 3, 100)
    assert torch.equal(base, gumbel_noise(7, 3, 100))
    for seed, position in ((8, 3), (7, 4), (7 + 2**32, 3)):
        assert (base != gumbel_noise(seed, position, 100)).float().mean() > 0.9


def test_longer_vocabularies_share_their_beginning() -> None:
    assert torch.equal(gumbel_noise(1, 2, 1001)[:7], gumbel_noise(1, 2, 7))


def test_moments() -> None:
    noise = torch.cat([gumbel_noise(seed, 5, 50_000) for seed in range(4)])
    assert abs(float(noise.mean()) - 0.5772) < 0.02
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.05
    assert noise.isfinite().all()
