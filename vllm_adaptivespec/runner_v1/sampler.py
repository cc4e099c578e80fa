"""Acceptance inside vLLM's sampling step: gives ``core``'s walk the target's choices, row by row."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import LogitsProcessor, LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import LogitBiasLogitsProcessor, MinTokensLogitsProcessor
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from ..core.acceptance import MarginRule, Walk, log_ratios
from ..core.tree import ROOT, DraftTree

PLACEHOLDER = -1
"""Pads a request's row of sampled tokens; vLLM's own value."""


class PathMinTokens(LogitsProcessor):
    """``min_tokens`` for rows further down a tree: stop ids stay masked while output plus path is too short.

    As in vLLM, a grammar that allows nothing but a stop id has its way.

    Args:
        rows, tokens: what to mask.
        yields: for each, whether its request has a grammar.
    """

    def __init__(self, rows: Sequence[int], tokens: Sequence[int], yields: Sequence[bool]) -> None:
        self.rows = torch.tensor(rows, dtype=torch.int64)
        self.tokens = torch.tensor(tokens, dtype=torch.int64)
        self.yields = torch.tensor(yields, dtype=torch.bool)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        before = logits[self.rows, self.tokens]
        logits[self.rows, self.tokens] = -torch.inf
        if self.yields.any():
            nothing_left = self.yields & torch.isneginf(logits[self.rows]).all(dim=-1)
            logits[self.rows[nothing_left], self.tokens[nothing_left]] = before[nothing_left]
        return logits

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: object) -> None:
        """Nothing to keep: an instance lives for one level."""


@dataclass
class LevelOutput:
    """Target choices of some requests' current rows."""

    choices: list[int]
    ratio_logits: torch.Tensor | None
    """``[num_active, vocab]`` processed logits for the margin rule, if some request is lossy."""
    logprob_rows: torch.Tensor | None
    """``[num_active, vocab]`` what vLLM's processed log-prob modes report, if asked for."""


