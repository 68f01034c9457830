"""Benchmarks by name: published files as rows, with their rewards. Real files where they are, else two rows in the
published form."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pytest
from pyarrow import parquet

from hpcrl.config import Config, DataConfig, DataSource, EvalConfig, RewardConfig, parse
from hpcrl.data import read_splits
from hpcrl.data.benchmarks import BenchmarkTable
from hpcrl.data.places import is_missing, open_table
from hpcrl.data.rows import Row, RowSet
from hpcrl.rewards.reward import Reward, RewardItem, make_reward
from hpcrl.rewards.serving.router import Router, validate_rewards
from hpcrl.spec.benchmarks import BENCHMARKS, SUITES, BenchmarkOptions

MATH500 = [
    {
        "problem": "What is $1+1$?",
        "solution": "It is $\\boxed{2}$.",
        "answer": "2",
        "subject": "Prealgebra",
        "level": 1,
        "unique_id": "test/prealgebra/1.json",
    },
    {
        "problem": "Half of $\\pi$?",
        "solution": "$\\boxed{\\frac{\\pi}{2}}$",
        "answer": "\\frac{\\pi}{2}",
        "subject": "Precalculus",
        "level": 5,
        "unique_id": "test/precalculus/2.json",
    },
]
AIME24 = [{"id": 60, "problem": "Find $n$.", "solution": "\\boxed{025}", "url": "https://example.org"}]
AIME25 = [{"problem": "Find $m$.", "answer": "70", "id": "0"}]
OTHER_AIME = [{"ID": "2024-I-1", "Problem": "Find $k$.", "Solution": "...", "Answer": 204}]
MBPP = [
    {
        "source_file": "Benchmark Questions Verification V2.ipynb",
        "task_id": 2,
        "prompt": "Write a function to add two numbers.",
        "code": "def add(a, b):\n  return a + b",
        "test_imports": [],
        "test_list": ["assert add(1, 2) == 3", "assert add(0, 0) == 0"],
    },
    {
        "source_file": "charlessutton@: Benchmark Questions Verification.ipynb",
        "task_id": 3,
        "prompt": "Write a function for the square root.",
        "code": "import math\ndef root(x):\n  return math.sqrt(x)",
        "test_imports": ["import math"],
        "test_list": ["assert math.isclose(root(2), 1.4142135623)"],
    },
]
FULL_MBPP = [
    {
        "task_id": 11,
        "text": "Write a python function to negate a number.",
        "code": "def negate(x):\r\n    return -x",
        "test_list": ["assert negate(1) == -1"],
        "test_setup_code": "",
        "challenge_test_list": [],
    }
]
GPQA = [
    {
        "Record ID": "rec0",
        "Question": "Which is even?\n",
        "Correct Answer": "2",
        "Incorrect Answer 1": "1",
        "Incorrect Answer 2": "3",
        "Incorrect Answer 3": "5",
        "High-level domain": "Mathematics",
        "Subdomain": "Arithmetic",
    },
    {
        "Record ID": "rec1",
        "Question": 'Which "letter", is, quoted?',
        "Correct Answer": "a, b",
        "Incorrect Answer 1": "c",
        "Incorrect Answer 2": "d",
        "Incorrect Answer 3": "e",
        "High-level domain": "Letters",
        "Subdomain": "",
    },
]


def jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def rows_of(name: str, file: str, **options: str) -> list[Row]:
    source = DataSource(path=f"benchmark:{name}", options={"file": file, **options})
    found = RowSet(DataConfig(val=[source]), "val", 0)
    assert found.domain_names == [name]
    return [found.row(index) for index in range(len(found))]


@functools.cache
def reward_of(name: str) -> Reward:
    return make_reward(Router(Config(data=DataConfig(val=f"benchmark:{name}"))).of(name))


def scores(name: str, row: Row, *responses: str) -> list[float]:
    reward = reward_of(name)
    assert not reward.problem_of_row(row.answer, row.extra)
    prompt = row.messages[-1]["content"]
    items = [RewardItem(n, name, prompt, text, row.answer, row.extra) for n, text in enumerate(responses)]
    found = reward.score(items)
    assert not any(each.error for each in found)
    return [each.score for each in found]


def test_every_benchmark_has_a_row_function_and_a_reward() -> None:
    for name, spec in BENCHMARKS.items():
        BenchmarkTable(name, BenchmarkOptions(), open_table(DataSource(path="task:add", size=1), 0, "val"))
        assert callable(reward_of(name).score) and spec.file.count("/") >= 2


def test_maths_rows_have_the_usual_prompt_and_the_published_answer(tmp_path: Path) -> None:
    one, two = rows_of("math500", jsonl(tmp_path / "test.jsonl", MATH500))
    boxed = "Please reason step by step, and put your final answer within \\boxed{}."
    assert one.messages == [{"role": "user", "content": f"What is $1+1$?\n\n{boxed}"}]
    assert (two.answer, two.extra["tags"]) == ("\\frac{\\pi}{2}", ["Precalculus", "level 5"])
    for row, raw in ((one, MATH500[0]), (two, MATH500[1])):
        assert scores("math500", row, raw["solution"], "\\boxed{3}", "no answer") == [1, 0, 0]


def test_aime_is_read_in_three_published_forms(tmp_path: Path) -> None:
    parquet.write_table(arrow.Table.from_pylist(AIME24), tmp_path / "test-00000-of-00001.parquet")
    (boxed,) = rows_of("aime24", str(tmp_path / "test-00000-of-00001.parquet"))
    assert scores("aime24", boxed, "\\boxed{25}", "\\boxed{26}") == [1, 0]
    (plain,) = rows_of("aime25", jsonl(tmp_path / "test.jsonl", AIME25))
    assert scores("aime25", plain, "\\boxed{70}", "\\boxed{7}") == [1, 0]
    (capitals,) = rows_of("aime24", jsonl(tmp_path / "problems.jsonl", OTHER_AIME))
    assert scores("aime24", capitals, "\\boxed{204}", "\\boxed{205}") == [1, 0]


@pytest.mark.parametrize("published", [MBPP, FULL_MBPP], ids=["sanitized", "full"])
def test_mbpp_references_pass_and_wrong_code_does_not(published: list[dict[str, Any]], tmp_path: Path) -> None:
    parquet.write_table(arrow.Table.from_pylist(published), tmp_path / "mbpp.parquet")
    for row, raw in zip(rows_of("mbpp", str(tmp_path / "mbpp.parquet")), published, strict=True):
        name = raw["code"].partition("def ")[2].partition("(")[0]
        wrong = f"def {name}(*_):\n    return 99"
        assert scores("mbpp", row, f"Here:\n```python\n{raw['code']}\n```", wrong) == [1, 0]
        prompt = row.messages[-1]["content"]
        assert prompt.startswith("You are an expert Python programmer, and here is your task:\nWrite a ")
        assert prompt.endswith("Your code should pass these tests:\n" + "\n".join(raw["test_list"]))
        assert raw["code"] not in json.dumps(row.extra), "the reference is not a column"


def test_gpqa_choices_are_in_an_order_of_the_question_alone(tmp_path: Path) -> None:
    import csv

    with (tmp_path / "gpqa_diamond.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(GPQA[0]))
        writer.writeheader()
        writer.writerows(GPQA)
    rows = rows_of("gpqa_diamond", str(tmp_path / "gpqa_diamond.csv"))
    for row, raw in zip(rows, GPQA, strict=True):
        prompt = row.messages[-1]["content"]
        lines = prompt.splitlines()[-4:]
        assert sorted(line[3:] for line in lines) == sorted(raw[key] for key in raw if "Answer" in key)
        assert f"{row.answer}) {raw['Correct Answer']}" in lines
        wrong = "A" if row.answer != "A" else "B"
        assert scores("gpqa_diamond", row, f"Well.\nAnswer: {row.answer}", f"\\boxed{{{wrong}}}") == [1, 0]
    assert (rows[0].extra["tags"], rows[1].extra["tags"]) == (["Mathematics", "Arithmetic"], ["Letters"])
    (alone,) = rows_of("gpqa_diamond", jsonl(tmp_path / "one.jsonl", GPQA[1:]))
    assert alone.messages == rows[1].messages
    letters = {
        rows_of("gpqa_diamond", jsonl(tmp_path / "q.jsonl", [GPQA[0] | {"Question": f"Question {n}"}]))[0].answer
        for n in range(40)
    }
    assert letters == set("ABCD"), "the right choice is not always at one place"


def test_gsm8k_references_are_right(shared_data: Path) -> None:
    file = shared_data / "gsm8k" / "test.jsonl"
    rows, raw = rows_of("gsm8k", str(file)), [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == 1319
    for number, (row, published) in enumerate(zip(rows, raw, strict=True)):
        gold = published["answer"].partition("#### ")[2]
        others = ["\\boxed{-17}", f"\\boxed{{{gold}}}"] if number % 60 == 0 else []
        assert scores("gsm8k", row, published["answer"], *others) == [1, 0, 1][: 1 + len(others)]
        assert row.messages[-1]["content"].startswith(published["question"])


@pytest.mark.slow
def test_humaneval_references_pass_and_empty_functions_do_not(shared_data: Path) -> None:
    file = shared_data / "humaneval" / "HumanEval.jsonl"
    rows, raw = rows_of("humaneval", str(file)), [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == 164
    for number, (row, published) in enumerate(zip(rows, raw, strict=True)):
        reference = published["canonical_solution"]
        whole = f"```python\n{published['prompt']}{reference}```"
        others = ["    return None\n", reference] if number % 8 == 0 else []  # the reference continues the prompt
        assert scores("humaneval", row, whole, *others) == [1, 0, 1][: 1 + len(others)], published["task_id"]
        assert reference.strip() not in json.dumps([row.extra, row.messages])


def test_ifeval_rows_are_those_of_the_published_file(shared_data: Path, tmp_path: Path) -> None:
    file = shared_data / "ifeval" / "input_data.jsonl"
    rows = rows_of("ifeval", str(file))
    raw = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(rows) == 541 and [row.messages[0]["content"] for row in rows] == [each["prompt"] for each in raw]
    reward = reward_of("ifeval")
    assert [problem for row in rows if (problem := reward.problem_of_row(row.answer, row.extra))] == []
    no_comma = rows[1]
    assert no_comma.extra["instruction_id_list"] == ["punctuation:no_comma"] and no_comma.extra["tags"] == [
        "punctuation"
    ]
    assert scores("ifeval", no_comma, "Verily we go.", "Verily, we go.") == [1, 0]
    parquet.write_table(arrow.Table.from_pylist(raw), tmp_path / "ifeval.parquet")  # absent arguments become null
    assert [row.extra for row in rows_of("ifeval", str(tmp_path / "ifeval.parquet"))] == [row.extra for row in rows]


def test_suites_have_rows_of_each_data_set_in_turn() -> None:
    table = open_table(DataSource(path="benchmark:reasoning_gym_induction"), 0, "val")
    assert len(table) == 40 and [table.row(n)["tags"] for n in range(3)] == [["acre"], ["list_functions"], ["acre"]]
    other = open_table(DataSource(path="benchmark:reasoning_gym_induction", size=5), 7, "val")
    assert len(other) == 5 and other.row(4)["prompt"] == table.row(4)["prompt"], "the same rows under any seed"
    with pytest.raises(ValueError, match="size=2049 is above 2048, 1024 of each data set"):
        open_table(DataSource(path="benchmark:reasoning_gym_induction", size=2049), 0, "val")
    found = RowSet(DataConfig(val="benchmark:reasoning_gym_induction"), "val", 0)
    row = found.row(1)
    assert found.domain_names == ["reasoning_gym_induction"]
    assert scores("reasoning_gym_induction", row, row.answer, "nothing") == [1, pytest.approx(0, abs=0.05)]


@pytest.mark.slow
def test_every_suite_has_rows() -> None:
    for category in SUITES:
        table = open_table(DataSource(path=f"benchmark:reasoning_gym_{category}"), 0, "val")
        assert len(table) % 20 == 0 and table.row(len(table) - 1)["prompt"]


def test_a_file_that_is_not_there_names_the_command_that_gets_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    for name, spec in BENCHMARKS.items():
        with pytest.raises(ValueError, match="is not in the local Hugging Face cache") as raised:
            open_table(DataSource(path=f"benchmark:{name}"), 0, "val")
        assert f"python -m hpcrl prefetch datasets/{spec.file} (" in str(raised.value)
        assert "\n" not in str(raised.value) and is_missing(DataSource(path=f"benchmark:{name}"))
    with pytest.raises(ValueError, match=r"benchmark:gsm8k: absent\.jsonl: no such file"):
        open_table(DataSource(path="benchmark:gsm8k", options={"file": "absent.jsonl"}), 0, "val")


def test_a_published_file_is_found_in_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Written as huggingface_hub does."""
    repo = tmp_path / "datasets--math-ai--aime25"
    (repo / "snapshots" / "abc").mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    jsonl(repo / "snapshots" / "abc" / "test.jsonl", AIME25)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path))
    assert open_table(DataSource(path="benchmark:aime25"), 0, "val").row(0)["answer"] == "70"
    assert not is_missing(DataSource(path="benchmark:aime25"))


