"""What happened in the verification steps: running totals, cheap enough to keep always."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from .acceptance import Walk

MARGIN_EDGES = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
"""Upper edges of the histogram of probability ratios at first mismatches; the last bin is open."""


@dataclass
class SpecStats:
    """Totals since start; every field only grows.

    ``verifications`` counts verified trees, ``emitted`` their tokens (bonus included), so the acceptance length is
    ``emitted / verifications``. ``promoted`` nodes are among the ``accepted``.
    """

    verifications: int = 0
    drafted: int = 0
    accepted: int = 0
    promoted: int = 0
    emitted: int = 0
    depth_sum: int = 0
    chains: int = 0
    shapes: dict[tuple[int, int], int] = field(default_factory=dict)
    """Count by (depth, drafted nodes)."""
    margins: list[int] = field(default_factory=lambda: [0] * (len(MARGIN_EDGES) + 1))

    def observe(self, walk: Walk) -> None:
        """Add one finished walk over a tree with at least one node."""
        tree = walk.tree
        self.verifications += 1
        self.drafted += len(tree)
        self.accepted += len(walk.path)
        self.promoted += walk.promoted
        self.emitted += len(walk.emitted)
        self.depth_sum += tree.depth
        self.chains += tree.is_chain
        shape = (tree.depth, len(tree))
        self.shapes[shape] = self.shapes.get(shape, 0) + 1
        if walk.first_mismatch is not None:
            ratio = math.exp(walk.first_mismatch)
            self.margins[sum(ratio >= edge for edge in MARGIN_EDGES)] += 1

    def as_dict(self) -> dict[str, object]:
        """Plain values for JSON and RPC."""
        return {
            "verifications": self.verifications,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "promoted": self.promoted,
            "emitted": self.emitted,
            "depth_sum": self.depth_sum,
            "chains": self.chains,
            "shapes": [[depth, nodes, count] for (depth, nodes), count in sorted(self.shapes.items())],
            "margins": list(self.margins),
            "margin_edges": list(MARGIN_EDGES),
        }
