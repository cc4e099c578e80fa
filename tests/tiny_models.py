"""Tiny random models: a target on which context matters, and an EAGLE-3 head for it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 512, 64, 128, 4, 2, 32, 4

SHARPEN = {"q_proj": 12.0, "k_proj": 12.0, "v_proj": 10.0, "o_proj": 10.0, "lm_head": 8.0}
"""Without these factors the logits are flat and a wrong mask, position or commit would rarely change a token."""


def make_tiny_models(
    out: Path, head_dim: int = HEAD_DIM, kv_heads: int = KV_HEADS, layers: int = LAYERS
) -> tuple[Path, Path]:
    """Write both models below ``out``; returns the folders of the target and of the head."""
    target, head = out / "target", out / "head"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            for part, factor in SHARPEN.items():
                if part in name:
                    weight.mul_(factor)
    model.save_pretrained(target)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(*shape) * 0.15

    layer, attention, ones = "midlayer.", "midlayer.self_attn.", torch.ones(HIDDEN)
    head.mkdir(parents=True)
    save_file(
        {
            "fc.weight": weight(HIDDEN, 3 * HIDDEN),
            layer + "input_layernorm.weight": ones.clone(),
            layer + "hidden_norm.weight": ones.clone(),
            layer + "post_attention_layernorm.weight": ones.clone(),
            attention + "q_proj.weight": weight(HEADS * head_dim, 2 * HIDDEN),
            attention + "k_proj.weight": weight(kv_heads * head_dim, 2 * HIDDEN),
            attention + "v_proj.weight": weight(kv_heads * head_dim, 2 * HIDDEN),
            attention + "o_proj.weight": weight(HIDDEN, HEADS * head_dim),
            layer + "mlp.gate_proj.weight": weight(INTERMEDIATE, HIDDEN),
            layer + "mlp.up_proj.weight": weight(INTERMEDIATE, HIDDEN),
            layer + "mlp.down_proj.weight": weight(HIDDEN, INTERMEDIATE),
            "norm.weight": ones.clone(),
            "lm_head.weight": weight(VOCAB // 2, HIDDEN),
            "d2t": torch.arange(VOCAB // 2),  # draft id i is target id 2i
            "t2d": torch.arange(VOCAB) % 2 == 0,
        },
        head / "model.safetensors",
        metadata={"format": "pt"},
    )
    settings = json.loads((target / "config.json").read_text())
    settings.update(
        architectures=["LlamaForCausalLMEagle3"],
        num_hidden_layers=1,
        draft_vocab_size=VOCAB // 2,
        eagle_aux_hidden_state_layer_ids=[layers - 3, layers - 2, layers - 1],
    )
    (head / "config.json").write_text(json.dumps(settings, indent=1))
    return target, head
