#!/usr/bin/env python3
"""The measurements behind the README's figures: `adaptivespec bench` into bench/results. Options: see --help."""

import sys
from pathlib import Path

from vllm_adaptivespec.cli.main import app

RESULTS = Path(__file__).resolve().parent / "results"

if __name__ == "__main__":
    app(["bench", "--out", str(RESULTS), *sys.argv[1:]])
