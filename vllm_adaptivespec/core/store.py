"""Trees of all requests in tensors, by request slot, and what the rows of a verification batch need of them.

Nothing here looks at a value on the host, so the tensors may live on a GPU and nobody waits for it. A batch's rows are
flat: a request's root (local index 0), then as many of its nodes as were scheduled (node ``n`` at local index
``n + 1``). Any prefix of a node list is a tree, so fewer rows than nodes are fine; rows past the last node are padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TreeRows:
    """One verification batch, row by row; ``[num_rows]`` each.

    Args:
        is_valid: whether the row is a node of its request's tree.
        parents: int32 parent node, -1 for roots, the roots' children and padding.
        depths: int64 distance from the root: what to add to the root's position. Padding lies one below its root.
        masks: int64 words over the request's rows: bit ``j`` is set where the row may attend to the row with local
            index ``j``. All see their root and themselves.
    """

    is_valid: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    masks: torch.Tensor


class TreeStore:
    """The last drafted tree of every request slot, and the path accepted in its last verification.

    Args:
        num_slots: request slots.
        max_nodes: most nodes of one tree, at most 63: with its root a tree fits one mask word.
        device: of all tensors.

    Attributes:
        parents: ``[num_slots, max_nodes]`` int32.
        masks: ``[num_slots, max_nodes]`` int64 words over nodes: ancestors and the node itself.
        depths: ``[num_slots, max_nodes]`` int32, 0 past the last node.
        num_nodes: ``[num_slots]`` int32.
        path: ``[num_slots, max_nodes]`` int32 accepted nodes, root side first.
        path_len: ``[num_slots]`` int32.
    """

    def __init__(self, num_slots: int, max_nodes: int, device: torch.device) -> None:
        if not 1 <= max_nodes <= 63:
            raise ValueError(f"max_nodes must be in 1 to 63, is {max_nodes}")

        def zeros(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros((num_slots, *shape), dtype=dtype, device=device)

        self.max_nodes = max_nodes
        self.parents = zeros(torch.int32, max_nodes)
        self.masks = zeros(torch.int64, max_nodes)
        self.depths = zeros(torch.int32, max_nodes)
        self.num_nodes = zeros(torch.int32)
        self.path = zeros(torch.int32, max_nodes)
        self.path_len = zeros(torch.int32)

    def clear(self, slot: int) -> None:
        """A new request has the slot."""
        self.num_nodes[slot].zero_()
        self.path_len[slot].zero_()

    def put(
        self,
        slots: torch.Tensor,
        parents: torch.Tensor,
        num_nodes: torch.Tensor,
        masks: torch.Tensor,
        depths: torch.Tensor,
    ) -> None:
        """Keep new trees: ``[n]`` int64 slots, ``[n, max_nodes]`` parents, masks and depths, ``[n]`` counts."""
        self.parents[slots] = parents
        self.num_nodes[slots] = num_nodes
        self.masks[slots] = masks
        self.depths[slots] = depths

    def rows(self, slots: torch.Tensor, local: torch.Tensor) -> TreeRows:
        """What each row of a batch is.

        Args:
            slots: ``[num_rows]`` int64 request slot of each row.
            local: ``[num_rows]`` int32/int64 index of each row among its request's.
        """
        local = local.long()
        node = (local - 1).clamp(min=0)
        is_valid = (local > 0) & (local <= self.num_nodes[slots])
        own_bit = torch.ones_like(local) << local
        masks = torch.where(is_valid, self.masks[slots, node] << 1, own_bit) | 1
        depths = torch.where(is_valid, self.depths[slots, node].long(), local.clamp(max=1))
        parents = torch.where(is_valid, self.parents[slots, node], -1)
        return TreeRows(is_valid, parents, depths, masks)

    def rows_in_path_order(self, slots: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        """Where each row of a plain sequence is found in the verified tree.

        Args:
            slots, local: as in ``rows``.

        Returns:
            ``[num_rows]`` int64 offsets to add to a row's index: to the ``k``-th accepted node's row for the row with
            local index ``k``, 0 for the root and for what lies beyond the accepted path.
        """
        local = local.long()
        step = (local - 1).clamp(min=0)
        on_path = (local > 0) & (local <= self.path_len[slots])
        return torch.where(on_path, self.path[slots, step].long() + 1 - local, 0)

    def scheduled_depths(self, slots: torch.Tensor, num_scheduled: torch.Tensor) -> torch.Tensor:
        """Levels of the scheduled part of each tree: ``[n]`` int32 for ``[n]`` slots and counts of nodes."""
        kept = torch.arange(self.max_nodes, device=slots.device) < num_scheduled[:, None]
        return torch.where(kept, self.depths[slots], 0).amax(dim=1)