class TreeSampler(RejectionSampler):
    """Replaces vLLM's rejection sampler; becomes one by having its class set on the stock object.

    Set ``trees`` and ``rules`` (by batch index) before each call; ``walks`` has the result of every request with
    drafts afterwards. A request with drafts but no tree is verified as an exact chain.
    """

    trees: dict[int, DraftTree]
    rules: dict[int, MarginRule]
    walks: dict[int, Walk]

    def init_adaptivespec(self) -> None:
        self.trees, self.rules, self.walks = {}, {}, {}

    def forward(
        self,
        metadata: SpecDecodeMetadata,
        draft_probs: torch.Tensor | None,
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
    ) -> SamplerOutput:
        """Walk every request's tree.

        Args:
            metadata: stock layout; request ``i`` owns ``num_draft_tokens[i] + 1`` consecutive rows, its root's first.
            draft_probs: not used; trees are deterministic.
            logits: ``[sum(num_draft_tokens + 1), vocab]`` target logits.
            sampling_metadata: of the whole batch.

        Returns:
            ``sampled_token_ids`` ``[num_requests, longest]`` int32, padded with -1, and the emitted tokens'
            log-probs in row-major order.
        """
        num_drafts = metadata.num_draft_tokens
        # Rows here are a request's next token, as without speculation: vLLM's chain-wise reading of the drafts (which
        # the thinking budget and penalties would use) must not see them.
        sampling_metadata = replace(sampling_metadata, spec_token_ids=None)
        if not any(num_drafts):
            self.walks = {}
            return self.sampler(logits=logits, sampling_metadata=sampling_metadata, predict_bonus_token=True)
        walks = self._new_walks(metadata)
        first_rows = list(itertools.accumulate((n + 1 for n in num_drafts), initial=0))[:-1]
        if _needs_processing(sampling_metadata):
            logprob_rows = self._walk_by_level(walks, first_rows, logits, sampling_metadata)
        else:
            self._walk_greedy(walks, first_rows, logits)
            logprob_rows = {}
        self.walks = {i: walk for i, walk in enumerate(walks) if num_drafts[i]}
        return self._output(walks, first_rows, logits, sampling_metadata, logprob_rows)

    def _new_walks(self, metadata: SpecDecodeMetadata) -> list[Walk]:
        tokens = iter(metadata.draft_token_ids.tolist())
        walks = []
        for i, n in enumerate(metadata.num_draft_tokens):
            drafted = list(itertools.islice(tokens, n))
            tree = self.trees.get(i) or DraftTree.chain(drafted)
            walks.append(Walk(tree, self.rules.get(i, MarginRule())))
        return walks

    def _walk_greedy(self, walks: list[Walk], first_rows: list[int], logits: torch.Tensor) -> None:
        """All requests greedy, nothing to apply: every row's choice is one argmax, ratios are two gathers."""
        choices_tensor = self.sampler.greedy_sample(logits.to(torch.float32))
        choices = choices_tensor.tolist()
        rows: list[int] = []
        tokens: list[int] = []
        for walk, first in zip(walks, first_rows, strict=True):
            rows += [first + 1 + parent for parent in walk.tree.parents]
            tokens += walk.tree.tokens
        ratios = log_ratios(logits, torch.tensor(rows), torch.tensor(tokens), choices_tensor).tolist()
        offset = 0
        for walk, first in zip(walks, first_rows, strict=True):
            own = ratios[offset : offset + len(walk.tree)]
            offset += len(walk.tree)
            while not walk.done:
                walk.advance(choices[first + 1 + walk.node], own)

    def _walk_by_level(
        self, walks: list[Walk], first_rows: list[int], logits: torch.Tensor, sampling_metadata: SamplingMetadata
    ) -> dict[tuple[int, int], torch.Tensor]:
        """Sample one level of all walks at a time, so that every emitted token draws its request's noise once.

        Returns:
            For processed log-prob modes, the reported row of each (request, emitted token).
        """
        reported: dict[tuple[int, int], torch.Tensor] = {}
        active = list(range(len(walks)))
        while active:
            rows = torch.tensor([first_rows[i] + 1 + walks[i].node for i in active])
            level = self._sample_level(logits[rows].to(torch.float32), active, walks, sampling_metadata)
            for row, i in enumerate(active):
                walk = walks[i]
                if level.logprob_rows is not None:
                    reported[i, len(walk.emitted)] = level.logprob_rows[row]
                ratios = None
                if level.ratio_logits is not None and walk.tree.children[walk.node]:
                    ratios = self._child_ratios(walk, level.ratio_logits[row])
                walk.advance(level.choices[row], ratios)
            active = [i for i in active if not walks[i].done]
        return reported

    @staticmethod
    def _child_ratios(walk: Walk, row: torch.Tensor) -> list[float]:
        """``[num_nodes]`` log ratios, filled for the children of the walk's node only."""
        children = walk.tree.children[walk.node]
        tokens = torch.tensor([walk.tree.tokens[c] for c in children])
        ratios = [-torch.inf] * len(walk.tree)
        values = log_ratios(row.unsqueeze(0), torch.zeros_like(tokens), tokens).tolist()
        for child, value in zip(children, values, strict=True):
            ratios[child] = value
        return ratios

    def _sample_level(
        self, logits: torch.Tensor, active: list[int], walks: list[Walk], sampling_metadata: SamplingMetadata
    ) -> LevelOutput:
        """The target's choices for one row per active request, through vLLM's own sampler."""
        at_root = all(walks[i].node == ROOT and not walks[i].emitted for i in active)
        if not at_root:
            sampling_metadata = _for_rows(sampling_metadata, active, [walks[i].emitted for i in active])
        logits = self.sampler.apply_logits_processors(logits, sampling_metadata, True)
        lossy = any(not walks[i].rule.is_exact for i in active)
        unscaled = logits.clone() if lossy else None
        sampled, processed = self.sampler.sample(logits, sampling_metadata)
        ratio_logits = None if unscaled is None else _truncated(unscaled, sampling_metadata)
        wants_rows = self.is_processed_logprobs_mode and (
            sampling_metadata.max_num_logprobs is not None or bool(sampling_metadata.logprob_token_ids)
        )
        return LevelOutput(sampled.tolist(), ratio_logits, processed if wants_rows else None)

    def _output(
        self,
        walks: list[Walk],
        first_rows: list[int],
        logits: torch.Tensor,
        sampling_metadata: SamplingMetadata,
        reported: dict[tuple[int, int], torch.Tensor],
    ) -> SamplerOutput:
        longest = max(len(walk.emitted) for walk in walks)
        sampled = torch.tensor(
            [walk.emitted + [PLACEHOLDER] * (longest - len(walk.emitted)) for walk in walks], dtype=torch.int32
        )
        logprobs: LogprobsTensors | None = None
        num_logprobs, scored_tokens = sampling_metadata.max_num_logprobs, sampling_metadata.logprob_token_ids
        if num_logprobs is not None or scored_tokens:
            # Padding repeats a request's last row; vLLM filters it out with the placeholders.
            steps = [(i, min(t, len(w.emitted) - 1)) for i, w in enumerate(walks) for t in range(longest)]
            if reported:
                values = torch.stack([reported[step] for step in steps])
            else:
                visited = [[ROOT, *walk.path] for walk in walks]
                rows = logits[torch.tensor([first_rows[i] + 1 + visited[i][t] for i, t in steps])].to(torch.float32)
                values = rows if self.is_logits_logprobs_mode else self.sampler.compute_logprobs(rows)
            tokens = sampled.flatten().clamp(min=0).to(torch.int64)
            if scored_tokens:  # as in vLLM, these win over a number of log-probs in the same batch
                rows_of = {i * longest: ids for i, ids in scored_tokens.items()}
                logprobs = self.sampler.gather_specific_token_logprobs(values, rows_of, tokens)
            else:
                logprobs = self.sampler.gather_logprobs(values, num_logprobs, tokens)
        return SamplerOutput(sampled_token_ids=sampled, logprobs_tensors=logprobs)