def test_wrong_sources_are_refused_in_one_line(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "rows.jsonl", [*MATH500, {"prompt": "p", "answer": "1"}])

    def problem(source: dict[str, Any], split: str = "val") -> str:
        (found,) = read_splits(DataConfig(**{"train": "task:add", split: [source]}), 0)[1]
        return found

    assert "no benchmark 'gsm9k'; there are gsm8k, math500" in problem({"path": "benchmark:gsm9k"})
    said = problem({"path": "benchmark:math500", "options": {"file": file}})
    assert said.startswith(
        f"{file}:3: not a row of benchmark:math500: no column question or problem or Problem; the row"
    )
    options = {"file": file, "template": "no place"}
    assert "template must have {question} once" in problem({"path": "benchmark:math500", "options": options})
    assert "there is no option 'path'" in problem({"path": "benchmark:math500", "options": {"path": file}})
    assert "eval.sets.math500.num_prompts" in problem({"path": "benchmark:math500", "size": 3})
    assert "the test set, which is for data.val" in problem({"path": "benchmark:math500"}, "train")
    assert "for data.val; reasoning_gym:NAME" in problem({"path": "benchmark:reasoning_gym_logic"}, "train")
    bad = jsonl(tmp_path / "bad.jsonl", [MBPP[0] | {"test_list": "assert 1"}])
    assert "bad.jsonl:1: not a row" in problem({"path": "benchmark:mbpp", "options": {"file": bad}})


