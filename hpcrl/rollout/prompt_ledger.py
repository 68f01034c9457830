"""The ledger of prompts: every prompt drawn is open until it is closed, exactly once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from hpcrl.rollout.types import PromptOutcome


@dataclass(frozen=True, slots=True)
class ClosedPrompt:
    """How one prompt ended. `epoch` and `row` are its origin; `reason` is free text ("std", "312 tokens")."""

    uid: int
    epoch: int
    row: int
    domain: str
    outcome: PromptOutcome
    reason: str = ""


class PromptLedger:
    """Open prompts by uid, and counts of the closed ones."""

    def __init__(self) -> None:
        self._next_uid = 0
        self._open: dict[int, tuple[int, int, str]] = {}
        self._counts: Counter[tuple[str, str, str]] = Counter()

    def open(self, epoch: int, row: int, domain: str) -> int:
        """Draw a prompt; returns its uid."""
        uid = self._next_uid
        self._next_uid += 1
        self._open[uid] = (epoch, row, domain)
        return uid

    def close_prompt(self, uid: int, outcome: PromptOutcome, reason: str = "") -> ClosedPrompt:
        """Close an open prompt; returns the record."""
        assert uid in self._open, f"prompt {uid} is {'closed already' if uid < self._next_uid else 'not drawn yet'}"
        epoch, row, domain = self._open.pop(uid)
        self._counts[domain, outcome.value, reason if outcome is PromptOutcome.FILTERED else ""] += 1
        return ClosedPrompt(uid, epoch, row, domain, outcome, reason)

    def origin(self, uid: int) -> tuple[int, int]:
        """(epoch, row) of an open prompt. KeyError if it is not open."""
        epoch, row, _ = self._open[uid]
        return epoch, row

    @property
    def open_uids(self) -> list[int]:
        """Uids of the open prompts, ascending."""
        return sorted(self._open)

    @property
    def num_drawn(self) -> int:
        """Prompts drawn over the whole run."""
        return self._next_uid

    def counts(self, domain: str | None = None) -> dict[str, int]:
        """PromptOutcome -> number of prompts closed with it (of one domain)."""
        totals = dict.fromkeys((d.value for d in PromptOutcome), 0)
        for (name, outcome, _), count in self._counts.items():
            if domain in (None, name):
                totals[outcome] += count
        return totals

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state."""
        return {
            "next_uid": self._next_uid,
            "open": [[uid, *origin] for uid, origin in sorted(self._open.items())],
            "counts": [[*key, count] for key, count in sorted(self._counts.items())],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state`."""
        self._next_uid = state["next_uid"]
        self._open = {uid: (epoch, row, domain) for uid, epoch, row, domain in state["open"]}
        self._counts = Counter({(domain, kind, why): count for domain, kind, why, count in state["counts"]})
