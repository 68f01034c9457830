"""When a save begins, proceeds and is committed; the ranks here are writers without engines."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil
import pytest

from hpcrl.checkpoint.check import FileCheck
from hpcrl.checkpoint.commit import FileEntry, find_latest, seal_files
from hpcrl.checkpoint.state import read_state
from hpcrl.checkpoint.writer import Writer
from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import Config
from hpcrl.controller.checkpoints import CheckpointError, Checkpoints, NotSavedError
from hpcrl.controller.long_commands import Stalled
from hpcrl.messaging.dispatcher import Controller
from hpcrl.messaging.messages import (
    AbandonSave,
    CheckFiles,
    Command,
    Done,
    FinishCheck,
    FinishSave,
    LoadPending,
    LoadState,
    SavePending,
    SaveState,
)
from hpcrl.metrics.log import MetricsLog, read_metrics
from hpcrl.metrics.stats import scalar
from hpcrl.rollout.pending import read_pending, write_pending
from hpcrl.rollout.types import FinishReason, Sample
from hpcrl.run_folder import OWNERS, SupersededError, close_run, open_run
from hpcrl.system.files import steps_in
from hpcrl.workers.checkpointing import or_unwritten
from tests.children import children

pytestmark = pytest.mark.usefixtures("console")


class Algorithm:
    """The coefficients that an algorithm adapts."""

    def __init__(self) -> None:
        self.numbers: dict[str, float] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"algorithm": self.numbers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.numbers = state["algorithm"]


class Ranks:
    """Two trainer ranks, a replica of two and the data cursor, as far as the controller's saves see them."""

    command_s, check_s, idle = 60.0, 0.05, True

    def __init__(self) -> None:
        self.writers = {1: Writer(), 2: Writer()}
        self.cursor, self.algorithm = 0, Algorithm()
        self.waiting: list[Sample] = []  # of a generator rank
        self.held_again: dict[int, dict[int, Sample]] = {}  # by rank
        self.checks: dict[int, FileCheck] = {}
        self.shares: list[list[str]] = []
        self.loaded: list[str] = []
        self.while_loading: Callable[[], object] = lambda: None
        self.weights = b"weights"

    def state_dict(self) -> dict[str, Any]:
        return {"cursor": {"next": self.cursor}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.cursor = state["cursor"]["next"]

    def held(self) -> dict[int, list[int]]:
        return {3: [sample.id for sample in self.waiting]} if self.waiting else {}

    def describe(self, rank: int) -> str:
        return f"rank {rank} (trainer)"

    def call(self, commands: Mapping[int, Command], more_s: float = 0.0) -> dict[int, Done]:
        return {rank: self._answer(self.writers.get(rank), rank, command) for rank, command in commands.items()}

    def send(self, rank: int, command: Command) -> None:
        self.call({rank: command})

    def start(self, commands: Mapping[int, Command]) -> list[tuple[int, Command]]:
        return list(commands.items())

    def answered(self, started: list[tuple[int, Command]]) -> bool:
        return self.idle

    def finish(self, started: list[tuple[int, Command]]) -> dict[int, Done]:
        return self.call(dict(started))

    def _answer(self, writer: Writer | None, rank: int, command: Command) -> Done:
        if writer is None:
            return self._generator(rank, command)
        match command:
            case SaveState():
                writer.start(Path(command.folder), {f"shard_{rank}": self.weights})
            case FinishSave():
                return or_unwritten(0, lambda: self._finish(writer, command.wait_s))
            case AbandonSave():
                writer.abandon()
            case CheckFiles():
                entries = [FileEntry(*file) for file in command.files]
                self.checks[rank] = FileCheck(Path(command.folder), entries)
                self.shares.append([entry.path for entry in entries])
            case FinishCheck():
                if (damage := self.checks[rank].result(command.wait_s)) is None:
                    return Done(0, progress=self.checks[rank].progress())
                return Done(0, texts=[damage] if damage else [])
            case LoadState():
                self.loaded.append(Path(command.folder).name)
                self.while_loading()
        return Done(0)

    @staticmethod
    def _finish(writer: Writer, wait_s: float) -> Done:
        if (written := writer.result(wait_s)) is None:
            return Done(0, progress=writer.progress())
        files = [(entry.path, entry.size, entry.sha256) for entry in written.entries]
        return Done(0, {"time/save_write": scalar(written.seconds)}, files)

    def _generator(self, rank: int, command: Command) -> Done:
        match command:
            case SavePending():
                files = seal_files(Path(command.folder), [write_pending(Path(command.folder), rank, self.waiting)])
                return Done(0, files=[(entry.path, entry.size, entry.sha256) for entry in files])
            case LoadPending():
                self.held_again[rank] = read_pending(Path(command.folder), command.files, command.samples)
        return Done(0)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    for writer in made.writers.values():
        writer.close()


def make(tmp_path: Path, ranks: Ranks, **values: Any) -> Checkpoints:
    """The saves of a new attempt, with more values of its configuration; the previous one has ended."""
    for before in sorted((tmp_path / OWNERS).glob("[0-9]*"))[-1:]:
        close_run(tmp_path, int(before.name))
    ranks_of = {"trainer": {"num_ranks": 2}, "generator": {"num_ranks": 2, "colocate_with": None}}
    config = Config.model_validate({"save_every": 2, "layout": ranks_of, **values})
    layout = replace(RoleLayout.from_config(config), generator_tensor_parallel=2)
    attempt = open_run(config.model_dump(mode="json"), tmp_path, "auto").attempt
    controller = cast(Controller, ranks)
    return Checkpoints(controller, layout, config, tmp_path, attempt, ranks, [ranks.algorithm])


def last_writer() -> psutil.Process:
    """The writer process of the last rank that the controller asks."""
    return children("hpcrl.checkpoint.writer")[-1]


def test_a_save_belongs_to_its_step_and_is_committed_once_written(tmp_path: Path, ranks: Ranks) -> None:
    checkpoints, root = make(tmp_path, ranks), tmp_path / "checkpoints"
    assert checkpoints.expected_save_s() == 0
    checkpoints.maybe_save(1)
    assert not root.exists() and checkpoints.take_stats() == {}
    ranks.cursor = 20
    checkpoints.maybe_save(2)
    stats = checkpoints.take_stats()
    assert list(stats) == ["time/save"] and 0 < stats["time/save"].total < 60
    last_writer().suspend()
    ranks.cursor = 30
    start = time.perf_counter()
    checkpoints.maybe_save(3)
    assert time.perf_counter() - start < 5 and steps_in(root) == []
    last_writer().resume()
    while steps_in(root) == []:
        checkpoints.maybe_save(3)
    while not (stats := checkpoints.take_stats()):
        checkpoints.maybe_save(3)
    assert list(stats) == ["time/save_drain"]
    path, manifest, _ = find_latest(root)
    assert path is not None and manifest is not None and manifest.step == 2
    assert [entry.path for entry in manifest.files] == ["shard_1", "shard_2", "state.json"]
    assert read_state(path)["cursor"] == {"next": 20}, "the state of the step at which it began"
    assert checkpoints.expected_save_s() > 0


def test_a_save_contains_pending_rollouts(tmp_path: Path, ranks: Ranks) -> None:
    ranks.waiting = [sample_of(5, 3), sample_of(9, 4)]
    make(tmp_path, ranks).save(2)
    manifest = find_latest(tmp_path / "checkpoints").manifest
    assert manifest is not None
    sealed = [entry.path for entry in manifest.files]  # so that damage is noticed
    assert [name for name in sealed if name.startswith("pending")] == ["pending_rank0003.safetensors"]
    make(tmp_path, ranks).restore()
    assert sorted(ranks.held_again) == [3, 4], "every rank of the replica"
    for again in ranks.held_again.values():
        assert sorted(again) == [5, 9] and len(again[9].token_ids) == 4


def test_a_save_contains_the_algorithms_coefficients_bit_for_bit(tmp_path: Path, ranks: Ranks) -> None:
    checkpoints = make(tmp_path, ranks)
    saved = {"actor/kl_scale": 1.1 + 1e-15, "_reward_moments/mean/math": 1 / 3}
    ranks.algorithm.numbers = dict(saved)
    checkpoints.save(2)
    ranks.algorithm.numbers = {"actor/kl_scale": 2.0}
    make(tmp_path, ranks).restore()
    assert ranks.algorithm.numbers == saved


class LosingRanks(Ranks):
    """Two generators hold members of one group; the second is lost after both have written."""

    gone = False

    def held(self) -> dict[int, list[int]]:
        return {} if self.gone else {rank: [sample.id for sample in self.waiting] for rank in (3, 4)}

    def finish(self, started: list[tuple[int, Command]]) -> dict[int, Done]:
        answers = super().finish(started)
        if 4 in answers:
            self.gone, self.waiting = True, []
            del answers[4]
        return answers


def test_a_save_omits_groups_whose_replica_is_lost_while_saving(tmp_path: Path) -> None:
    ranks = LosingRanks()
    checkpoints = make(tmp_path, ranks)
    ranks.waiting = [sample_of(1, 2)]
    checkpoints.save(2)
    for writer in ranks.writers.values():
        writer.close()
    latest = find_latest(tmp_path / "checkpoints")
    assert ranks.gone and latest.manifest is not None and not latest.problems
    assert [entry.path for entry in latest.manifest.files] == ["shard_1", "shard_2", "state.json"]


def sample_of(sample_id: int, count: int) -> Sample:
    ones = np.ones(count, dtype=np.int32)
    return Sample(
        sample_id,
        FinishReason.STOP,
        token_ids=ones,
        loss_mask=ones.astype(bool),
        gen_logprobs=-0.5 * ones.astype(np.float32),
        versions=ones,
        turn_ids=ones,
    )


@pytest.mark.slow
def test_a_save_is_committed_within_a_long_step(tmp_path: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcrl.controller.checkpoints.POLL_EVERY_S", 0.0)
    checkpoints, root = make(tmp_path, ranks), tmp_path / "checkpoints"
    checkpoints.commit_if_written()
    ranks.cursor = 20
    checkpoints.maybe_save(2)
    ranks.cursor = 30
    last_writer().suspend()
    checkpoints.commit_if_written()
    last_writer().resume()
    ranks.idle = False
    time.sleep(1.0)
    checkpoints.commit_if_written()
    time.sleep(0.2)
    assert steps_in(root) == [], "the ranks have not answered yet"
    ranks.idle = True
    deadline = time.monotonic() + 30
    while not checkpoints.take_stats().get("time/save_drain") and time.monotonic() < deadline:
        checkpoints.commit_if_written()
        time.sleep(0.01)
    assert steps_in(root) == [2]
    path = find_latest(root).path
    assert path is not None and read_state(path)["cursor"] == {"next": 20}
    ranks.idle = False
    checkpoints.maybe_save(4)
    checkpoints.commit_if_written()
    checkpoints.save(5)
    assert steps_in(root) == [4, 5], "what was asked within the step is heard at its end"


@pytest.mark.slow
def test_the_next_save_waits_for_the_one_under_way(tmp_path: Path, ranks: Ranks) -> None:
    checkpoints, root = make(tmp_path, ranks), tmp_path / "checkpoints"
    checkpoints.maybe_save(2)
    last_writer().suspend()
    seen: list[int] = []
    threading.Timer(0.5, lambda: (seen.extend(steps_in(root)), last_writer().resume())).start()
    checkpoints.maybe_save(4)
    assert seen == [] and steps_in(root) == [2]
    checkpoints.save(4)
    checkpoints.save(4)
    assert steps_in(root) == [2, 4]
    checkpoints.save(5)
    assert steps_in(root) == [4, 5], "two are kept"


@pytest.mark.parametrize(("seconds", "saved"), [(0.0, 4), (3600.0, 5)])
def test_a_save_under_way_is_finished_when_time_is_short(
    tmp_path: Path, ranks: Ranks, seconds: float, saved: int
) -> None:
    checkpoints, root = make(tmp_path, ranks), tmp_path / "checkpoints"
    checkpoints.save(2)
    full = checkpoints.expected_save_s()
    last_writer().suspend()
    checkpoints.maybe_save(4)
    assert 0 < full <= checkpoints.expected_save_s(), "what is under way comes first"
    threading.Timer(0.2, last_writer().resume).start()
    assert checkpoints.save_within(5, seconds) == saved and steps_in(root)[-1] == saved


def test_short_time_changes_nothing_without_a_save_under_way(tmp_path: Path, ranks: Ranks) -> None:
    assert make(tmp_path, ranks).save_within(5, 0.0) == 5


def test_a_save_that_fails_during_training_is_raised_at_the_next_boundary(tmp_path: Path, ranks: Ranks) -> None:
    checkpoints, root = make(tmp_path, ranks), tmp_path / "checkpoints"
    checkpoints.save(2)
    last_writer().suspend()
    checkpoints.maybe_save(4)
    last_writer().kill()
    with pytest.raises(NotSavedError, match=rf"of step 4 not written to {root}: .*shard_2 was killed by SIGKILL"):
        for _ in range(1000):
            checkpoints.maybe_save(5)
            time.sleep(0.01)
    assert find_latest(root).path == root / "step_000002"


class SlowRanks(Ranks):
    """Ranks that answer late and report one more byte at each question until then."""

    command_s, asked = 0.4, 0

    def _answer(self, writer: Writer, rank: int, command: Command) -> Done:
        if isinstance(command, FinishSave | FinishCheck) and self.asked < 24:
            self.asked += 1
            time.sleep(command.wait_s)
            return Done(0, progress=(f"shard_{rank}", self.asked))
        return super()._answer(writer, rank, command)


@pytest.mark.slow
def test_a_save_may_take_longer_than_a_command(tmp_path: Path) -> None:
    slow = SlowRanks()
    start = time.monotonic()
    make(tmp_path, slow).save(2)
    assert time.monotonic() - start > 2 * slow.command_s and steps_in(tmp_path / "checkpoints") == [2]


@pytest.mark.slow
def test_a_stalled_save_names_rank_and_file(tmp_path: Path, ranks: Ranks) -> None:
    checkpoints = make(tmp_path, ranks)
    checkpoints.save(2)
    last_writer().suspend()
    ranks.command_s = 0.5
    start = time.monotonic()
    with pytest.raises(
        NotSavedError, match=r"of step 4 .*rank 2 \(trainer\) has made no progress writing .*/shard_2 for"
    ):
        checkpoints.save(4)
    assert 0.5 < time.monotonic() - start < 10 and steps_in(tmp_path / "checkpoints") == [2]


def flip(path: Path) -> None:
    """Damage that only the content shows."""
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])


