"""Reasons to end a run at a step boundary."""

from __future__ import annotations

import math
import signal

import pytest

from hpcrl.controller.deadline import Deadline
from hpcrl.controller.guard import Guard, MismatchError, NoProgress
from hpcrl.metrics.stats import Stat, Stats

pytestmark = pytest.mark.usefixtures("console")

GOOD = {"actor/total_loss": Stat(0.5, 1.0), "actor/skipped_update": Stat(1.0, 4.0)}
NAN = {"actor/total_loss": Stat(math.nan, 1.0)}
SKIPPED = {"actor/total_loss": Stat(0.5, 1.0), "actor/skipped_update": Stat(4.0, 4.0)}

SILENT = {"critic/advantages/*": Stat(0.0, 8.0, 0.0, 0.0), "critic/rewards/*": Stat(0.0, 8.0, 0.0, 0.0)}
LOUD = {"critic/advantages/*": Stat(0.0, 8.0, -1.0, 1.0), "critic/rewards/*": Stat(4.0, 8.0, 0.0, 1.0)}
EMPTY = {"actor/empty_updates": Stat(2.0, 1.0), "actor/difficulty_mask_ratio": Stat(0.0, 8.0)}


class Superseded(Exception):
    pass


def make_guard(
    end_s: float = math.inf,
    save_s: float = 0.0,
    lead_s: float = 0.0,
    owned: bool = True,
    max_mismatch: float | None = None,
) -> Guard:
    """The guard of a job that ends `end_s` from now."""

    def fence() -> None:
        if not owned:
            raise Superseded

    environ = {"SLURM_JOB_ID": "7", "HPCRL_JOB_END": str(1000.0 + end_s)} if end_s < math.inf else {}
    return Guard(fence, lambda: save_s, lead_s, Deadline(environ, clock=lambda: 1000.0), max_mismatch)


@pytest.mark.parametrize(
    ("steps", "ends"),
    [
        ([NAN, NAN], ""),
        ([NAN, NAN, GOOD, NAN, NAN], ""),
        ([GOOD] * 5, ""),
        ([{}] * 5, ""),
        ([GOOD, NAN, NAN, NAN], "steps 2 to 4: actor/total_loss is nan; there is no checkpoint before"),
        ([NAN, SKIPPED, SKIPPED], "steps 1 to 3: all 4 updates were skipped"),
    ],
)
def test_consecutive_steps_that_change_nothing_end_the_run(steps: list[Stats], ends: str) -> None:
    assert ends in _progress(steps) and bool(ends) == bool(_progress(steps))


@pytest.mark.parametrize(
    ("steps", "warned"),
    [
        ([SILENT] * 4, ""),
        ([SILENT] * 4 + [LOUD] + [SILENT] * 4, ""),
        ([{}] * 9, ""),
        ([SILENT | {"loss/ce": Stat(3.0, 4.0)}] * 9, ""),
        ([SILENT | {"loss/ce": Stat(0.0, 4.0)}] * 9, "steps 1 to 5 had no signal"),
        ([LOUD, *[SILENT] * 9], "steps 2 to 6 had no signal (reward 0 on average): all responses to a prompt got"),
        ([{"pairs/count": Stat(0.0, 1.0)}] * 9, "the same reward, so there are no pairs; use prompts"),
        ([{"pairs/count": Stat(2.0, 1.0)}] * 9, ""),
    ],
)
def test_steps_without_a_signal_are_reported_once(
    steps: list[Stats], warned: str, capsys: pytest.CaptureFixture[str]
) -> None:
    guard = make_guard()
    for step, stats in enumerate(steps, 1):
        guard.check_progress(step, stats)
    told = capsys.readouterr().out
    assert warned in told and told.count("had no signal") == bool(warned)


