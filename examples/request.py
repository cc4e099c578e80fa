#!/usr/bin/env python3
"""Streams three answers from examples/serve.sh: .venv/bin/python examples/request.py [URL].

Options of a request travel in `vllm_xargs`, whose values are strings or numbers.
"""

import sys

from openai import OpenAI

URL = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000/v1"

OPTIONS: dict[str, dict[str, str | float]] = {
    "lossless, the server's default": {},
    "margin rule, preset balanced": {"adaptivespec_margin_threshold": "balanced"},
    "not speculated": {"adaptivespec_enabled": "false"},
}


def main() -> None:
    client = OpenAI(base_url=URL, api_key="none")
    for name, options in OPTIONS.items():
        print(f"\n== {name}")
        stream = client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "Write a Python function that reverses a string."}],
            max_tokens=96,
            temperature=0.0,
            stream=True,
            extra_body={"vllm_xargs": options} if options else None,
        )
        for chunk in stream:
            if chunk.choices:
                print(chunk.choices[0].delta.content or "", end="", flush=True)
        print()


if __name__ == "__main__":
    main()