def test_every_rank_verifies_its_files_before_anything_is_loaded(
    tmp_path: Path, ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints, root = make(tmp_path, ranks), tmp_path / "checkpoints"
    for ranks.cursor, step in ((20, 2), (40, 4)):
        checkpoints.save(step)
    assert checkpoints.restore() == 4 and ranks.cursor == 40
    assert ranks.shares == [["shard_1", "state.json"], ["shard_2"]]
    for shard in ("shard_1", "shard_2"):
        ranks.shares.clear()
        flip(root / "step_000004" / shard)
        assert find_latest(root).path == root / "step_000002", "without ranks it is seen too"
        ranks.loaded.clear()
        assert make(tmp_path, ranks).restore() == 2 and ranks.cursor == 20
        assert len(ranks.shares) == 4 and ranks.loaded == ["step_000002"] * 2
        said = f"skipping step_000004: {shard} is not what was committed"
        assert said in capsys.readouterr().out
        shutil.rmtree(root / "step_000004", ignore_errors=True)
        [aside] = root.glob("step_000004.abandoned-*")
        flip(aside / shard)
        aside.rename(root / "step_000004")
    for step in (2, 4):
        flip(root / f"step_{step:06d}" / "shard_2")
    with pytest.raises(CheckpointError, match=r"skipping step_000004: shard_2 .*skipping step_000002: "):
        make(tmp_path, ranks).restore()


@pytest.mark.slow
def test_reading_may_take_longer_than_a_command(tmp_path: Path, ranks: Ranks) -> None:
    make(tmp_path, ranks).save(2)
    slow = SlowRanks()
    start = time.monotonic()
    assert make(tmp_path, slow).restore() == 2
    assert time.monotonic() - start > 2 * slow.command_s


class StalledRanks(Ranks):
    """Ranks whose file system hangs."""

    command_s = 0.4

    def _answer(self, writer: Writer, rank: int, command: Command) -> Done:
        if not isinstance(command, FinishCheck):
            return super()._answer(writer, rank, command)
        time.sleep(command.wait_s)
        return Done(0, progress=(f"shard_{rank}", 7))


@pytest.mark.slow
def test_stalled_reading_is_a_hang_and_not_damage(tmp_path: Path, ranks: Ranks) -> None:
    make(tmp_path, ranks).save(2)
    with pytest.raises(Stalled, match=r"rank 1 \(trainer\) has made no progress reading shard_1 for .*7 bytes done"):
        make(tmp_path, StalledRanks()).restore()
    assert steps_in(tmp_path / "checkpoints") == [2]


def test_a_superseded_attempt_commits_nothing(tmp_path: Path, ranks: Ranks) -> None:
    checkpoints, root = make(tmp_path, ranks), tmp_path / "checkpoints"
    checkpoints.maybe_save(2)
    (tmp_path / OWNERS / "0002").write_text("{}")
    with pytest.raises(SupersededError):
        checkpoints.save(2)
    assert steps_in(root) == []


def test_a_superseded_attempt_does_not_touch_a_save_of_the_newer_one(tmp_path: Path, ranks: Ranks) -> None:
    """Both are at the same step: what the newer attempt is writing is not a leftover."""
    checkpoints, newer = make(tmp_path, ranks), tmp_path / "checkpoints" / "step_000002.tmp-2"
    newer.mkdir(parents=True)
    (tmp_path / OWNERS / "0002").write_text("{}")
    with pytest.raises(SupersededError):
        checkpoints.maybe_save(2)
    assert newer.is_dir()


def test_a_superseded_attempt_sets_nothing_aside(tmp_path: Path, ranks: Ranks) -> None:
    checkpoints = make(tmp_path, ranks)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 1}\n')
    (tmp_path / OWNERS / "0002").write_text("{}")
    with pytest.raises(SupersededError):
        checkpoints.restore()
    assert metrics.read_text() == '{"step": 1}\n'


