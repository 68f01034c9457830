"""The report's samples: what is chosen within a budget, values, hostile and damaged input."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import shutil
import tarfile
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from hpcrl.report import samples as samples_section
from hpcrl.report.page import page
from hpcrl.report.run_files import RunFiles
from hpcrl.report.samples import section
from hpcrl.report.samples_text import clean, cut, num_bytes
from hpcrl.report.samples_tokens import TokenPieces, segments
from hpcrl.rollout.step_files import open_step
from hpcrl.rollout.store import OutcomeRecord, RolloutReader
from hpcrl.rollout.types import FinishReason, PromptOutcome, split_sample_id
from hpcrl.spec.image_rows import image_rows
from hpcrl.spec.media import IMAGES
from hpcrl.spec.trajectory import declare
from tests.conftest import ROOT
from tests.report.samples_run import (
    HOSTILE,
    PROMPT,
    answered,
    byte_tokenizer,
    make_run,
    picture,
    sample,
    write_step,
    write_validation,
)
from tests.report.synthetic import write_run
from tests.report.test_page import blocks


def found(run: Path, budget: int = 1_000_000) -> dict[str, Any]:
    """The section's data, without problems."""
    files = RunFiles(run)
    made = section(files, budget)
    assert made is not None and not files.problems
    return json.loads(json.dumps(made.data))


