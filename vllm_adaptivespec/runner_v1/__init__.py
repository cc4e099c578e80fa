"""Adapter for vLLM's V1 model runner, the CPU path. Translates between vLLM's batch and ``core``; decides nothing."""