@pytest.mark.parametrize(
    ("steps", "ends"),
    [
        (
            [EMPTY] * 20,
            "steps 1 to 20: masks left no response to learn from (shares kept: actor/difficulty_mask_ratio 0)",
        ),
        ([GOOD, *[EMPTY] * 20], "steps 2 to 21: masks"),
        ([*[EMPTY] * 19, GOOD, *[EMPTY] * 19], ""),
        ([EMPTY | GOOD] * 30, ""),  # some mini-batches were empty
        ([{}] * 30, ""),  # only the critic is trained
    ],
)
def test_masks_that_drop_every_token_end_the_run(steps: list[Stats], ends: str) -> None:
    assert _progress(steps).startswith(f"no progress in {ends}" if ends else "") and bool(ends) == bool(
        _progress(steps)
    )


@pytest.mark.parametrize(
    ("bound", "total", "count", "ends"),
    [
        (0.05, 1.0, 20.0, False),
        (0.0499, 1.0, 20.0, True),
        (0.05, math.nan, 20.0, True),
        (0.05, 0.0, 0.0, False),  # every token is stale
        (None, 1.0, 1.0, False),
        (0.0, 0.0, 20.0, False),
    ],
)
def test_a_mean_probability_difference_above_the_bound_ends_the_run(
    bound: float | None, total: float, count: float, ends: bool
) -> None:
    stats = {"mismatch/diff/*": Stat(total, count, 0.0, 0.75), "mismatch/kl_k3": Stat(0.5, count)}
    guard = make_guard(max_mismatch=bound)
    guard.check_mismatch(3, {})  # a pipeline that generates nothing
    if not ends:
        return guard.check_mismatch(3, stats)
    with pytest.raises(MismatchError) as error:
        guard.check_mismatch(3, stats)
    for part in ("step 3", "20 tokens that weights 2 wrote", f"trainer.max_mismatch={bound:g}", "0.75", "KL 0.025"):
        assert part in str(error.value)


def test_only_the_first_signal_counts() -> None:
    guard = make_guard()
    assert guard.must_stop() == ""
    guard.stop(signal.SIGUSR1)
    guard.stop(signal.SIGTERM)
    assert (guard.must_stop(), guard.stop_signal) == ("SIGUSR1", signal.SIGUSR1)


def test_no_step_begins_that_the_job_has_no_time_for() -> None:
    assert _why(17.5) == ""  # 1.2 x (8 + 2) + 5
    assert _why(10.0) == "the job's end, which is 10 s away (another step with its save takes up to 17 s)"


def test_whether_the_warning_leaves_enough_time_is_reported_once(capfd: pytest.CaptureFixture[str]) -> None:
    guard = make_guard(1000.0, save_s=2.0, lead_s=60.0)
    guard.before_step()
    guard.after_step(8.0)
    guard.before_step()
    guard.before_step()
    assert capfd.readouterr().out.count("with 60 s of notice (cluster.signal_lead_s) no step is lost") == 1


def test_a_superseded_attempt_begins_no_step() -> None:
    with pytest.raises(Superseded):
        make_guard(owned=False).before_step()


def _progress(steps: list[Stats]) -> str:
    """The guard's reason to end the run after these steps; empty if it may continue."""
    guard = make_guard()
    try:
        for number, stats in enumerate(steps, 1):
            guard.check_progress(number, stats)
    except NoProgress as error:
        return str(error)
    return ""


def _why(end_s: float) -> str:
    guard = make_guard(end_s, save_s=2.0)
    guard.after_step(8.0)
    return guard.must_stop()


def test_a_divergence_names_the_checkpoints_before_it() -> None:
    guard = Guard(lambda: None, lambda: 0.0, 0.0, Deadline({}), saved=lambda: [20, 40, 42])
    with pytest.raises(NoProgress, match=r"resume_from=40 trainer\.lr=.*\(checkpoints of steps 20, 40\)$"):
        for step in range(40, 44):
            guard.check_progress(step, GOOD if step == 40 else NAN)