def test_a_template_is_part_of_the_fingerprint(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "rows.jsonl", MATH500)
    (one, _), (other, _) = rows_of("math500", file), rows_of("math500", file, template="Q: {question}\nA:")
    assert other.messages[0]["content"] == "Q: What is $1+1$?\nA:" != one.messages[0]["content"]
    digests = {
        open_table(DataSource(path="benchmark:math500", options={"file": file, **more}), 0, "val").digest
        for more in ({}, {"template": "{question}"}, {"template": "{question}!"})
    }
    assert len(digests) == 3


def test_keys_of_other_sources_do_not_apply_to_a_benchmark(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "rows.jsonl", MATH500)
    train = jsonl(tmp_path / "train.jsonl", [{"input": "q", "label": "3", "kind": "mine"}])
    keys = {"prompt_key": "input", "answer_key": "label", "domain_key": "kind", "system_prompt": "Be brief."}
    val = [DataSource(path="benchmark:math500", options={"file": file})]
    rows, problems = read_splits(DataConfig(train=train, val=val, **keys), 0)
    assert problems == [] and rows["train"].domain_names == ["mine"] and rows["val"].domain_names == ["math500"]
    assert rows["val"].row(0).messages[0] == {"role": "system", "content": "Be brief."}


def test_a_benchmark_has_its_own_reward_unless_its_domain_has_one(tmp_path: Path) -> None:
    val = [DataSource(path="benchmark:gpqa_diamond"), DataSource(path="benchmark:math500", domain="maths")]
    exact = RewardConfig(name="exact_match")
    router = Router(Config(data=DataConfig(val=val), reward={"default": exact}))
    assert (router.of("gpqa_diamond").name, router.of("maths").name, router.of("else").name) == (
        "choice", "math", "exact_match",
    )  # fmt: skip
    own = Router(Config(data=DataConfig(val=val), reward={"default": exact, "maths": RewardConfig(name="numeric")}))
    assert (own.of("gpqa_diamond").name, own.of("maths").name) == ("choice", "numeric")
    file = jsonl(tmp_path / "rows.jsonl", MATH500)
    data = DataConfig(train="task:add", val=[DataSource(path="benchmark:math500", options={"file": file})])
    config = Config(data=data, reward={"default": exact})
    assert validate_rewards(config, read_splits(data, 0)[0]) == []


