"""The rollout store: round trips, only complete files, equal bits for equal batches."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from hpcrl.rollout.batch import Batch, batch_from_samples, concat
from hpcrl.rollout.store import OutcomeRecord, RolloutReader, main, write_outcomes, write_rollouts
from hpcrl.rollout.types import FinishReason, PromptOutcome, Sample, make_sample_id
from hpcrl.spec.trajectory import FIELDS, TEXT, Field, Level, Origin, declare
from hpcrl.system.exit_codes import ExitCode

ROOT = Path(__file__).parents[2]
FACTS = {"run_id": "demo", "weight_version": 2, "temperature": 0.6}


@pytest.fixture(autouse=True)
def texts() -> None:
    declare(
        Field("domain", TEXT, Level.ROW, Origin.PACKING, "domain of the row", optional=True),
        Field("response", TEXT, Level.ROW, Origin.PACKING, "text of the response", optional=True),
    )


def make_batch(uids: list[int], seed: int = 0) -> Batch:
    """Two group members per prompt, prompts of 3 tokens, responses of 1 to 5."""
    rng = np.random.default_rng(seed)
    samples = []
    for uid in uids:
        for member in range(2):
            model = np.arange(3 + int(rng.integers(1, 6))) >= 3
            samples.append(
                Sample(
                    id=make_sample_id(uid, 0, member),
                    token_ids=rng.integers(0, 2**31, len(model)).astype(np.int32),
                    loss_mask=model,
                    gen_logprobs=np.where(model, -rng.exponential(size=len(model)), 0).astype(np.float32),
                    versions=np.where(model, 2, -1).astype(np.int32),
                    turn_ids=np.where(model, 0, -1).astype(np.int32),
                    finish_reason=FinishReason.LENGTH,
                    reward=float(rng.normal()),
                    score=1.0,
                )
            )
    return batch_from_samples(samples, [uid for uid in uids for _ in range(2)])


def texts_of(batch: Batch) -> dict[str, list[str]]:
    return {"domain": ["maths"] * batch.num_sequences, "response": [f"é{i}" for i in batch.sample_ids.tolist()]}


def write(run: Path, step: int, rank: int, num_ranks: int, batch: Batch) -> Path:
    folder = run / f"rollouts/step_{step:06d}"
    return write_rollouts(folder, rank, num_ranks, replace(batch, texts=texts_of(batch)), facts=FACTS)


def commit_up_to(run: Path, step: int) -> None:
    (run / f"checkpoints/step_{step:06d}").mkdir(parents=True)


def assert_equal(got: Batch, expected: Batch) -> None:
    assert got.columns.keys() == expected.columns.keys() and torch.equal(got.cu_seqlens, expected.cu_seqlens)
    for name, left in got.columns.items():
        right = expected.columns[name]
        assert left.dtype == right.dtype and torch.equal(left, right), name


def test_rows_of_all_ranks_are_merged_and_sorted_by_sample_id(tmp_path: Path) -> None:
    late, early = make_batch([7, 9], seed=1), make_batch([3], seed=2)
    for batch in (late, early):
        batch.advantages = torch.randn(batch.num_tokens)
    write(tmp_path, 1, 1, 3, late)
    write(tmp_path, 1, 2, 3, early)
    write(tmp_path, 1, 3, 3, make_batch([]))  # a rank without rows has no late fields
    commit_up_to(tmp_path, 1)
    rollouts = RolloutReader(tmp_path).read(1)
    assert_equal(rollouts.batch.check(), concat([early, late]))
    assert rollouts.texts == texts_of(rollouts.batch) and rollouts.facts == FACTS
    assert rollouts.texts["response"][0] == f"é{make_sample_id(3, 0, 0)}"


def test_metrics_follow_their_rows_even_of_a_restarted_group_member(tmp_path: Path) -> None:
    """Records have members in order; the row of a later attempt comes after the other members' rows."""
    batch = make_batch([3, 7, 8])
    batch.sample_ids[0] = make_sample_id(3, 1, 0)
    write(tmp_path, 1, 0, 1, batch)
    reader = RolloutReader(tmp_path, provisional=True)
    assert reader.read(1).metrics == [{}] * 6, "without outcomes"
    records = [
        OutcomeRecord(7, 0, PromptOutcome.TRAINED, rewards=(1.0, 0.0), metrics=({"length": -0.5}, {})),
        OutcomeRecord(3, 1, PromptOutcome.TRAINED, rewards=(1.0, 0.0), metrics=({"judge": 0.1}, {"judge": 0.9})),
        OutcomeRecord(8, 0, PromptOutcome.TRAINED, rewards=(1.0, 0.0)),
    ]
    write_outcomes(tmp_path / "rollouts/step_000001", records)
    rollouts = reader.read(1)
    assert [rollouts.batch.sample_ids[row].item() for row in (0, 1)] == [
        make_sample_id(3, 0, 1),
        make_sample_id(3, 1, 0),
    ]
    assert rollouts.metrics == [{"judge": 0.9}, {"judge": 0.1}, {"length": -0.5}, {}, {}, {}]


