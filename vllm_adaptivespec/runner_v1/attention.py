"""CPU attention for trees: vLLM's own kernel, plus cache writes into the blocks that stand for a tree's branches."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

KeyValue = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of some rows, each ``[num_rows, num_kv_heads, head_size]``."""


@dataclass
class BranchWrites:
    """Extra cache writes of one forward pass: row ``rows[i]`` also goes to ``slots[i]``.

    Rows count through ``history`` (earlier passes of the same tree, oldest first) and then this pass's own rows.

    Args:
        rows: ``[num_writes]`` int64.
        slots: ``[num_writes]`` int64 cache slots.
        history: for each layer, keys and values of earlier passes.
        record: whether to add this pass's keys and values to ``history``.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    history: dict[str, list[KeyValue]] = field(default_factory=dict)
    record: bool = False


class BranchWriter:
    """Hands the current forward pass's ``BranchWrites`` to all layers of one model."""

    def __init__(self) -> None:
        self.writes: BranchWrites | None = None
        self.stash: dict[str, KeyValue] = {}
        """By layer, the keys and values last written, in the order of ``writes.rows``; the commit reads them."""


class BranchAttentionImpl(CPUAttentionBackendImpl):
    """The stock implementation with one more step in its cache update; becomes ``layer.impl``'s class after loading."""

    branch_writer: BranchWriter

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        writes = self.branch_writer.writes
        if writes is None:
            return
        name = layer.layer_name
        if writes.record:
            history = writes.history.setdefault(name, [])
            # The compiled graph reuses its buffers, so what outlives this pass must be a copy.
            history.append((key.clone(), value.clone()))
            if len(history) > 1:
                key, value = (torch.cat(parts) for parts in zip(*history, strict=True))
        stash = key.index_select(0, writes.rows), value.index_select(0, writes.rows)
        super().do_kv_cache_update(layer, *stash, kv_cache, writes.slots)
        self.branch_writer.stash[name] = stash

    def commit(self, layer: torch.nn.Module, source: torch.Tensor, slots: torch.Tensor) -> None:
        """Write rows ``source`` of the stash to ``slots`` of the layer's cache."""
        key, value = self.branch_writer.stash[layer.layer_name]
        super().do_kv_cache_update(
            layer, key.index_select(0, source), value.index_select(0, source), layer.kv_cache, slots
        )


def install(layers: dict[str, torch.nn.Module], writer: BranchWriter) -> None:
    """Give the layers our implementation.

    Raises:
        ValueError: a layer's attention is not the CPU backend's.
    """
    for name, layer in layers.items():
        if type(layer.impl) is not CPUAttentionBackendImpl:
            raise ValueError(
                f"adaptivespec needs vLLM's CPU attention backend, but layer {name} has {type(layer.impl).__name__}."
            )
        layer.impl.__class__ = BranchAttentionImpl
        layer.impl.branch_writer = writer


def copy_blocks(layers: dict[str, torch.nn.Module], source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy whole cache blocks ``source[i]`` to ``target[i]`` in every layer; the packing inside does not matter."""
    for layer in layers.values():
        cache = layer.kv_cache
        cache.index_copy_(0, target, cache.index_select(0, source))