def sampling(**data: Any) -> dict[str, tuple[Any, Any]]:
    config = parse({"data": {"train": "task:add"}, **data})
    assert parse(config.model_dump(mode="json")).eval == config.eval, "a stored configuration is read as it is"
    return {name: (own.samples, own.temperature) for name, own in config.eval.sets.items()}


def test_benchmarks_are_sampled_as_usual_unless_configured() -> None:
    aime = {"train": "task:add", "val": ["benchmark:aime24", {"path": "benchmark:aime25", "domain": "new"}, "task:add"]}
    assert sampling(data=aime) == {"aime24": (16, 0.6), "new": (16, 0.6)}
    assert sampling(data=aime | {"val": "benchmark:gsm8k"}) == {}, "greedy, as is the default"
    assert sampling(data=aime, eval={"samples": 4, "temperature": 1.0}) == {}
    given = {"sets": {"aime24": {"num_prompts": 5}, "new": {"samples": 1}}}
    assert sampling(data=aime, eval=given) == {"aime24": (16, 0.6), "new": (1, None)}
    config = parse({"data": aime, "eval": given})
    assert config.eval.sets["aime24"].num_prompts == 5
    assert Config(data=DataConfig(val="benchmark:aime24")).eval.of_domain("aime24").samples == 16
    assert Config(data=DataConfig(val="benchmark:aime24"), eval=EvalConfig(samples=2)).eval.sets == {}