def _needs_processing(sampling_metadata: SamplingMetadata) -> bool:
    """Whether rows' choices are more than the argmax of their logits."""
    if not sampling_metadata.all_greedy or not sampling_metadata.no_penalties:
        return True
    if sampling_metadata.bad_words_token_ids or sampling_metadata.allowed_token_ids_mask is not None:
        return True
    holder = sampling_metadata.thinking_budget_state_holder
    if holder is not None and holder.has_tracked_requests():
        return True
    for processor in sampling_metadata.logitsprocs.non_argmax_invariant:
        if isinstance(processor, MinTokensLogitsProcessor):
            if processor.min_toks:
                return True
        elif not isinstance(processor, LogitBiasLogitsProcessor) or processor.biases:
            return True
    return False


def _for_rows(sampling_metadata: SamplingMetadata, requests: list[int], emitted: list[list[int]]) -> SamplingMetadata:
    """The sampling metadata of some requests, each one level or more into its tree.

    Args:
        requests: batch indices; row ``r`` belongs to ``requests[r]``.
        emitted: the tokens each has emitted in this step, which penalties and bad words must count.
    """
    index = torch.tensor(requests)

    def pick(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values[index]

    outputs = sampling_metadata.output_token_ids
    penalties = {}
    if not sampling_metadata.no_penalties:
        names = ("frequency_penalties", "presence_penalties", "repetition_penalties")
        penalties = {name: getattr(sampling_metadata, name)[index] for name in names}
    generators = sampling_metadata.generators
    return replace(
        sampling_metadata,
        temperature=pick(sampling_metadata.temperature),
        top_p=pick(sampling_metadata.top_p),
        top_k=pick(sampling_metadata.top_k),
        generators={row: generators[i] for row, i in enumerate(requests) if i in generators},
        prompt_token_ids=pick(sampling_metadata.prompt_token_ids),
        **penalties,
        output_token_ids=[[*outputs[i], *new] for i, new in zip(requests, emitted, strict=True)] if outputs else [],
        allowed_token_ids_mask=pick(sampling_metadata.allowed_token_ids_mask),
        bad_words_token_ids={
            row: sampling_metadata.bad_words_token_ids[i]
            for row, i in enumerate(requests)
            if i in sampling_metadata.bad_words_token_ids
        },
        logitsprocs=_path_processors(sampling_metadata.logitsprocs, requests, emitted),
        logprob_token_ids=None,
        spec_token_ids=None,
        # Requests with a thinking budget are not drafted for, so none of them gets past its root.
        thinking_budget_state_holder=None,
    )


def _path_processors(processors: LogitsProcessors, requests: list[int], emitted: list[list[int]]) -> LogitsProcessors:
    """``min_tokens`` along the path; min_p, logit bias and custom processors are refused with speculation by vLLM."""
    rows: list[int] = []
    tokens: list[int] = []
    yields: list[bool] = []
    for processor in processors.non_argmax_invariant:
        if not isinstance(processor, MinTokensLogitsProcessor):
            continue
        for row, i in enumerate(requests):
            min_tokens, output, stop_ids, has_grammar = processor.min_toks.get(i, (0, (), (), False))
            if len(output) + len(emitted[row]) < min_tokens:
                rows += [row] * len(stop_ids)
                tokens += stop_ids
                yields += [has_grammar] * len(stop_ids)
    return LogitsProcessors([PathMinTokens(rows, tokens, yields)] if rows else [])


def _truncated(logits: torch.Tensor, sampling_metadata: SamplingMetadata) -> torch.Tensor:
    """Processed logits as the margin rule sees them: scaled by temperature, top-k and top-p applied."""
    if sampling_metadata.all_greedy or sampling_metadata.temperature is None:
        return logits
    temperature = sampling_metadata.temperature
    greedy = temperature < 1e-5
    scaled = logits / torch.where(greedy, 1.0, temperature).unsqueeze(1)
    truncated = apply_top_k_top_p(scaled.clone(), sampling_metadata.top_k, sampling_metadata.top_p)
    return torch.where(greedy.unsqueeze(1), scaled, truncated)
