#!/usr/bin/env python3
"""Draw the plots again from their records: bench/plot.py [RECORD.json ...], by default all of bench/results."""

import json
import sys
from pathlib import Path

from vllm_adaptivespec.cli.report import plot

RESULTS = Path(__file__).resolve().parent / "results"


def main() -> None:
    for path in [Path(name) for name in sys.argv[1:]] or sorted(RESULTS.glob("*.json")):
        plot(json.loads(path.read_text(encoding="utf-8")), path.with_suffix(".png"))
        print(path.with_suffix(".png"))


if __name__ == "__main__":
    main()
