"""One engine in a process of its own: reads JSON lines from one pipe, answers on another (stdout is vLLM's log).

Started by `engines.Engine`; the protocol is there and here and nowhere else:

    -> {"model", "speculative_config", "options"}
    <- {"seconds", "peak_rss_mib"}                               when the engine is ready
    -> {"prompts": [text], "max_tokens", "ignore_eos"}
    <- {"seconds", "token_ids": [[id]], "counters", "peak_rss_mib"}
    -> {"prompts": [text], "max_tokens", "arrivals": [second], "limit"}
    <- the same and {"times": [[submitted, first token, finished]]}
    -> {"stats": true}
    <- what collective_rpc("adaptivespec_stats") says, {} for other engines
    -> end of file                                               the process ends
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

Clock = Callable[[], float]

# Keys of a run's counters -> vLLM's own metrics. "drafts" are verifications that had something to verify.
VLLM_COUNTERS = {
    "drafts": "vllm:spec_decode_num_drafts",
    "drafted": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
    "preemptions": "vllm:num_preemptions",
}
# Running totals that AdaptiveSpec's worker answers to collective_rpc("adaptivespec_stats").
OWN_COUNTERS = ("verifications", "drafted", "accepted", "promoted", "emitted", "depth_sum")


def difference(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """What running totals grew by."""
    return {key: after[key] - before.get(key, 0) for key in after}


def peak_rss_mib() -> float:
    """Highest resident memory of this process since the last `restart_peak_rss`, in MiB (Linux only, else 0)."""
    status = Path("/proc/self/status")
    if not status.exists():
        return 0.0
    fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
    return int(fields["VmHWM"].split()[0]) / 1024


def restart_peak_rss() -> None:
    """Forget the peak of loading and compiling: what serving needs is the question."""
    gc.collect()
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")


def drive(
    engine: Any,
    submit: Callable[[int], None],
    arrivals: Sequence[float],
    limit: int | None,
    clock: Clock = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[dict[int, Any], list[list[float]]]:
    """Submit requests to a vLLM engine at their arrival times (seconds from now) and step it until all are done.

    Args:
        engine: a `vllm.v1.engine.llm_engine.LLMEngine` in this process, with statistics on.
        submit: adds the request with this index, under the index as its id.
        arrivals: ascending. A request that is due while `limit` are in flight waits for one of them to finish, so
            that zeros are a closed loop of `limit` clients.
        clock: the one that vLLM stamps first tokens with.

    Returns:
        Outputs by index, and of every request the times of its submission, its first token and its end.
    """
    start = clock()
    outputs: dict[int, Any] = {}
    times = [[0.0, 0.0, 0.0] for _ in arrivals]
    submitted = 0
    while len(outputs) < len(arrivals):
        while (
            submitted < len(arrivals)
            and arrivals[submitted] <= clock() - start
            and (limit is None or submitted - len(outputs) < limit)
        ):
            times[submitted][0] = clock() - start
            submit(submitted)
            submitted += 1
        if submitted == len(outputs):
            sleep(max(arrivals[submitted] - (clock() - start), 0.0))
            continue
        for output in engine.step():
            if output.finished:
                index = int(output.request_id)
                outputs[index] = output
                times[index][1:] = [output.metrics.first_token_ts - start, clock() - start]
    return outputs, times


class MeasuredEngine:
    """A `vllm.LLM` that reports tokens, seconds and speculation counters of each call."""

    def __init__(self, model: str, speculative_config: dict[str, Any] | None, options: dict[str, Any]) -> None:
        from vllm import LLM

        # Statistics are off by default in offline use, and the counters with them.
        self.llm = LLM(model=model, speculative_config=speculative_config, disable_log_stats=False, **options)
        self.tokenizer = self.llm.get_tokenizer()
        self.is_own = (speculative_config or {}).get("method") == "adaptivespec"

    def encode(self, text: str) -> list[int]:
        """Token ids of a user turn; plain text for a model without a chat template."""
        if self.tokenizer.chat_template is None:
            return list(self.tokenizer.encode(text))
        rendered = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
        )
        return list(self.tokenizer.encode(rendered, add_special_tokens=False))

    def counters(self) -> dict[str, int]:
        """Running totals: vLLM's, and with the prefix `own_` those of AdaptiveSpec's worker."""
        values = {metric.name: metric.value for metric in self.llm.get_metrics() if hasattr(metric, "value")}
        totals = {key: int(values[name]) for key, name in VLLM_COUNTERS.items() if name in values}
        stats = self.stats()
        return totals | {f"own_{key}": int(stats[key]) for key in OWN_COUNTERS if key in stats}

    def stats(self) -> dict[str, Any]:
        """Running totals and what was learned, of AdaptiveSpec's worker; empty for other engines."""
        return self.llm.collective_rpc("adaptivespec_stats")[0] if self.is_own else {}

    def run(self, prompts: list[str], max_tokens: int, ignore_eos: bool) -> dict[str, Any]:
        """Generate greedily for all prompts at once; rendering and tokenising are not timed, prefill is."""
        from vllm import SamplingParams, TokensPrompt

        inputs = [TokensPrompt(prompt_token_ids=self.encode(text)) for text in prompts]
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=ignore_eos)
        self.llm.reset_prefix_cache()  # or a second round of the same prompts would skip its prefill
        before = self.counters()
        start = time.perf_counter()
        outputs = self.llm.generate(inputs, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        return {
            "seconds": seconds,
            "token_ids": [list(output.outputs[0].token_ids) for output in outputs],
            "counters": difference(before, self.counters()),
            "peak_rss_mib": peak_rss_mib(),
        }

    def serve(self, prompts: list[str], max_tokens: int, arrivals: list[float], limit: int | None) -> dict[str, Any]:
        """Serve greedily what arrives over time, every answer `max_tokens` long; see `drive`."""
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        inputs = [tokens_input(self.encode(text)) for text in prompts]
        sampling = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
        )
        engine = self.llm.llm_engine
        self.llm.reset_prefix_cache()
        before = self.counters()
        outputs, times = drive(
            engine, lambda index: engine.add_request(str(index), inputs[index], sampling), arrivals, limit
        )
        return {
            "seconds": max(finished for _, _, finished in times),
            "token_ids": [list(outputs[index].outputs[0].token_ids) for index in range(len(prompts))],
            "counters": difference(before, self.counters()),
            "peak_rss_mib": peak_rss_mib(),
            "times": times,
        }


def serve(read_line: Callable[[], str], reply: Callable[[dict[str, Any]], None]) -> None:
    """Build the engine from the first line, then answer one line after the other until there are no more."""
    start = time.perf_counter()
    engine = MeasuredEngine(**json.loads(read_line()))
    restart_peak_rss()
    reply({"seconds": time.perf_counter() - start, "peak_rss_mib": peak_rss_mib()})
    while line := read_line():
        request = json.loads(line)
        if "stats" in request:
            reply(engine.stats())
        else:
            reply(engine.serve(**request) if "arrivals" in request else engine.run(**request))


def main() -> None:
    """Entry point: the numbers of the two pipes are the arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("requests", type=int)
    parser.add_argument("replies", type=int)
    options = parser.parse_args()
    with os.fdopen(options.requests) as requests, os.fdopen(options.replies, "w", buffering=1) as replies:
        serve(requests.readline, lambda answer: print(json.dumps(answer), file=replies, flush=True))


if __name__ == "__main__":
    main()
