"""The ledger of prompts."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrl.rollout.prompt_ledger import ClosedPrompt, PromptLedger
from hpcrl.rollout.types import PromptOutcome


def test_prompts_are_opened_and_settled():
    ledger = PromptLedger()
    assert [ledger.open(0, row, "d") for row in (5, 3, 9)] == [0, 1, 2]
    assert ledger.close_prompt(1, PromptOutcome.FILTERED, "std") == ClosedPrompt(
        1, 0, 3, "d", PromptOutcome.FILTERED, "std"
    )
    assert ledger.close_prompt(0, PromptOutcome.TRAINED) == ClosedPrompt(0, 0, 5, "d", PromptOutcome.TRAINED, "")
    assert ledger.open_uids == [2] and ledger.origin(2) == (0, 9) and ledger.num_drawn == 3
    assert ledger.counts() == {"trained": 1, "filtered": 1, "too_long": 0, "failed": 0}
    assert ledger.counts("other") == dict.fromkeys(("trained", "filtered", "too_long", "failed"), 0)


@pytest.mark.parametrize(("uid", "message"), [(0, "prompt 0 is closed already"), (1, "prompt 1 is not drawn yet")])
def test_a_prompt_is_settled_once_and_only_if_it_was_drawn(uid: int, message: str):
    ledger = PromptLedger()
    ledger.open(0, 0, "d")
    ledger.close_prompt(0, PromptOutcome.TRAINED)
    with pytest.raises(AssertionError, match=message):
        ledger.close_prompt(uid, PromptOutcome.FAILED)


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(list(PromptOutcome))), max_size=60))
def test_the_state_round_trips_and_accounting_stays_exact(moves: list):
    ledger = PromptLedger()
    ended_prompts = 0
    for keep, outcome in moves:
        ledger.open(0, ledger.num_drawn, "d")
        if len(ledger.open_uids) > keep:
            ledger.close_prompt(ledger.open_uids[0], outcome, "why")
            ended_prompts += 1
    assert ended_prompts == sum(ledger.counts().values())
    state = json.loads(json.dumps(ledger.state_dict()))
    again = PromptLedger()
    again.load_state_dict(state)
    assert again.state_dict() == ledger.state_dict() and again.counts() == ledger.counts()
    assert again.num_drawn == ended_prompts + len(again.open_uids)


def test_the_size_of_the_state_follows_open_prompts_and_not_the_epoch():
    ledger = PromptLedger()
    for row in range(20_000):
        ledger.close_prompt(ledger.open(0, row, "d"), PromptOutcome.FILTERED, "std")
    assert ledger.counts()["filtered"] == 20_000 and len(json.dumps(ledger.state_dict())) < 200
