"""The run folder that explains itself and has one owner. Imports no torch.

    config.yaml   the effective configuration        facts.json   versions, host and start of every attempt
    owners/NNNN   who holds attempt NNNN             finished.json   made when the run reached its end

The same configuration again resumes; another one is refused with the difference. An attempt is owned by the process
that opened the run, or the Slurm job it is in: its record is made with O_EXCL under the number after the one that was
found ended or dead, so of two launches that find it so one gets through. Whether a job lives is asked of Slurm. The
owner is whoever has the highest number; check_owner asks again before every commit, so a superseded attempt commits
nothing. A job that was submitted for the run and still waits holds it too (slurm/submitted.json).
"""

from hpcrl.rundir.changes import MAY_CHANGE, division_keys, stored_config
from hpcrl.rundir.opening import RunState, check_run, open_run
from hpcrl.rundir.ownership import SupersededError, check_owner, close_run, lives_as_job, process_lives
from hpcrl.rundir.records import (
    AGENT,
    CONFIG,
    FACTS,
    FINISHED,
    OUTCOME,
    OWNERS,
    SLURM,
    SUBMITTED,
    VERDICT,
    finish_run,
    last_end,
    read_finished,
    read_owner,
    read_record,
    record_submission,
    submitted_jobs,
    world_folder,
)

__all__ = [
    "AGENT",
    "CONFIG",
    "FACTS",
    "FINISHED",
    "MAY_CHANGE",
    "OUTCOME",
    "OWNERS",
    "SLURM",
    "SUBMITTED",
    "VERDICT",
    "RunState",
    "SupersededError",
    "check_owner",
    "check_run",
    "close_run",
    "division_keys",
    "finish_run",
    "last_end",
    "lives_as_job",
    "open_run",
    "process_lives",
    "read_finished",
    "read_owner",
    "read_record",
    "record_submission",
    "stored_config",
    "submitted_jobs",
    "world_folder",
]
