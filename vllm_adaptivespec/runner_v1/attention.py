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
    _all: KeyValue | None = None

    def with_own_rows(self, earlier: int, slot_mapping: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows and slots of one kernel call that writes this pass's own rows too, then ours; the same for all layers.

        Args:
            earlier: rows in ``history`` before this pass.
            slot_mapping: ``[num_rows]`` slots of this pass's own rows.
        """
        if self._all is None:
            own = torch.arange(earlier, earlier + len(slot_mapping))
            self._all = torch.cat((own, self.rows)), torch.cat((slot_mapping, self.slots))
        return self._all


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
        writes = self.branch_writer.writes
        if writes is None:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        name = layer.layer_name
        earlier = 0
        if writes.record:
            history = writes.history.setdefault(name, [])
            earlier = sum(len(k) for k, _ in history)
            # The compiled graph reuses its buffers, so what outlives this pass must be a copy.
            history.append((key.clone(), value.clone()))
            if earlier:
                key, value = (torch.cat(parts) for parts in zip(*history, strict=True))
        rows, slots = writes.with_own_rows(earlier, slot_mapping)
        key, value = key.index_select(0, rows), value.index_select(0, rows)
        super().do_kv_cache_update(layer, key, value, kv_cache, slots)
        own = len(slot_mapping)
        self.branch_writer.stash[name] = key[own:], value[own:]


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


class StackedCache:
    """The caches of one model's layers as one, so that copies and commits take one call for all layers.

    Args:
        layers: by name, in the order of their caches.

    Raises:
        ValueError: there are none, or they are not equally spaced, contiguous parts of one allocation.
    """

    def __init__(self, layers: dict[str, torch.nn.Module]) -> None:
        if not layers:
            raise ValueError("it keeps no KV cache of its own")
        self.names = list(layers)
        self.layer = layers[self.names[0]]
        caches = [layer.kv_cache for layer in layers.values()]
        first = caches[0]
        starts = [cache.storage_offset() for cache in caches]
        spacing = starts[1] - starts[0] if len(starts) > 1 else first.numel()
        regular = starts == [starts[0] + i * spacing for i in range(len(starts))] and spacing >= first.numel()
        alike = all(
            cache.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            and (cache.shape, cache.dtype) == (first.shape, first.dtype)
            and cache.is_contiguous()
            for cache in caches
        )
        if not (regular and alike) or spacing % first[0].numel():
            raise ValueError("its layers' KV caches are not equal parts of one allocation")
        blocks_apart = spacing // first[0].numel()
        # From the first layer's first block to the last one's last.
        num_blocks = (len(caches) - 1) * blocks_apart + first.shape[0]
        self.blocks = torch.as_strided(first, (num_blocks, *first.shape[1:]), first.stride(), starts[0])
        self.by_layer = torch.as_strided(first, (len(caches), *first.shape), (spacing, *first.stride()), starts[0])
        self.first_slots = torch.arange(len(caches)).unsqueeze(1) * (blocks_apart * first.shape[2])

    def copy_blocks(self, source: list[int], target: list[int]) -> None:
        """Copy whole blocks ``source[i]`` to ``target[i]`` in every layer; the packing inside does not matter."""
        for s, t in zip(source, target, strict=True):  # several times faster than one indexed copy of all
            self.by_layer[:, t].copy_(self.by_layer[:, s])

    def write(self, stash: dict[str, KeyValue], rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Write rows of every layer's keys and values to slots of its cache, the same ones in all layers.

        Args:
            stash: by layer, ``[num_rows, num_kv_heads, head_size]`` each.
            rows, slots: ``[num_writes]`` int64.
        """
        key, value = (
            torch.stack([stash[name][part] for name in self.names]).index_select(1, rows).flatten(0, 1)
            for part in (0, 1)
        )
        CPUAttentionBackendImpl.do_kv_cache_update(
            self.layer.impl, self.layer, key, value, self.blocks, (self.first_slots + slots).flatten()
        )
