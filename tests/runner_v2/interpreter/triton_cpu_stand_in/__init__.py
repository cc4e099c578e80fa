"""A Triton backend called ``cpu`` that compiles nothing.

vLLM's CPU build uses Triton, and with it the V2 model runner, only where a backend of this name exists. With
``TRITON_INTERPRET=1`` no kernel is ever compiled, so the name is all that is needed.
"""