def test_a_step_reads_back_as_it_was_generated(tmp_path: Path) -> None:
    batch = make_batch([3, 7])
    trained = replace(batch, old_logprobs=torch.randn(batch.num_tokens), advantages=torch.randn(batch.num_tokens))
    trained.weights = torch.tensor([0.5, 1.0, 0.0, 2.0])  # as an advantage estimator weighs rows
    write(tmp_path, 1, 0, 1, trained)
    reader = RolloutReader(tmp_path, provisional=True)
    assert_equal(reader.batch(1), trained)
    assert_equal(reader.batch(1).as_generated(), batch)
    sizes = zip(batch.sample_ids.tolist(), batch.lengths.tolist(), strict=True)
    assert reader.sizes(1) == {sample: (total, total - 3) for sample, total in sizes}


def test_a_step_without_any_row_reads_back(tmp_path: Path) -> None:
    write(tmp_path, 1, 0, 1, make_batch([]))
    assert_equal(RolloutReader(tmp_path, provisional=True).batch(1), make_batch([]))


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_equal_batches_give_equal_files(tmp_path: Path) -> None:
    first = write(tmp_path / "a", 1, 0, 1, make_batch([1, 2]))
    same = write(tmp_path / "b", 1, 0, 1, make_batch([1, 2]))
    other = make_batch([1, 2])
    other.gen_logprobs[4] = torch.nextafter(other.gen_logprobs[4], torch.tensor(0.0))
    assert digest(first) == digest(same) != digest(write(tmp_path / "c", 1, 0, 1, other))
    records = [OutcomeRecord(1, 0, PromptOutcome.TRAINED, domain="maths", rewards=(0.1, 1.0))]
    paths = [write_outcomes(tmp_path / run / "rollouts/step_000001", records) for run in "ab"]
    assert digest(paths[0]) == digest(paths[1])


def test_the_schema_matches_its_documentation(tmp_path: Path) -> None:
    path = write(tmp_path, 12, 1, 2, make_batch([5]))
    documented = (ROOT / "docs/rollouts.md").read_text()
    with h5py.File(path) as file:
        assert file.attrs["schema"] == "hpcrl.rollouts" and file.attrs["step"] == 12 and file.attrs["rank"] == 1
        assert file["cu_seqlens"][:].tolist()[0] == 0 and file["token_ids"].shape == (file.attrs["num_tokens"],)
        versions = file["versions"].attrs
        assert versions["level"] == "token" and "version of the weights" in versions["meaning"]
        names = [*file, *file.attrs]
    assert [name for name in names if f"`{name}`" not in documented] == []


@pytest.mark.parametrize("k", [1, 3])
def test_what_a_teacher_tells_is_checked_but_not_stored(k: int, tmp_path: Path) -> None:
    batch = make_batch([5])
    count, length = batch.num_tokens, int(batch.lengths[1])
    batch.teacher_topk_ids = torch.arange(count * k, dtype=torch.int32).view(count, k)
    batch.teacher_topk_logprobs = -torch.ones(count, k)
    part = batch.check().select([1])
    assert (
        part.teacher_topk_ids is not None
        and part.teacher_topk_ids.tolist() == batch.teacher_topk_ids[-length:].tolist()
    )
    with h5py.File(write(tmp_path, 12, 0, 1, batch)) as file:
        assert "rewards" in file and not any(name.startswith("teacher") for name in file)


def test_the_documented_fields_match_the_table() -> None:
    """Fields that hpcrl itself declares, in a separate process: tests and plug-ins declare more."""
    code = "from hpcrl.spec.trajectory import FIELDS; print(*(f for f in FIELDS), sep=chr(10))"
    built_in = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    size = {Level.TOKEN: "[T]", Level.TURN: "[N]", Level.ROW: "[B]"}
    expected = [
        f"| `{f.name}` | {f.dtype} {size[f.level]} | {f.origin} | {'yes' if f.optional else ''} | {f.meaning} |"
        for f in map(FIELDS.__getitem__, built_in)
    ]
    lines = (ROOT / "docs/rollouts.md").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("| Field "))
    table = lines[start + 2 : lines.index("", start)]
    assert table == expected