def test_values_are_those_of_the_files(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    first = sample(7, 0, ["a\u00e9", "cd"], 1.0, version=3)
    second = sample(7, 1, ["x"], 0.25, version=4, finish=FinishReason.LENGTH)
    parts = ({"correct": 1.0}, {"correct": 0.0, "length": 0.25})
    records = [OutcomeRecord(7, 0, PromptOutcome.TRAINED, "", "sums", (1.0, 0.25), parts)]
    records.append(OutcomeRecord(9, 1, PromptOutcome.FILTERED, "std", "sums", (1.0, 1.0)))
    records.append(OutcomeRecord(10, 0, PromptOutcome.FAILED, "no such file"))
    write_step(run, 6, [first, second], records, advantage=-0.5)
    data = found(run)
    one, two = data["training"]
    assert (one["id"], one["uid"], one["member"], one["domain"]) == ("s6-7-0-0", 7, 0, "sums")
    assert (one["reward"], one["score"], one["finish"], one["tokens"]) == (1.0, 1.0, "stop", 5)
    assert one["all_tokens"] == len("add: 1 2") + 3 + len("more") + 2
    assert one["versions"] == [3, 3] and one["lag"] == [2, 2], "step 6 trains version 5"
    assert one["advantage"] == -0.5 and one["mismatch"] == pytest.approx((1 + 2 + 3 + 4 + 5) / 5 / 1000, abs=1e-6)
    assert two["finish"] == "length" and one["parts"] == parts[0] and two["parts"] == parts[1]
    assert one["prompt"] == two["prompt"]
    assert [(said["role"], said["text"]) for said in data["prompts"][one["prompt"]]] == [("user", "add: 1 2")]
    assert [said["role"] for said in one["said"]] == ["assistant", "user", "assistant"]
    assert one["said"][1]["text"] == "more"
    (tokens,) = one["said"][0]["segments"]
    assert tokens["text"] == "a\u00e9" and tokens["cuts"] == [1, 1, 0], "both bytes are shown as the first one's text"
    assert tokens["mismatch"] == [1, 2, 3] and tokens["advantage"] == -500 and tokens["lag"] == 2
    assert one["said"][2]["turn"] == 2 and one["said"][2]["segments"][0]["mismatch"] == [4, 5]
    assert [(each["uid"], each["outcome"], each["reason"]) for each in data["ended"]] == [
        (9, "filtered", "std"),
        (10, "failed", "no such file"),
    ]
    assert data["about"]["training"]["total"] == 2 and data["about"]["training"]["choice"] == "all samples"


def test_an_experts_turn_has_no_mismatch_and_no_lag(tmp_path: Path) -> None:
    """Its tokens count as the response's, but no weights have generated them."""
    run = make_run(tmp_path / "run")
    played = sample(7, 0, ["ab", "cd"], 1.0, version=3)
    expert = played.loss_mask & (played.turn_ids == 1)
    played.put("versions", np.where(expert, -1, played.versions))
    played.put("gen_logprobs", np.where(expert, 0, played.gen_logprobs))
    write_step(run, 6, [played])
    (one,) = found(run)["training"]
    assert one["tokens"] == 4 and one["versions"] == [3, 3] and one["lag"] == [2, 2]
    assert one["mismatch"] == pytest.approx((1 + 2) / 2 / 1000, abs=1e-6)
    assert [said.get("expert") for said in one["said"]] == [None, None, True], "policy, user, expert"
    (tokens,) = one["said"][2]["segments"]
    assert tokens["text"] == "cd" and not tokens.get("mismatch") and not tokens.get("lag")


def test_steps_are_spread_groups_are_whole_and_extremes_are_there(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for step in range(1, 31):
        rewards = {9: (0.5, 9.0), 21: (-3.0, 0.5)}.get(step, (0.5, 0.25))
        group = [
            sample(
                4 * step + n, member, ["z" * 300], rewards[member] if n == 2 else 0.5, prompt=f"prompt {step % 7} {n}"
            )
            for n in range(4)
            for member in range(2)
        ]
        write_step(run, step, group)
    for step in (2, 3, 20):  # not chosen: their files are not read
        (run / f"rollouts/step_{step:06d}/rank_00000.h5").write_bytes(b"damaged")
    budget = 40_000
    data = found(run, budget)
    assert num_bytes(data) < budget
    steps = data["about"]["training"]["steps"]
    gaps = np.diff([step for step in steps if step not in (9, 21)])
    assert steps[0] == 1 and steps[-1] == 30 and gaps.max() <= gaps.min() + 1 and len(steps) >= 6
    groups: dict[tuple[int, int], int] = {}
    for one in data["training"]:
        groups[one["step"], one["uid"]] = groups.get((one["step"], one["uid"]), 0) + 1
    assert set(groups.values()) == {2}, "both members of each group"
    rewards = {one["reward"]: one["step"] for one in data["training"]}
    assert rewards[9.0] == 9 and rewards[-3.0] == 21
    assert data["about"]["training"]["total"] == 240 > len(data["training"])
    assert "highest reward (step 9)" in data["about"]["training"]["choice"]


def test_a_prompt_that_recurs_is_chosen_again(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for step in range(1, 7):
        order = [(n + step) % 12 for n in range(12)]
        group = [sample(100 * step + n, 0, ["z" * 300], 0.5, prompt=f"prompt {n}") for n in order]
        write_step(run, step, group)
    data = found(run, 20_000)
    assert len(data["training"]) < 72
    chosen = [{one["prompt"] for one in data["training"] if one["step"] == step} for step in range(2, 6)]
    assert set.intersection(*chosen), "not another prompt in each step"


def test_large_groups_of_wide_characters_have_short_texts_and_fit(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for step in range(1, 8):
        write_step(run, step, [sample(step, member, ["\u4e2d" * 1500], member / 32) for member in range(32)])
    data = found(run, 500_000)
    assert num_bytes(data) < 500_000
    assert len(data["training"]) % 32 == 0 and len(data["about"]["training"]["steps"]) >= 6
    first, left_out, last = data["training"][0]["said"][0]["segments"]
    assert first["text"].strip("\u4e2d") == last["text"].strip("\u4e2d") == "" and left_out["left_out"] > 0


def test_without_messages_the_tokens_are_decoded(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    one = sample(1, 0, ["ab", "c\u00e9"], 1.0, messages=[])
    write_step(run, 1, [one])
    data = found(run)
    (shown,) = data["training"]
    assert data["prompts"][shown["prompt"]][0]["text"] == "add: 1 2"
    assert [said["segments"][0]["text"] for said in shown["said"]] == ["ab", "c\u00e9"]
    (run / "model/tokenizer.json").unlink()
    (shown,) = found(run)["training"]
    assert shown["said"][0]["text"].split() == [str(token) for token in byte_tokenizer().encode("ab").ids]


@pytest.fixture(scope="module")
def old_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of version 0.1.0."""
    folder = tmp_path_factory.mktemp("old")
    with tarfile.open(ROOT / "tests/fixtures/runs_0_1.tar.xz") as archive:
        wanted = [each for each in archive.getmembers() if not each.name.endswith((".safetensors", ".distcp", ".pt"))]
        archive.extractall(folder, wanted, filter="data")
    return folder / "runs"


@pytest.mark.parametrize("name", ["ahead", "ppo", "episodes", "fake"])
def test_samples_of_old_runs_agree_with_the_reader(old_runs: Path, name: str) -> None:
    """Episodes of several turns, also by steps; two domains; rewards in parts; truncated sampling; staleness."""
    data = found(old_runs / name)
    by_id = {one["id"]: one for one in data["training"]}
    reader = RolloutReader(old_runs / name, provisional=True)
    count = 0
    for step in reader.steps():
        rollouts = reader.read(step)
        batch, starts = rollouts.batch, rollouts.batch.cu_seqlens.tolist()
        for row, (uid, attempt, member) in enumerate(map(split_sample_id, batch.sample_ids.tolist())):
            one, tokens = by_id[f"s{step}-{uid}-{attempt}-{member}"], slice(starts[row], starts[row + 1])
            mask = batch.loss_mask[tokens]
            assert one["reward"] == pytest.approx(batch.rewards[row].item(), rel=1e-5)
            assert one["advantage"] == pytest.approx(batch.advantages[tokens][mask].mean().item(), rel=1e-4)
            assert one.get("parts", {}) == pytest.approx(dict(rollouts.metrics[row]), rel=1e-5)
            messages = rollouts.messages(row)
            shown = [*data["prompts"][one["prompt"]], *one["said"]]
            assert [said["role"] for said in shown] == [said["role"] for said in messages]
            turns = [said for said in one["said"] if "turn" in said]
            begins = batch.cu_turns[row].item()
            assert [said["turn"] for said in turns] == list(range(1, batch.cu_turns[row + 1].item() - begins + 1))
            if batch.turn_rewards is not None and len(turns) > 1:
                rewards = batch.turn_rewards[begins : begins + len(turns)].tolist()
                assert [said["reward"] for said in turns] == pytest.approx(rewards, abs=1e-5)
            assert sum(len(said["segments"][0]["cuts"]) for said in turns) == int(mask.sum()) == one["tokens"]
            count += 1
    assert count == len(by_id) == 48


def test_damaged_files_are_named_and_the_rest_is_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for step in (1, 2, 3):
        write_step(run, step, [sample(step, member, ["ab"], 0.5) for member in range(2)])
    (run / "rollouts/step_000002/rank_00001.h5").write_bytes(b"damaged")
    (run / "rollouts/step_000003/outcomes.h5").write_bytes(b"damaged")
    (run / "model/tokenizer.json").write_text("{}")
    files = RunFiles(run)
    made = section(files)
    assert made is not None
    assert {one["step"] for one in made.data["training"]} == {1, 3}
    assert "segments" not in made.data["training"][0]["said"][0] and made.data["training"][0]["said"][0]["text"] == "ab"
    for name in ("step_000002/rank_00001.h5", "step_000003/outcomes.h5", "the tokenizer in"):
        assert sum(name in problem for problem in files.problems) == 1, (name, files.problems)


def test_a_served_run_shows_nothing_of_other_folders(tmp_path: Path) -> None:
    """The folder of another user may have links to what only the reader of the page may read."""
    run, other = make_run(tmp_path / "runs/one"), make_run(tmp_path / "other")
    for folder in (run, other):
        write_step(folder, 1, [sample(1, 0, [f"of {folder.name}"], 1.0)])
    write_validation(other, 1, [answered(1, "of other", 1.0)])
    (run / "validation").symlink_to(other / "validation")
    (run / "rollouts/step_000002").symlink_to(other / "rollouts/step_000001")
    (run / "rollouts/step_000003").mkdir()
    (run / "rollouts/step_000003/rank_00000.h5").symlink_to(other / "rollouts/step_000001/rank_00000.h5")
    (run / "rollouts/step_000003/outcomes.h5").symlink_to(other / "rollouts/step_000001/outcomes.h5")
    files = RunFiles(run, inside=tmp_path / "runs")
    made = section(files)
    assert made is not None
    assert "of one" in json.dumps(made.data) and "of other" not in json.dumps(made.data)
    assert any("step_000002: it leads out of" in problem for problem in files.problems)
    followed = section(RunFiles(run))
    assert followed is not None and "of other" in json.dumps(followed.data), "without the limit the links work"


@pytest.mark.parametrize(("name", "text"), [("rank_00000.h5", "texts/messages"), ("outcomes.h5", "reason")])
def test_bytes_of_other_files_are_not_shown_as_texts(tmp_path: Path, name: str, text: str) -> None:
    """HDF5 files may refer to bytes of any file."""
    run = make_run(tmp_path / "run")
    write_step(run, 1, [sample(1, 0, ["ab"], 1.0)], [OutcomeRecord(1, 0, PromptOutcome.FAILED, "abc")])
    (tmp_path / "secret").write_bytes(b"secret" * 100)
    with h5py.File(run / "rollouts/step_000001" / name, "r+") as file:
        size = len(file[f"{text}/utf8"])
        del file[f"{text}/utf8"]
        file[text].create_dataset("utf8", (size,), "u1", external=[(str(tmp_path / "secret"), 0, size)])
    files = RunFiles(run)
    made = section(files)
    assert "sec" not in json.dumps(made.data if made else None)
    assert [problem.partition("cannot be read: ")[2] for problem in files.problems] == [
        f"{text}/utf8 is in another file"
    ]


def test_a_folder_without_samples_has_no_section(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    files = RunFiles(run)
    assert section(files) is None and not files.problems


def test_the_step_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for step in (1, 2, 3):
        write_step(run, step, [sample(step, member, ["ab"], 0.5) for member in range(2)])
    (run / "rollouts/step_000003/rank_00001.h5").unlink()
    assert [one["step"] for one in found(run)["training"]] == [1, 1, 2, 2]
    (run / "rollouts/step_000001/rank_00000.h5").unlink()
    files = RunFiles(run)
    made = section(files)
    assert made is not None and {one["step"] for one in made.data["training"]} == {2}
    assert files.problems == [f"{run}/rollouts/step_000001 has rollouts of 1 ranks, of 2"]


def test_hostile_and_long_texts(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    long = "b" * 500_000 + "c" * 500_000
    hostile = [{"role": "user", "content": HOSTILE}, {"role": "assistant", "content": "\ud800 lone"}]
    write_step(run, 1, [sample(1, 0, [HOSTILE], 1.0, messages=hostile), sample(2, 0, ["d"], 0.0)])
    write_validation(run, 1, [answered(1, long, 1.0), answered(2, HOSTILE, 0.0, tags=[HOSTILE], error=HOSTILE)])
    files = RunFiles(run)
    text = page([files], [samples_section])
    assert "<script>window" not in text and "<img src=x" not in text and "\u2028" not in text
    data = blocks(text)["data-0-samples"]
    shown = {one["id"]: one for one in [*data["training"], *data["validation"]]}
    assert shown["s1-1-0-0"]["said"][0]["segments"][0]["text"] == HOSTILE
    assert shown["v1/sums/0000000000000002/2-0g"]["said"][0]["text"] == HOSTILE
    (message,) = shown["v1/sums/0000000000000001/1-0g"]["said"]
    assert message["left_out"] == 1_000_000 - 16_000 and message["text"].endswith("b") and message["tail"].endswith("c")
    assert len(text) < 100_000 and not files.problems


def test_long_responses_keep_their_beginning_and_their_end() -> None:
    pieces = TokenPieces(lambda ids: byte_tokenizer().decode(ids, skip_special_tokens=False), 3)
    ids = np.array(byte_tokenizer().encode("".join(chr(97 + n % 26) for n in range(1000))).ids)
    shown = segments(pieces, ids, {"mismatch": np.arange(1000) / 1000}, 100)
    assert [each.get("left_out", len(each.get("text", ""))) for each in shown] == [70, 900, 30]
    assert shown[0]["mismatch"][:3] == [0, 1, 2] and shown[2]["mismatch"][-1] == 999
    assert shown[2]["text"][-1] == chr(97 + 999 % 26)


def metaspace() -> Tokenizer:
    """A tokenizer that drops a space at the beginning of a text, as SentencePiece does, with bytes as a fallback."""
    words = ["\u2581", "a", "b", "\u2581ab", "\u2581b", *(f"<0x{byte:02X}>" for byte in range(256))]
    made = Tokenizer(models.BPE(vocab={word: at for at, word in enumerate(words)}, merges=[], byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


@pytest.mark.parametrize("tokenizer", [byte_tokenizer(), metaspace()], ids=["bytes", "metaspace"])
def test_pieces_join_to_the_decoded_text(tokenizer: Tokenizer) -> None:
    text = "b ab \u00e9 \u4e2d\u6587 \U0001f600 b"
    anchor = tokenizer.encode("a", add_special_tokens=False).ids[-1]
    ids = tokenizer.encode(text).ids
    pieces = TokenPieces(lambda ids: tokenizer.decode(ids, skip_special_tokens=False), anchor).of(ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces).lstrip(" ") == tokenizer.decode(ids) == text
    shown = segments(TokenPieces(tokenizer.decode, anchor), np.array(ids), {}, 1000)[0]
    assert sum(shown["cuts"]) == len(shown["text"].encode("utf-16-le")) // 2, "as browsers count"


def test_cut_and_clean() -> None:
    assert cut("abc", 3) == {"text": "abc"}
    assert cut("0123456789x", 10) == {"text": "0123456", "left_out": 1, "tail": "89x"}
    assert clean("a\ud800b\U0001f600") == "a\ufffdb\U0001f600"


def test_validations_have_the_same_prompts_and_the_largest_changes(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for step in (0, 10, 20):
        scores = {90: step / 20, 91: 1 - step / 20}
        rows = [answered(n, f"{step} " + "r" * 400, scores.get(n, 0.5), rewards={"exact": 1}) for n in range(100)]
        write_validation(run, step, rows)
    with open(run / "validation/step_000020.jsonl", "a") as file:
        file.write('{"set": "sums", "prompt_id"')  # half a line, as a program that is killed leaves it
    data = found(run, 100_000)
    assert num_bytes(data) < 100_000
    by_prompt: dict[str, list[int]] = {}
    for one in data["validation"]:
        by_prompt.setdefault(one["prompt"], []).append(one["step"])
    assert all(steps == [0, 10, 20] for steps in by_prompt.values()) and 5 < len(by_prompt) < 100
    assert {f"{90:016x}", f"{91:016x}", f"{0:016x}", f"{1:016x}"} <= set(by_prompt)
    assert {one["extracted"] for one in data["validation"]} == {"3"} and "answer" not in data["validation"][0]
    assert data["about"]["validation"]["choice"].startswith(f"{len(by_prompt)} of 100 prompts: half by the change")


def test_a_file_of_another_format_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    write_validation(run, 1, [answered(1, "a", 1.0)])
    write_validation(run, 2, [answered(1, "a", 1.0)], head={"format": 2})
    files = RunFiles(run)
    made = section(files)
    assert made is not None and len(made.data["validation"]) == 1
    assert files.problems == ["validation/step_000002.jsonl: format 2, this version reads 1"]


def test_odd_values_of_a_validation_do_not_end_the_section(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    odd = [answered(1, "a", float("nan"), sample="x", tokens="many", tags="no", rewards=[1], prompt=None)]
    odd.append(
        {"set": 3, "prompt_id": [], "response": [{"role": "assistant", "content": [{"type": "text", "text": "b"}]}]}
    )
    odd.append(answered(3, [1, 2], True, prompt=[{"role": "user", "content": None, "tool_calls": [{"name": "f"}]}]))  # type: ignore[arg-type]
    write_validation(run, 1, odd)
    data = found(run)
    assert [one["score"] for one in data["validation"]] == [None, None, None] and len(data["validation"]) == 3
    assert "tool_calls" in data["prompts"][f"{3:016x}"][0]["extra"]["text"]


def test_examples_stand_in_for_validations(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    row = {"domain": "sums", "row": 4, "prompt": "1 + 1", "answer": 2, "response": "2", "score": 1.0}
    (run / "examples.json").write_text(json.dumps({"0": [row | {"score": 0.0, "response": "5"}], "20": [row], "x": 1}))
    first, last = found(run)["validation"]
    assert (first["step"], first["score"], last["step"], last["score"]) == (0, 0.0, 20, 1.0)
    assert first["prompt"] == last["prompt"] and last["answer"] == "2" and last["said"][0]["text"] == "2"


def test_episodes_come_with_their_pictures(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    folder = run / "episodes/step_000004/lake%2F1"
    folder.mkdir(parents=True)
    (folder / "best.txt").write_text("score 1\n\n[user]\n_G")
    Image.new("RGB", (3000, 20), "red").save(folder / "best.png")
    data = found(run)
    (one,) = data["episodes"]
    assert (one["id"], one["set"], one["said"][0]["role"]) == ("e4/lake/1/best", "lake/1", "best episode")
    (name,) = one["said"][0]["pictures"]
    assert opened(data["pictures"][name]).size == (1024, 7)


def opened(url: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))


def test_images_are_small_copies_at_their_messages(tmp_path: Path) -> None:
    declare(IMAGES)
    run = make_run(tmp_path / "run")
    shown = [picture(10), picture(200, start=11)]
    messages = [
        {"role": "user", "content": "<image> which?"},
        {"role": "assistant", "content": "this <image>"},
        {"role": "user", "content": "and <image>"},
        {"role": "assistant", "content": "no"},
    ]
    one = sample(1, 0, ["ab", "c"], 1.0, messages=messages, images=image_rows(shown))
    other = sample(1, 1, ["c"], 0.0, images=image_rows(shown[:1]), messages=messages[:2])
    write_step(run, 1, [one, other], media={each.digest: each.content for each in shown})
    data = found(run)
    first, last = (each.digest.hex() for each in shown)
    assert data["prompts"][data["training"][0]["prompt"]][0]["pictures"] == [first]
    said = data["training"][0]["said"]
    assert "pictures" not in said[0] and said[1]["pictures"] == [last]
    copy = opened(data["pictures"][last])
    assert copy.size == (4 * 28, 2 * 28) and copy.convert("RGB").getpixel((5, 5)) == (200, 200, 200)
    assert data["training"][0]["prompt"] == data["training"][1]["prompt"]
    (run / f"rollouts/pictures/{last[:2]}/{last}.png").write_bytes(b"damaged")
    again = found(run)
    assert set(again["pictures"]) == {first} and again["about"]["pictures_left_out"] == 1


def check_samples(run: Path, num_steps: int, per_step: int) -> None:
    """The samples of a run's report are those that it stored; for the tests that start runs."""
    data = found(run, 2_000_000)
    by_id = {one["id"]: one for one in data["training"]}
    assert data["about"]["training"]["total"] == len(by_id) == num_steps * per_step
    reader = RolloutReader(run, provisional=True)
    for step in reader.steps():
        rollouts = reader.read(step)
        with open_step(run / f"rollouts/step_{step:06d}") as rows:
            rewards = rows.column("rewards")
            assert rows.lengths().tolist() == rollouts.batch.lengths.tolist()
            assert rewards is not None and rewards.tolist() == rollouts.batch.rewards.tolist()
        for row, (uid, attempt, member) in enumerate(map(split_sample_id, rollouts.batch.sample_ids.tolist())):
            one = by_id[f"s{step}-{uid}-{attempt}-{member}"]
            assert one["reward"] == pytest.approx(rollouts.batch.rewards[row].item(), rel=1e-5)
            assert data["prompts"][one["prompt"]][0]["text"] == rollouts.messages(row)[0]["content"]
    assert data["validation"] and all("text" in said for one in data["validation"] for said in one["said"])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_of_100000_samples_is_sampled_down(tmp_path: Path) -> None:
    """500 steps of 25 groups of 8: the page has few MB and says what it left out."""
    run = write_run(tmp_path / "run", steps=500)
    (run / "model").mkdir()
    byte_tokenizer().save(str(run / "model/tokenizer.json"))
    words = "so 17 times 23 is 391 and we are done "
    made = [
        sample(uid, member, [words * (2 + member)], reward=member / 7, prompt=f"{PROMPT} number {uid}")
        for uid in range(1, 26)
        for member in range(8)
    ]
    write_step(run, 1, made)
    for step in range(2, 501):
        shutil.copytree(run / "rollouts/step_000001", run / f"rollouts/step_{step:06d}", copy_function=os.link)
    began = time.process_time()
    text = page([RunFiles(run)])
    assert len(text.encode()) < 6_000_000 and time.process_time() - began < 15
    data = blocks(text)["data-0-samples"]
    about = data["about"]["training"]
    assert (about["total"], about["num_steps"]) == (100_000, 500) and about["outcomes"] == {"trained": 12_500}
    assert 100 < len(data["training"]) < 5_000 and len(about["steps"]) > 5
    assert re.match(r"whole groups from \d+ of 500 steps, evenly spread, by a hash of their prompts", about["choice"])
    assert min(about["steps"]) == 1 and max(about["steps"]) == 500
    assert "problems" not in text or blocks(text)["report-head"]["runs"][0]["problems"] == []
