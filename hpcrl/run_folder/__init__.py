"""The run folder and its single owner. Imports no torch.

    config.yaml   the effective configuration        facts.json   versions, host and start of every attempt
    owners/NNNN   the owner of attempt NNNN          finished.json   written when the run reached its end
    plan.txt      the plan of the newest attempt

The same configuration resumes the run; a different one is refused with the differences, unless the start opens a branch
(branches.py). The owner of an attempt is the process that opened the run, or its Slurm job, whose state Slurm is
queried for. An owner's record is created with O_EXCL under the number after the last attempt, which must have ended or
died, so only one of two simultaneous launches succeeds. The highest number owns the run; check_owner verifies this
before every commit, so a superseded attempt commits nothing. A submitted job that still waits also holds the run
(slurm/submitted.json).
"""

from hpcrl.run_folder.branches import BRANCH_KEYS, branches_of, changed_keys, newest_branch, settle_branch
from hpcrl.run_folder.changes import ENGINE_KEYS, MAY_CHANGE, division_keys, stored_config
from hpcrl.run_folder.opening import RunState, check_run, open_run
from hpcrl.run_folder.ownership import SupersededError, check_owner, close_run, lives_as_job, process_lives
from hpcrl.run_folder.records import (
    AGENT,
    CONFIG,
    FACTS,
    FINISHED,
    LOGS,
    OUTCOME,
    OWNERS,
    PLAN,
    SLURM,
    SUBMITTED,
    VERDICT,
    counted_image_tokens,
    finish_run,
    hang_path,
    last_end,
    log_folder,
    read_finished,
    read_owner,
    read_record,
    read_refusal,
    record_refusal,
    record_submission,
    submitted_jobs,
    world_folder,
)

__all__ = [
    "AGENT",
    "BRANCH_KEYS",
    "CONFIG",
    "ENGINE_KEYS",
    "FACTS",
    "FINISHED",
    "LOGS",
    "MAY_CHANGE",
    "OUTCOME",
    "OWNERS",
    "PLAN",
    "SLURM",
    "SUBMITTED",
    "VERDICT",
    "RunState",
    "SupersededError",
    "branches_of",
    "changed_keys",
    "check_owner",
    "check_run",
    "close_run",
    "counted_image_tokens",
    "division_keys",
    "finish_run",
    "hang_path",
    "last_end",
    "lives_as_job",
    "log_folder",
    "newest_branch",
    "open_run",
    "process_lives",
    "read_finished",
    "read_owner",
    "read_record",
    "read_refusal",
    "record_refusal",
    "record_submission",
    "settle_branch",
    "stored_config",
    "submitted_jobs",
    "world_folder",
]