def test_outcomes_read_back_and_a_second_outcome_is_an_error(tmp_path: Path) -> None:
    metrics = ({"correct": 1.0}, {}, {"correct": 0.25, "length": -0.5})
    records = [
        OutcomeRecord(4, 1, PromptOutcome.TRAINED, "", "maths", (1.0, float("nan"), 0.25), metrics),
        OutcomeRecord(5, 0, PromptOutcome.FILTERED, "std", "code", (0.0, 0.0)),
        OutcomeRecord(2**40, 0, PromptOutcome.TOO_LONG, "1200 tokens"),
    ]
    for step, part in ((1, records[:2]), (2, records[2:]), (3, [])):
        write_outcomes(tmp_path / f"rollouts/step_{step:06d}", part)
    commit_up_to(tmp_path, 3)
    assert repr(RolloutReader(tmp_path).outcomes()) == repr(records)
    write_outcomes(tmp_path / "rollouts/step_000004", records[1:2])
    assert len(RolloutReader(tmp_path).outcomes()) == 3, "step 4 is past the checkpoint"
    with pytest.raises(ValueError, match="prompt 5 ended twice, in steps 1 and 4"):
        RolloutReader(tmp_path, provisional=True).outcomes()


def test_the_reader_follows_the_committed_lineage(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step, 0, 1, make_batch([step]))
    assert RolloutReader(tmp_path).steps() == []
    commit_up_to(tmp_path, 2)
    (tmp_path / "checkpoints/step_000003.tmp-1").mkdir()
    assert RolloutReader(tmp_path).steps() == [1, 2]
    assert RolloutReader(tmp_path, provisional=True).steps() == [1, 2, 3]
    with pytest.raises(ValueError, match="has no rollouts of committed step 3; it has 1 to 2"):
        RolloutReader(tmp_path).batch(3)


def test_files_are_immutable_and_unfinished_ones_are_invisible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, 1, 0, 1, make_batch([1]))
    with pytest.raises(ValueError, match="exists already, rollouts are immutable"):
        write(tmp_path, 1, 0, 1, make_batch([2]))
    path.with_name(".rank_00001.h5.tmp").write_bytes(b"half")
    assert RolloutReader(tmp_path, provisional=True).batch(1).group_ids.tolist() == [1, 1]
    with pytest.raises(ValueError, match=r"texts\['domain'\] has 1 strings for 2 rows"):
        write_rollouts(path.parent, 1, 2, replace(make_batch([1]), texts={"domain": ["x"]}), facts={})
    with pytest.raises(TypeError):
        write_rollouts(path.parent, 2, 3, make_batch([1]), facts={"bad": object()})
    assert sorted(p.name for p in path.parent.iterdir()) == [".rank_00001.h5.tmp", "rank_00000.h5"]


@pytest.mark.parametrize("harm", ["truncated", "flipped", "foreign", "newer"])
def test_a_damaged_file_is_named(tmp_path: Path, harm: str) -> None:
    path = write(tmp_path, 1, 0, 1, make_batch(list(range(50))))
    data = bytearray(path.read_bytes())
    if harm == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif harm == "flipped":
        with h5py.File(path) as file:
            chunk = file["gen_logprobs"].id.get_chunk_info(0)
        data[chunk.byte_offset + chunk.size // 2] ^= 1
        path.write_bytes(data)
    elif harm == "foreign":
        path.write_text("not HDF5")
    else:
        with h5py.File(path, "a") as file:
            file.attrs["schema_version"] = 99
    with pytest.raises(ValueError, match=r"step_000001/rank_00000\.h5 cannot be read: "):
        RolloutReader(tmp_path, provisional=True).batch(1)


def test_a_missing_rank_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, 1, 0, 2, make_batch([1]))
    with pytest.raises(ValueError, match=r"holds files of 1 ranks, they say there are \[2\]"):
        RolloutReader(tmp_path, provisional=True).batch(1)


def test_the_command_line_prints_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2):
        write(tmp_path, step, 0, 1, make_batch([10 * step]))
    commit_up_to(tmp_path, 1)
    assert main([str(tmp_path), "--num", "1"]) == ExitCode.DONE
    printed = capsys.readouterr().out
    assert printed.startswith("step 2, past the newest checkpoint: 2 samples")
    assert "prompt 20 attempt 0 member 0: reward" in printed and "member 1" not in printed
    assert "weights 2 to 2" in printed and f"response: 'é{make_sample_id(20, 0, 0)}'" in printed
    assert main([str(tmp_path), "--step", "9"]) == ExitCode.BAD_INPUT
    assert "has no rollouts of step 9; it has 1 to 2" in capsys.readouterr().err


