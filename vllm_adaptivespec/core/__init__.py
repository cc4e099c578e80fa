"""The method itself: trees, growth, policy, acceptance. Imports torch and the standard library, never vLLM."""
