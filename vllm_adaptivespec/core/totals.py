"""What happened in the verification steps, counted where the trees are; the host reads it only when asked."""

from __future__ import annotations

import torch

from .stats import MARGIN_EDGES, SpecStats


class DeviceTotals:
    """``SpecStats`` in tensors.

    Args:
        max_depth: bound of trees' depths; deeper ones are counted as this deep.
        max_nodes: most nodes of one tree.
        device: of all tensors.
    """

    NAMES = ("verifications", "drafted", "accepted", "promoted", "emitted", "depth_sum", "chains")

    def __init__(self, max_depth: int, max_nodes: int, device: torch.device) -> None:
        self.max_depth = max_depth
        self.sums = torch.zeros(len(self.NAMES), dtype=torch.int64, device=device)
        self.shapes = torch.zeros((max_depth + 1, max_nodes + 1), dtype=torch.int64, device=device)
        self.margins = torch.zeros(len(MARGIN_EDGES) + 1, dtype=torch.int64, device=device)
        self.edges = torch.tensor(MARGIN_EDGES, dtype=torch.float32, device=device)

    def observe(
        self,
        depth: torch.Tensor,
        num_nodes: torch.Tensor,
        num_emitted: torch.Tensor,
        promoted: torch.Tensor,
        first_margin: torch.Tensor,
    ) -> None:
        """Add one batch of walks; requests without a tree do not count.

        Args:
            depth, num_nodes: ``[num_requests]`` of the verified trees.
            num_emitted: ``[num_requests]`` tokens of the step, the last one included.
            promoted: ``[num_requests]`` int64, one bit for each promoted node.
            first_margin: ``[num_requests]`` float32 best child's log ratio at the first mismatch, NaN where none.
        """
        seen = (num_nodes > 0).long()
        bits = torch.arange(64, device=promoted.device)
        num_promoted = ((promoted[:, None] >> bits) & 1).sum(dim=1)
        # A chain is as deep as it has nodes.
        columns = (
            torch.ones_like(seen),
            num_nodes,
            num_emitted - 1,
            num_promoted,
            num_emitted,
            depth,
            depth == num_nodes,
        )
        self.sums += (torch.stack([c.long() for c in columns], dim=1) * seen[:, None]).sum(dim=0)
        self.shapes.index_put_((depth.clamp(max=self.max_depth).long(), num_nodes.long()), seen, accumulate=True)
        known = seen * (first_margin == first_margin)
        bins = torch.bucketize(first_margin.nan_to_num().exp(), self.edges, right=True)
        self.margins.index_put_((bins,), known, accumulate=True)

    def read(self) -> SpecStats:
        """Bring everything to the host, waiting for the device."""
        stats = SpecStats(**dict(zip(self.NAMES, self.sums.tolist(), strict=True)))
        shapes = self.shapes.cpu()
        stats.shapes = {(d, n): int(shapes[d, n]) for d, n in shapes.nonzero().tolist()}
        stats.margins = self.margins.tolist()
        return stats
