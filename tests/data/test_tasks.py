"""Generated rows: functions of (seed, split, index), with disjoint splits."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hpcrl.config import RewardConfig
from hpcrl.data.tasks import BROKEN_REASONING_GYM, make_task
from hpcrl.rewards.reward import RewardItem, make_reward


def rows(name: str, seed: int, split: str, count: int, **options) -> list[dict]:
    task = make_task(name, options, None, seed, split)
    return [task.row(index) for index in range(count)]


def test_sort_digits_answers_are_correct():
    for row in rows("task:sort_digits", 0, "train", 300):
        digits = row["prompt"].removeprefix("sort: ").split(" ")
        assert 4 <= len(digits) <= 7 and all(len(d) == 1 for d in digits)
        assert row["answer"] == " ".join(sorted(digits))
    assert {len(r["answer"].split()) for r in rows("task:sort_digits", 0, "val", 100)} == {4, 5, 6, 7}


def test_a_pair_of_sorted_digits_has_one_wrong_answer():
    found = rows("task:sort_pairs", 0, "train", 300)
    assert all(row["chosen"] == " ".join(sorted(row["prompt"].removeprefix("sort: ").split())) for row in found)
    assert all(row["chosen"] == row["answer"] != row["rejected"] for row in found)
    lengths = {len(row["rejected"].split()) - len(row["chosen"].split()) for row in found}
    assert lengths == {-1, 0, 1} and any(sorted(row["rejected"].split()) == row["chosen"].split() for row in found)


def test_add_answers_are_correct():
    for row in rows("task:add", 0, "train", 300):
        a, b = row["prompt"].removeprefix("add: ").split(" + ")
        assert 0 <= int(a) < 100 and 0 <= int(b) < 100 and int(row["answer"]) == int(a) + int(b)


def test_pairs_of_sorted_digits_have_a_wrong_answer_and_the_prompts_of_other_rows() -> None:
    options = {"pairs": True, "min_digits": 1, "max_digits": 5}
    task = make_task("task:sort_digits", options, None, 0, "train")
    plain = make_task("task:sort_digits", options | {"pairs": False}, None, 0, "train")
    for index in range(300):
        row = task.row(index)
        asked, wrong = row["prompt"].removeprefix("sort: ").split(), row["rejected"].split()
        assert row["chosen"] == row["answer"] == " ".join(sorted(asked))
        assert len(wrong) == len(asked) and row["rejected"] != row["chosen"]
        assert {key: row[key] for key in ("prompt", "answer")} == plain.row(index)


@pytest.mark.parametrize("name", ["task:sort_digits", "task:add"])
def test_validation_rows_never_occur_in_training_under_any_seeds(name: str):
    train = {row["prompt"] for seed in (0, 1) for row in rows(name, seed, "train", 2000)}
    val = {row["prompt"] for seed in (0, 1, 2) for row in rows(name, seed, "val", 200)}
    assert len(val) > 100 and not train & val
    assert train & {row["prompt"] for row in rows(name, 3, "train", 2000)}, "contents would overlap without holding out"


def test_generated_rows_depend_only_on_seed_split_and_index():
    code = "from hpcrl.data.tasks import make_task; print(make_task('task:sort_digits', {}, None, 0, 'train').row(0))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == "{'prompt': 'sort: 3 2 9 3', 'answer': '2 3 3 9'}"
    assert rows("task:sort_digits", 0, "train", 20) != rows("task:sort_digits", 1, "train", 20)


@pytest.mark.parametrize(("path", "name"), [("task:program", "code"), ("task:repeat", "ifeval")])
def test_only_the_written_answers_of_a_task_score_full_reward(path: str, name: str):
    reward = make_reward(RewardConfig(name=name))
    reward.start()
    train = make_task(path, {}, None, 0, "train")
    for row in map(train.row, range(3)):
        scores = []
        for response in (row["response"], f"{row['response']} red", row["response"][:-1]):
            (score,) = reward.score([RewardItem(0, "d", row["prompt"], response, row.get("answer"), row)])
            scores.append(score.score)
        assert scores == [1.0, 0.0, 0.0], row


@pytest.mark.slow
def test_reasoning_gym_rows_equal_its_own():
    import reasoning_gym

    train = make_task("reasoning_gym:chain_sum", {"min_terms": 2, "max_terms": 2}, 5, 0, "train")
    recipe = train.row(3)["reasoning_gym"]
    assert recipe["index"] == 3 and recipe["size"] == 5
    entry = reasoning_gym.create_dataset("chain_sum", size=5, seed=recipe["seed"], min_terms=2, max_terms=2)[3]
    assert (train.row(3)["prompt"], train.row(3)["answer"]) == (entry["question"], entry["answer"])
    val = make_task("reasoning_gym:chain_sum", {}, 5, 0, "val").row(0)["reasoning_gym"]
    assert val["seed"] >= 1 << 30 > recipe["seed"] + 5, "item i is made from seed + i"


@pytest.mark.parametrize(
    ("path", "options", "message"),
    [
        (
            "task:nope",
            {},
            "there is no task 'nope'; built in are add, program, repeat, shapes, sort_digits, ",
        ),
        ("task:add", {"digits": 1}, r"task:add: there is no option 'digits' \(there are: max_digits\)"),
        ("task:sort_digits", {"min_digits": 9}, "min_digits=9 is above max_digits=7"),
        ("task:sort_digits", {"min_digits": 1, "max_digits": 1}, "too few different rows"),
        ("reasoning_gym:nope", {}, "reasoning_gym:nope .*not registered"),
        ("reasoning_gym:chain_sum", {"foo": 1}, "chain_sum with options .*unexpected keyword argument 'foo'"),
        *[(f"reasoning_gym:{name}", {}, f"not supported: {why}") for name, why in BROKEN_REASONING_GYM.items()],
    ],
)
def test_an_impossible_task_is_refused_with_the_reason(path: str, options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        for split in ("train", "val"):
            make_task(path, options, None, 0, split).row(0)


def test_excluded_tasks_exist_in_reasoning_gym():
    from reasoning_gym.factory import DATASETS

    assert len(BROKEN_REASONING_GYM) == 7 and set(BROKEN_REASONING_GYM) <= set(DATASETS)
