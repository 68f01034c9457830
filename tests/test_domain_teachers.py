"""Teachers by domain in the configuration: refused before the start in one line, counted in the plan."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import ConfigError, TinyModel, load
from hpcrl.engines.tiny import make_tiny_model
from hpcrl.launch.plan import describe
from hpcrl.launch.prepare import prepare
from hpcrl.models.families import shape_of
from hpcrl.planner.memory import check_sizes, memory
from hpcrl.planner.trainer import teacher_parts, trainer_parts
from hpcrl.run_folder.models import check_models, models_of

DISTILL = ["pipeline=distill", "model.path=policy", "rollout.group_size=1"]
SIZES = {"num_heads": 2, "num_kv_heads": 1, "intermediate_size": 16}
WEIGHTS = ["loss.chat.divergence=0", "loss.chat.ce=1"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["teacher.path=a", "teacher.paths.math=b"],
            "teacher.paths: teacher.path is given, too; give one of them (teacher.paths.default is for all other",
        ),
        (["teacher.paths={}"], "teacher.path: there is no model to learn from; give a folder in HF layout"),
        (
            ["teacher.paths={math: a, code: b}", "loss.chat.policy=1"],
            "loss.chat.divergence: 1, but no teacher judges the domain chat (teacher.paths has: math, code); give "
            "teacher.paths.chat or teacher.paths.default, or use loss.chat.divergence=0",
        ),
        (
            ["teacher.paths={math: a, chat: b}", *WEIGHTS],
            "teacher.paths.chat: not read here, loss.chat.divergence is 0",
        ),
        (
            [
                "teacher.paths={math: a, default: b}",
                "loss.default={divergence: 0, policy: 1}",
                "loss.math.divergence=1",
            ],
            "teacher.paths.default: not read here, the divergence is 0 in all domains without a teacher of their own",
        ),
        (["pipeline=sft", "teacher.paths.math=a"], "teacher.paths.math: not read here, sft has no teacher"),
        (["teacher.paths.math=null"], "teacher.paths.math: expected"),
        (["teacher.paths.math=a", "model.path=null"], "teacher.paths.math: the run creates the policy (model.tiny)"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_settings_are_refused_in_one_line(words: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load([*DISTILL, *words])
    assert [line for line in caught.value.problems if line.startswith(expected)], caught.value.problems


def test_a_domain_may_learn_from_the_default_teacher_alone() -> None:
    config = load(
        [
            *DISTILL,
            "teacher.paths={code: b, default: a}",
            "loss.default={divergence: 0, policy: 1}",
            "loss.math.divergence=1",
            "loss.code.divergence=0.5",
            "rollout.group_size=2",
        ]
    )
    assert config.of_teacher().model.path == "b" and config.of_teacher("a").model.path == "a"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a policy, two teachers, and rows of three domains."""
    at = tmp_path_factory.mktemp("models")
    make_tiny_model(TinyModel(hidden_size=16, num_layers=1, **SIZES), at / "policy")
    large = TinyModel(architecture="llama", hidden_size=24, num_layers=3, vocab_size=384, **SIZES)
    make_tiny_model(large, at / "math")
    make_tiny_model(TinyModel(hidden_size=32, num_layers=1, **SIZES), at / "code")
    rows = [{"prompt": f"say {i}", "tag": ("math", "code", "chat")[i % 3]} for i in range(48)]
    (at / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return at


def words_for(models: Path, run: Path, *more: str) -> list[str]:
    words = ["pipeline=distill", f"model.path={models}/policy", f"data.train={models}/rows.jsonl", f"run_dir={run}"]
    words += ["data.max_prompt_tokens=64", "rollout.max_new_tokens=16", "rollout.group_size=1", "rollout.num_prompts=8"]
    return [*words, *more]


def paths(models: Path, **folders: str) -> str:
    return f"teacher.paths={{{', '.join(f'{name}: {models / folder}' for name, folder in folders.items())}}}"


def test_the_rows_decide_which_teachers_are_needed(models: Path, tmp_path: Path) -> None:
    def problems(*more: str) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            prepare(words_for(models, tmp_path / "run", *more))
        return [line.partition(" (override ")[0] for line in caught.value.problems]

    lacking = "loss.chat.divergence: 1, but no teacher judges the domain chat (teacher.paths has: math, code); give "
    assert problems(paths(models, math="math", code="code"))[0].startswith(lacking)
    (unknown,) = problems(paths(models, math="math", cod="code", default="math"))
    assert unknown == (
        "teacher.paths.cod: no row of data.train is of domain cod (there are: math, code, chat); did you mean "
        "teacher.paths.code?"
    )
    prepare(words_for(models, tmp_path / "run", paths(models, math="math", code="code"), *WEIGHTS))


def test_each_folder_is_checked_under_its_domain(models: Path, tmp_path: Path) -> None:
    def problem(folder: Path, *more: str) -> str:
        with pytest.raises(ConfigError) as caught:
            given = f"teacher.paths={{math: {models / 'math'}, default: {folder}}}"
            prepare(words_for(models, tmp_path / "run", given, *more))
        (line,) = caught.value.problems
        return line.partition(" (override ")[0]

    assert problem(tmp_path / "none").startswith(f"teacher.paths.default: no folder {tmp_path / 'none'}; give one")
    bare = shutil.copytree(models / "code", tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    assert problem(bare) == f"teacher.paths.default: no tokenizer in {bare} (tokenizer.json)"
    other = shutil.copytree(models / "code", tmp_path / "other")
    (other / "tokenizer.json").write_text((other / "tokenizer.json").read_text().replace("<|im_end|>", "<|end|>"))
    assert problem(other).startswith(f"teacher.paths.default: {other} has another vocabulary than {models / 'policy'}")
    short = tmp_path / "short"
    make_tiny_model(TinyModel(hidden_size=16, num_layers=1, max_position_embeddings=64, **SIZES), short)
    assert problem(short).endswith(
        f"= 80 tokens exceed max_position_embeddings of {short} (teacher.paths.default) = 64"
    )
    with pytest.raises(ConfigError, match=r"teacher.top_k: 321 exceeds vocab_size of .*code = 320; use teacher.form="):
        given = paths(models, math="math", default="code")
        prepare(words_for(models, tmp_path / "run", given, "teacher.form=top_k", "teacher.top_k=321"))


def test_a_teacher_with_fewer_rows_than_the_policy_is_named(models: Path, tmp_path: Path) -> None:
    few = tmp_path / "few"
    make_tiny_model(TinyModel(hidden_size=16, num_layers=1, vocab_size=300, **SIZES), few)
    given = f"teacher.paths={{math: {models / 'math'}, default: {few}}}"
    config = load(words_for(models, tmp_path / "run", given, "teacher.form=full"))
    shape = shape_of(str(models / "policy"), "")
    found = [problem.text for problem in check_sizes(config, RoleLayout.from_config(config), shape)]
    text = f"{few} has a vocabulary of 300 rows, the policy's 320; give a model with at least as many"
    assert found == [f"teacher.paths.default: {text}"]


def test_the_plan_counts_and_names_every_teacher_once(models: Path, tmp_path: Path) -> None:
    given = paths(models, math="math", code="code", default="math")
    apart = ["layout.teacher.colocate_with=null", "layout.teacher.num_ranks=2"]
    config, layout, model, run, shown = prepare(words_for(models, tmp_path / "run", given, *apart))
    text, shape = describe(config, layout, model, run, shown), shape_of(str(models / "policy"), "")
    math, code = (shape_of(str(models / name), "") for name in ("math", "code"))
    assert f"teacher of math, default: {models / 'math'} (llama, {math.num_parameters / 1e3:.3g}k parameters)" in text
    assert f"teacher of code: {models / 'code'} (qwen2, {code.num_parameters / 1e3:.3g}k parameters), frozen" in text
    assert "weights of math, default" in text and check_sizes(config, layout, shape) == []
    parts = {part.name: part for part in teacher_parts(config, shape, 2)}
    for name, size in (("math, default", math), ("code", code)):
        half = 4 * size.num_parameters / 2
        assert half <= parts[f"weights of {name}"].num_bytes < half * 1.1
    of_one = {}
    for name in ("math", "code"):
        alone = load(words_for(models, tmp_path / "run", f"teacher.path={models / name}", *apart))
        of_one[name] = {part.name: part.num_bytes for part in teacher_parts(alone, shape, 2)}
    for name in ("activations", "logits", "gathered weights"):
        assert parts[name].num_bytes == max(own[name] for own in of_one.values()) and parts[name].during == ("teacher",)
    assert parts["teacher's fields"].num_bytes * 2 == of_one["math"]["teacher's fields"] * 3


@pytest.mark.parametrize("default", ["math", "code"])
def test_one_and_several_teachers_are_in_host_memory_while_weights_are_published(
    default: str, models: Path, tmp_path: Path
) -> None:
    given = [paths(models, math="math", default=default), "layout.offload=always", "cluster.device=cuda"]
    config = load(words_for(models, tmp_path / "run", *given))
    (kind,) = memory(config, RoleLayout.from_config(config), shape_of(str(models / "policy"), ""))
    own = [part for part in kind.parts if part.role == "teacher" and part.name.startswith("weights")]
    names = {"math": {"weights"}, "code": {"weights of math", "weights of default"}}[default]
    assert {part.name for part in own} == names
    assert all({"publish", "generate"}.isdisjoint(part.during) for part in own if not part.on_host)
    assert all("teacher" in part.during for part in own)


def test_heads_and_states_of_all_teachers_are_counted_on_trainer_ranks(models: Path, tmp_path: Path) -> None:
    config = load(words_for(models, tmp_path, paths(models, math="math", default="code"), "teacher.form=full"))
    shape, num_ranks = shape_of(str(models / "policy"), ""), len(RoleLayout.from_config(config).ranks["trainer"])
    parts = {part.name: part.num_bytes for part in trainer_parts(config, shape, num_ranks)}
    assert parts["teacher's head"] == 4 * (384 * 24 + 320 * 32)
    assert parts["teacher's fields"] == 3 * 8 // num_ranks * 80 * 4 * 32, "the widest state, three times"


def test_another_model_in_a_domains_folder_is_noticed_at_a_resume(models: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(models / "code", tmp_path / "code")
    config = {"model": {"path": str(models / "policy")}, "teacher": {"paths": {"code": str(folder), "math": "gone"}}}
    attempts = [{"models": models_of(config)}]
    assert attempts[0]["models"].keys() == {"model.path", "teacher.paths.code"}
    check_models(config, attempts)
    changed = json.loads((folder / "config.json").read_text()) | {"hidden_size": 64}
    (folder / "config.json").write_text(json.dumps(changed))
    with pytest.raises(ConfigError, match=rf"^teacher.paths.code: {folder}/config.json is of another model than when"):
        check_models(config, attempts)
