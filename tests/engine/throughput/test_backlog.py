"""What the draft has yet to read, by hand."""

from __future__ import annotations

import numpy as np
import torch

from vllm_adaptivespec.runner_v1.backlog import DraftBacklog, Reading, passes


def test_passes_keep_the_order_and_the_size() -> None:
    readings = [Reading(0, 3, 5), Reading(1, 0, 9), Reading(4, 7, 8)]
    assert passes(readings, 100) == [readings]
    assert passes(readings, 4) == [
        [Reading(0, 3, 5), Reading(1, 0, 2)],
        [Reading(1, 2, 6)],
        [Reading(1, 6, 9), Reading(4, 7, 8)],
    ]


def test_missing_from() -> None:
    backlog = DraftBacklog(8, 3, torch.float32)
    slots = np.array([5, 2, 7])
    assert backlog.missing_from(slots) is None  # nothing is known of them
    backlog.keep(torch.tensor(slots), torch.ones(3, 3))
    assert backlog.missing_from(slots) == 0
    backlog.cached(torch.tensor([5]))
    assert backlog.missing_from(slots) == 1
    backlog.cached(torch.tensor([2, 7]))
    assert backlog.missing_from(slots) == 3
    backlog.keep(torch.tensor([2]), torch.zeros(1, 3))  # written anew by another request
    assert backlog.missing_from(slots) == 1
    assert backlog.missing_from(np.array([], dtype=np.int64)) == 0


def test_states_come_back() -> None:
    backlog = DraftBacklog(8, 2, torch.float32)
    backlog.keep(torch.tensor([6, 1]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert backlog.states[torch.tensor([1, 6])].tolist() == [[3.0, 4.0], [1.0, 2.0]]