def test_lines_of_a_superseded_attempt_do_not_end_the_newer_one(tmp_path: Path, ranks: Ranks) -> None:
    """It logs until it notices, also while the newer one loads, and may be killed within a line."""
    make(tmp_path, ranks).save(2)
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text('{"step": 2}\n{"step": 3}\n')
    late = iter(['{"step": 4}\n', '{"ste'])

    def log() -> None:
        with metrics.open("a") as file:
            file.write(next(late))

    ranks.while_loading = log
    checkpoints = make(tmp_path, ranks)
    assert checkpoints.restore() == 2
    assert (tmp_path / "abandoned/2/metrics.jsonl").read_text() == '{"step": 3}\n{"step": 4}\n{"ste'
    log_of_newer = MetricsLog(tmp_path, 2, max_steps=4)
    log_of_newer.log(3, {})
    with metrics.open("a") as file:
        file.write('{"st')  # from a host on which the old attempt is still running
    log_of_newer.log(4, {})
    log_of_newer.log(5, {})
    log_of_newer.close()
    assert [row["step"] for row in read_metrics(tmp_path)] == [2, 3, 5], "one line is spoilt, and no more"


def test_a_failure_to_set_aside_is_not_reported_as_an_unreadable_checkpoint(tmp_path: Path, ranks: Ranks) -> None:
    make(tmp_path, ranks).save(2)
    (tmp_path / "metrics.jsonl").write_text('{"step": 3}\n')
    (tmp_path / "abandoned").write_text("a file")
    with pytest.raises(NotSavedError, match=r"what was written after step 2 not set aside in .*abandoned"):
        make(tmp_path, ranks).restore()


