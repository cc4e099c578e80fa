"""Adapter for vLLM's Model Runner V2: the GPU path."""
