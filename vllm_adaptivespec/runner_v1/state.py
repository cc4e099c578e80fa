"""What the V1 adapter keeps for each request, and for the requests with drafts in the current step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.sampling_params import SamplingParams

from ..config import AdaptiveSpecConfig, RequestOptions
from ..core.acceptance import MarginRule
from ..core.branches import BranchLayout
from ..core.calibration import RequestHistory
from ..core.policy import AcceptanceHistory, TreeShape
from ..core.tree import DraftTree
from ..core.valued_growth import DraftedNodes
from .branch_blocks import RequestBranches


@dataclass
class RequestSpeculation:
    """Speculation state of one request, by request id.

    Args:
        rule: how lossy its acceptance may be.
        history: its rolling acceptance rate.
        drafts: False where nothing may be drafted for it.
        chain_only: True where its masks are computed along the list of drafts, so that only chains are right.
        max_tokens: most tokens it may still be asked for in all; None for no limit.
        tree: drafted last, not yet verified.
        outcomes: what the throughput policy knows of its past drafts.
        drafted: what that policy assumed of the tree's nodes.
        draft_read: leading tokens that the draft has read; None where it has yet to be found out, -1 where some can
            never be. Kept under the throughput policy only.
    """

    rule: MarginRule
    history: AcceptanceHistory
    drafts: bool
    chain_only: bool
    max_tokens: int | None
    tree: DraftTree | None = None
    outcomes: RequestHistory = field(default_factory=RequestHistory)
    drafted: DraftedNodes | None = None
    draft_read: int | None = None

    @classmethod
    def new(cls, params: SamplingParams, config: AdaptiveSpecConfig) -> RequestSpeculation:
        options = RequestOptions.parse(params.extra_args, config)
        # vLLM tracks the thinking budget and scores given tokens along plain decoding steps only.
        plain = params.thinking_token_budget is not None or params.logprob_token_ids is not None
        return cls(
            rule=options.rule(config, frozenset(params.all_stop_token_ids)),
            history=config.history(),
            drafts=options.enabled and not plain,
            chain_only=params.structured_outputs is not None,
            max_tokens=params.max_tokens,
        )

    def take_tree(self, scheduled: list[int]) -> DraftTree:
        """The tree of the scheduled draft tokens, which may be a prefix of what was drafted.

        Drafts that are not ours (vLLM's -1 placeholders) or that changed on the way are verified as a chain.
        """
        tree, self.tree = self.tree, None
        if tree is not None and list(tree.tokens[: len(scheduled)]) == scheduled:
            if self.drafted is not None:
                self.drafted = self.drafted.subset(range(len(scheduled)))
            return tree.prefix(len(scheduled))
        self.drafted = None
        return DraftTree.chain(scheduled)

    def interrupt(self) -> None:
        """The request was preempted, or comes back from it: its cache is new."""
        self.tree = self.drafted = self.draft_read = None


@dataclass(frozen=True)
class Candidate:
    """A request that may be drafted for in this step: its index in the batch, and its limits."""

    request: int
    request_id: str
    speculation: RequestSpeculation
    limits: TreeShape


@dataclass
class StepTree:
    """One request's tree under verification in this step.

    Args:
        request: its index in the batch.
        tree: its nodes; node ``n``'s row is ``root_row + 1 + n``.
        root_row: row of the root in the batch.
        base: position of the root.
        branches: its branch blocks, if it holds any that are in use or kept up to date in this step.
        stash_start: where its root's row is in the stash of keys and values (nodes follow); -1 if not stashed.
    """

    request: int
    request_id: str
    speculation: RequestSpeculation
    tree: DraftTree
    root_row: int
    base: int
    branches: RequestBranches | None = None
    stash_start: int = -1
    accepted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.layout = BranchLayout(self.tree)