def test_lost_history_is_reported_at_resume(tmp_path: Path, ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path, ranks).save(3)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 3}\n')
    for step in (2, 3):
        (tmp_path / f"rollouts/step_{step:06d}").mkdir(parents=True)
        (tmp_path / f"rollouts/step_{step:06d}/rank_00001.h5").write_text("")
    make(tmp_path, ranks).restore()
    said = capsys.readouterr().out
    assert f"hpcrl: {tmp_path}/metrics.jsonl lacks steps 2 (of 3): damaged, or removed; continuing without it\n" in said
    assert f"hpcrl: {tmp_path}/rollouts lacks steps 1 (of 3): damaged, or removed; continuing without it\n" in said


def test_a_run_without_a_checkpoint_never_mentions_step_minus_one(
    tmp_path: Path, ranks: Ranks, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoints = make(tmp_path, ranks)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    checkpoints.restore()
    assert "hpcrl: 1 item(s) written without a checkpoint moved to abandoned/" in capsys.readouterr().out


def test_a_discarded_save_leaves_no_files_of_this_attempt(tmp_path: Path, ranks: Ranks) -> None:
    checkpoints = make(tmp_path, ranks)
    checkpoints.save(1)
    checkpoints._begin(2)
    assert checkpoints._snapshot is not None
    assert checkpoints._snapshot.writing.ask(FinishSave(30.0)), "what a rank still writes would come back"
    other = tmp_path / "checkpoints/step_000009.tmp-77"
    other.mkdir()
    checkpoints.discard()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["LATEST", "step_000001", other.name]
