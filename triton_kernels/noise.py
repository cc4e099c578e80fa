"""Gumbel noise keyed by seed, position and token. The twin is ``core.noise.gumbel_noise``."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _gumbel(bits):
    """Standard Gumbel noise from 32 random bits.

    ``-log(-log(1 - u))`` with u in (0, 1): the large values, which decide an argmax, come from u near 0, where
    float32 is fine. There ``-log(1 - u)`` is a series, because ``1 - u`` would round.
    """
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    series = u * (1.0 + u * (0.5 + u * (0.33333334 + u * (0.25 + u * 0.2))))
    exponential = tl.where(u < 0.03125, series, -tl.log(1.0 - u))
    return -tl.log(exponential)


@triton.jit
def gumbel_noise(seed, position, first_draw, DRAWS: tl.constexpr):
    """Noise of tokens ``4 * first_draw`` and on, ``[4 * DRAWS]``: one Philox draw serves four neighbours."""
    draw = first_draw + tl.arange(0, DRAWS)
    zero = draw * 0
    r0, r1, r2, r3 = tl.philox(seed, draw, zero + position, zero, zero)
    bits = tl.interleave(tl.interleave(r0, r2), tl.interleave(r1, r3))
    return _gumbel(bits)
