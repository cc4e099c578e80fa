"""What both adapters must do alike: each module here is run by ``tests/engine`` and by ``tests/runner_v2``."""
