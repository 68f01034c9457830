"""Which reward a domain gets, and problems found before the start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import Config, DataConfig, DataSource, RewardConfig, load, parse
from hpcrl.data import read_splits
from hpcrl.launch.plan import describe
from hpcrl.launch.prepare import prepare
from hpcrl.rewards.serving.router import Router, check_reward_ranks, reward_notes
from hpcrl.rewards.serving.router import validate_rewards as validate

FILE = Path(__file__).with_name("user_rewards.py")
MATH, EXACT = RewardConfig(name="math"), RewardConfig(name="exact_match")


def jsonl(path: Path, *rows: dict) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_a_domain_uses_its_own_section_or_else_the_default():
    router = Router(Config(reward={"a": MATH, "default": EXACT}))
    assert router.of("a") is MATH and router.of("b") is EXACT
    for reward in ({"a": MATH}, {"a": MATH, "b": EXACT}):
        there = ", ".join(reward)
        with pytest.raises(
            ValueError, match=rf"domain 'c' has no reward: set reward.c.name or .* \(there are: {there}\)"
        ):
            Router(Config(reward=reward)).of("c")


def test_data_sources_determine_their_rewards(tmp_path: Path):
    gsm8k = jsonl(tmp_path / "gsm8k.jsonl", {"question": "q", "answer": "5\n#### 5"})
    boxed = jsonl(tmp_path / "boxed.jsonl", {"problem": "q", "solution": r"\boxed{5}", "tag": "algebra"})
    train = ["task:sort_digits", DataSource(path="task:add", domain="sums"), "reasoning_gym:gcd", gsm8k, boxed]
    router = Router(Config(data=DataConfig(train=train)))
    assert {domain: section.name for domain, section in router.sections.items()} == {
        "sort_digits": "sort_digits", "sums": "exact_match", "gcd": "reasoning_gym", "default": "math",
        "algebra": "math",
    }  # fmt: skip


def validate_rewards(config: Config) -> list[str]:
    return validate(config, read_splits(config.data, config.seed)[0])


def test_valid_rewards_have_no_problem(tmp_path: Path):
    data = DataConfig(train=["task:add", jsonl(tmp_path / "a.jsonl", {"prompt": "a", "answer": "#### 1"})])
    assert validate_rewards(Config(data=data)) == []
    assert validate_rewards(Config(reward={"default": RewardConfig(name="function", function=f"{FILE}:trl")})) == []


@pytest.mark.slow
def test_all_problems_are_reported_at_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    (tmp_path / "deadly.py").write_text("import os\nos._exit(7)\n")
    rows = [{"prompt": "a", "answer": "b", "tag": tag} for tag in "xyfgl"]
    data = DataConfig(train=jsonl(tmp_path / "a.jsonl", *rows))
    reward = {
        "x": RewardConfig(options={"patern": "a"}),
        "f": RewardConfig(name="function", function=f"{FILE}:unknown"),
        "g": RewardConfig(name="function", function=f"{tmp_path}/deadly.py:f"),
        "l": RewardConfig(name="function", function=f"{'x' * 300}.py:f"),
    }
    problems = validate_rewards(Config(data=data, reward=reward))
    assert len(problems) == 5 and all("\n" not in problem for problem in problems)
    assert capfd.readouterr().err == "", "no traceback of a worker"
    for problem, start, text in zip(
        problems,
        ("reward.x: options:", "reward.f: function:", "reward.g: function:", "reward.l: function:", f"{data.train}:2:"),
        ("option 'patern'", "fit no known signature", "ended the process with 7", "name too long", "set reward.y.name"),
        strict=True,
    ):
        assert problem.startswith(start) and text in problem


@pytest.mark.parametrize("rule", ["sum", "product"])
def test_a_product_is_refused_if_parts_are_normalised_separately(rule: str) -> None:
    options = {"parts": {"a": {"name": "exact_match"}, "b": {"name": "f1"}}, "rule": rule}
    told = {
        "sum": [],
        "product": ["reward.default: options.rule: product has no parts that can be normalised separately; use sum"],
    }
    sections = {"reward": {"default": {"name": "composed", "options": options}}}
    assert validate_rewards(parse(sections | {"algorithm": {"advantage_estimator": "gdpo"}})) == told[rule]
    assert validate_rewards(parse(sections)) == []


@pytest.mark.slow
def test_rows_without_an_answer_are_named_if_the_reward_needs_one(tmp_path: Path):
    rows = [{"prompt": "a", "answer": "4", "tag": "x"}, *({"prompt": "b", "tag": tag} for tag in "xxf")]
    path = jsonl(tmp_path / "a.jsonl", *rows, {"prompt": "c", "answer": " ", "tag": "x"})
    reward = {"x": RewardConfig(name="exact_match"), "f": RewardConfig(name="function", function=f"{FILE}:trl")}
    (problem,) = validate_rewards(Config(data=DataConfig(train=path), reward=reward))
    assert problem.startswith(
        f"{path}:2: no answer (looked for answer, ground_truth, label, solution; data.answer_key)"
    )
    assert problem.endswith("which the reward exact_match compares with; 3 rows of domain x in data.train have none")
    no_need = {"default": RewardConfig(name="function", function=f"{FILE}:trl")}
    assert validate_rewards(Config(data=DataConfig(train=path), reward=no_need)) == []


def test_too_long_gold_answers_are_named(tmp_path: Path):
    long = [{"prompt": "a", "answer": answer} for answer in ("so " * 200 + "#### 4", "7" * 300, "7" * 301, ["7"] * 99)]
    data = DataConfig(train=["task:add", jsonl(tmp_path / "a.jsonl", *long)])
    assert validate_rewards(Config(data=data, reward={"default": MATH})) == [
        f"{tmp_path}/a.jsonl:3: the gold answer '{'7' * 20}'... has 301 characters, but at most 300 are compared "
        "(reward.*.options.max_answer_chars); data.train has 2 such rows of domain default"
    ]
    longer = RewardConfig(name="math", options={"max_answer_chars": 600})
    assert validate_rewards(Config(data=data, reward={"default": longer})) == []
    assert validate_rewards(Config(data=data, reward={"default": EXACT})) == []


def test_incomplete_gold_answers_are_counted(tmp_path: Path):
    answers = ("so #### 4", "thinking ####", r"\boxed{}", r"\frac{1")
    path = jsonl(tmp_path / "a.jsonl", *({"prompt": "a", "answer": answer} for answer in answers))
    (problem,) = validate_rewards(Config(data=DataConfig(train=path), reward={"default": MATH}))
    assert problem.startswith(f"{path}:2: the gold answer is empty")
    assert problem.endswith("; data.train has 3 such rows of domain default")


def test_an_empty_first_gold_answer_still_names_the_reward(tmp_path: Path):
    path = jsonl(tmp_path / "a.jsonl", {"prompt": "a", "answer": "so ####"}, {"prompt": "b", "answer": "#### 4"})
    (problem,) = validate_rewards(Config(data=DataConfig(train=path)))
    assert problem.startswith(f"{path}:1: the gold answer is empty") and "has 1 such row" in problem


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["math", "default"], "math (there are: maths, code); did you mean reward.maths?"),
        (["x", "default"], "x (there are: maths, code); reward.default is that of all domains without their own"),
        (["maths", "code"], None),
        (["maths", "default"], None),
        (["default"], None),
    ],
)
def test_a_reward_without_rows_is_named(names: list[str], said: str | None, tmp_path: Path):
    rows = [{"prompt": "a", "answer": "4", "tag": tag} for tag in ("maths", "code")]
    config = Config(data=DataConfig(train=jsonl(tmp_path / "a.jsonl", *rows)), reward=dict.fromkeys(names, MATH))
    wrong = [f"reward.{names[0]}: no row of data.train or data.val is of domain {said}"] if said else []
    assert validate_rewards(config) == wrong


@pytest.mark.parametrize(
    ("domains", "said"),
    [
        ({"maths": 1}, []),
        ({"maths": 1, "code": 1}, []),
        ({"maths": 2}, ["all 2 reward ranks score one domain only, and none is left for code; raise"]),
        ({"kode": 1}, ["kode: no row of data.train or data.val is of domain kode (there are: maths, code); did you"]),
    ],
)
def test_reward_ranks_of_domains_are_checked_against_the_rows(domains: dict, said: list[str], tmp_path: Path):
    rows = [{"prompt": "a", "answer": "4", "tag": tag} for tag in ("maths", "code")]
    path, counts = jsonl(tmp_path / "a.jsonl", *rows), ",".join(f"{name}:{count}" for name, count in domains.items())
    config = load([f"data.train={path}", f"layout.reward.domains={{{counts}}}"])
    found = check_reward_ranks(config, RoleLayout.from_config(config), read_splits(config.data, 0)[0])
    assert len(found) == len(said)
    for problem, start in zip(found, said, strict=True):
        assert problem.removeprefix("layout.reward.domains").lstrip(".: ").startswith(start)


def test_limits_of_a_domain_without_rows_are_named(tmp_path: Path):
    path = jsonl(tmp_path / "a.jsonl", {"prompt": "a", "answer": "4", "tag": "maths"})
    (problem,) = validate_rewards(load([f"data.train={path}", "reward.default.name=math", "rollout.domains={math:{}}"]))
    assert problem.startswith("rollout.domains.math: no row of data.train or data.val is of domain math (there are: ")


def test_settings_of_a_set_without_rows_are_named(tmp_path: Path):
    path = jsonl(tmp_path / "a.jsonl", {"prompt": "a", "answer": "4", "tag": "maths"})
    words = [f"data.train={path}", "data.val=[{path:task:add,domain:sums}]", "reward.default.name=exact_match"]
    (problem,) = validate_rewards(load([*words, "eval.sets={maths:{num_prompts:2},sums:{num_prompts:3}}"]))
    assert problem.startswith(
        "eval.sets.maths: no row of data.val is of domain maths (there are: sums); the keys of eval"
    )


@pytest.mark.parametrize(("domains", "added", "said"), [("add:2", "", 0), ("game:1", "", 1), ("add:2", "true", 1)])
def test_a_domain_rewarded_by_its_environment_gets_no_reward_ranks(domains: str, added: str, said: int):
    words = [
        "pipeline=agentic",
        "data.train=[{path:env:default,domain:game},{path:task:add,domain:add}]",
        "env.default=null",
    ]
    words += ["env.game.name=frozen_lake", f"layout.reward.domains={{{domains}}}"]
    config = load([*words, *([f"env.game.add_reward={added}", "reward.default.name=exact_match"] if added else [])])
    found = check_reward_ranks(config, RoleLayout.from_config(config), read_splits(config.data, 0)[0])
    assert len(found) == said and all("game" in problem for problem in found)


def test_a_rank_for_one_domain_has_only_its_reward():
    router = Router(Config(reward={"a": MATH, "default": EXACT}))
    assert router.restricted("a", {"a"}).sections == {"a": MATH}
    assert router.restricted("b", {"b"}).sections == {"b": EXACT}
    assert router.restricted(None, {"a", "b"}).sections == {"default": EXACT}


def test_a_domain_without_a_reward_is_reported_with_its_rows_and_the_nearest_name(tmp_path: Path):
    tags = ("maths", "code", "mathss", "code", "mathss")
    path = jsonl(tmp_path / "a.jsonl", *({"prompt": "a", "answer": "4", "tag": tag} for tag in tags))
    lacks = (
        "has no reward: set reward.{0}.name or reward.default.name (there are: maths); data.train has 2 rows of this"
    )
    config = Config(data=DataConfig(train=path), reward={"maths": MATH})
    assert validate_rewards(config) == [
        f"{path}:2: domain 'code' {lacks.format('code')} domain",
        f"{path}:3: domain 'mathss' {lacks.format('mathss')} domain; or did you mean the domain maths?",
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("reward.default.name=none", "the rewards of the domains maths, chat are all 0 (reward none), so the policy"),
        ("reward.chat.name=none", "the rewards of domain chat are all 0 (reward none), so the policy loss learns"),
        ("reward.chat.name=none pipeline=online_dpo", "the rewards of domain chat are all 0 (reward none), so the onl"),
        ("reward.chat.name=none loss.chat={policy:0,ce:1}", None),
        ("reward.chat.name=none loss.chat.divergence=.1 model.path=a teacher.path=b", None),
        ("reward.chat.name=none loss.maths.ce=.1", "the rewards of domain chat are all 0"),
        ("reward.default.name=none pipeline=distill model.path=a teacher.path=b", None),
        (
            "pipeline=distill model.path=a teacher.path=b loss.chat={policy:1,divergence:0}",
            "the rewards of domain chat are all 0",
        ),
        ("reward.chat.name=none env.chat.name=scripted", None),
        ("reward.chat.name=none debug=rollout_only", None),
        ("reward.default.name=none debug=fake", None),
        ("reward.default.name=none pipeline=generate", None),
    ],
)
def test_rewards_that_are_all_0_are_refused_where_nothing_else_is_learned(words: str, said: str, tmp_path: Path):
    rows = ({"prompt": "a", "answer": "4", "tag": tag} for tag in ("maths", "chat", "maths"))
    path = jsonl(tmp_path / "a.jsonl", *rows)
    scored = ["reward.maths.name=math"] if "reward.chat" in words else []
    found = validate_rewards(load([f"data.train={path}", *scored, *words.split()]))
    if said is None:
        assert found == []
        return
    (line,) = found
    first = 1 if "maths, chat" in said else 2
    assert line.startswith(f"{path}:{first}: {said}"), line
    assert line.endswith("name, or use pipeline=distill with a teacher")


def test_a_misspelt_section_hides_only_the_domain_it_may_be_meant_for(tmp_path: Path):
    path = jsonl(tmp_path / "a.jsonl", *({"prompt": "a", "answer": "4", "tag": tag} for tag in ("maths", "code")))
    wrong = validate_rewards(Config(data=DataConfig(train=path), reward={"math": MATH}))
    assert [line.split(" ")[0] for line in wrong] == ["reward.math:", f"{path}:2:"]


def test_a_domain_with_the_default_reward_and_a_name_close_to_a_section_is_noted(tmp_path: Path):
    tags = ("maths", "mathss", "code", "mathss")
    path = jsonl(tmp_path / "a.jsonl", *({"prompt": "a", "answer": "4", "tag": tag} for tag in tags))
    words = [f"data.train={path}", "reward.maths.name=math", "reward.default.name=exact_match"]
    config = load(words)
    assert validate_rewards(config) == []
    note = (
        f"{path}:2: domain mathss gets reward.default; its name is close to reward.maths; data.train has 2 rows of it"
    )
    assert reward_notes(config, read_splits(config.data, 0)[0]) == [note]
    assert f"note: {note}\n" in describe(*prepare([*words, "dry_run=true", f"run_dir={tmp_path}/run"]))