def test_a_field_of_an_algorithm_passes_through_batch_and_store(tmp_path: Path) -> None:
    """It is declared once; selection, joining, checks, files and reader need no change."""
    declare(Field("surprise", "float32", Level.TOKEN, Origin.TRAINING, "how odd a token is", optional=True))
    declare(Field("hardness", "int32", Level.ROW, Origin.TRAINING, "of the prompt", optional=True))
    batch = make_batch([3, 7])
    batch.surprise, batch.hardness = torch.arange(batch.num_tokens) / 8, torch.arange(4, dtype=torch.int32)
    chosen = concat([batch.select([2]), batch.select([0])])
    assert chosen.hardness.tolist() == [2, 0]
    start, end = batch.cu_seqlens[2:4].tolist()
    assert chosen.surprise[: end - start].tolist() == batch.surprise[start:end].tolist()
    write(tmp_path, 1, 0, 1, batch)
    assert_equal(RolloutReader(tmp_path, provisional=True).batch(1), batch)
    assert batch.as_generated().surprise is None
    with pytest.raises(ValueError, match=r"batch\.hardness must be torch\.int32 \[4\], got torch\.int32 \[3\]"):
        replace(batch, hardness=batch.hardness[:3]).check()
    with pytest.raises(ValueError, match=r"batch\.surprise holds 1 values that are not finite"):
        replace(batch, surprise=batch.surprise.clone().index_fill_(0, torch.tensor([1]), float("nan"))).check()
    with pytest.raises(ValueError, match="'hardness' is declared twice and differently"):
        declare(Field("hardness", "float32", Level.ROW, Origin.TRAINING, "of the prompt", optional=True))
    with pytest.raises(AttributeError, match="no field 'hardnes'"):
        batch.hardnes = batch.hardness


def test_a_reader_takes_unknown_fields_from_the_file(tmp_path: Path) -> None:
    field = Field("novelty", "float32", Level.ROW, Origin.TRAINING, "of the response", optional=True)
    declare(field)
    write(tmp_path, 1, 0, 1, replace(make_batch([3]), novelty=torch.tensor([0.5, 2.0])))
    del FIELDS["novelty"]
    assert RolloutReader(tmp_path, provisional=True).batch(1).novelty.tolist() == [0.5, 2.0]
    assert FIELDS["novelty"] == field


def test_turn_rewards_are_set_at_last_tokens_if_a_file_lacks_token_rewards(tmp_path: Path) -> None:
    batch = make_batch([3])
    batch.turn_rewards, batch.token_rewards = torch.tensor([0.5, 2.0]), None
    write(tmp_path, 1, 0, 1, batch)
    read = RolloutReader(tmp_path, provisional=True).batch(1)
    assert read.token_rewards.sum() == read.turn_rewards.sum() and not read.token_rewards[~read.loss_mask].any()


def write_version_1(path: Path) -> None:
    """A file of two rows as the first schema had it: no field describes itself."""
    path.parent.mkdir(parents=True)
    tokens = {"token_ids": "i8", "loss_mask": "u1", "gen_logprobs": "f4", "versions": "i4", "turn_ids": "i4"}
    with h5py.File(path, "w") as file:
        about = {"step": 1, "rank": 0, "num_ranks": 1, "num_sequences": 2, "num_tokens": 5}
        file.attrs.update({"schema": "hpcrl.rollouts", "schema_version": 1, "hpcrl_version": "0.1", **about})
        file["cu_seqlens"] = np.array([0, 3, 5])
        for name, dtype in (tokens | {"position_ids": "i8", "advantages": "f4"}).items():
            file[name] = np.array([0, 1, 1, 0, 1], dtype)
        for name, dtype in {"rewards": "f4", "scores": "f4", "weights": "f4", "status": "i1"}.items():
            file[name] = np.array([1, 0], dtype)
        for name in ("group_ids", "sample_ids"):
            file[name] = np.array([3, 4], "i8")
        file["texts/remark/utf8"] = np.frombuffer(b"a\xc3\xa9", np.uint8)
        file["texts/remark/offsets"] = np.array([0, 1, 3])
        file.create_group("facts").attrs["weight_version"] = 0


def test_files_of_version_1_are_read(tmp_path: Path) -> None:
    path = tmp_path / "rollouts/step_000001/rank_00000.h5"
    write_version_1(path)
    rollouts = RolloutReader(tmp_path, provisional=True).read(1)
    batch = rollouts.batch.check()
    assert batch.loss_mask.tolist() == [False, True, True, False, True] and batch.rewards.tolist() == [1.0, 0.0]
    assert batch.advantages is not None and batch.old_logprobs is None
    assert rollouts.texts == {"remark": ["a", "é"]} and rollouts.facts == {"weight_version": 0}
    with h5py.File(path, "a") as file:
        file["mystery"] = np.zeros(5)
    with pytest.raises(ValueError, match="the field mystery is unknown and not described"):
        RolloutReader(tmp_path, provisional=True).read(1)
    with h5py.File(path, "a") as file:
        file.attrs["schema_version"] = 3
    with pytest.raises(ValueError, match=r"schema hpcrl\.rollouts 3, this version reads hpcrl\.rollouts 1 to 2"):
        RolloutReader(tmp_path, provisional=True).read(1)
