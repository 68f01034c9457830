"""Requirements of a teacher on the configuration: refused before the start in one line, counted in the plan."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import ConfigError, TinyModel, load
from hpcrl.engines.tiny import make_tiny_model
from hpcrl.launch.plan import describe
from hpcrl.launch.prepare import prepare
from hpcrl.models.families import shape_of
from hpcrl.planner.memory import check_sizes, memory
from hpcrl.planner.memory_parts import PHASES
from hpcrl.planner.trainer import teacher_parts
from hpcrl.rewards.builtin.none import NoReward
from hpcrl.rewards.reward import RewardItem, Score
from hpcrl.rewards.serving.router import Router

DISTILL = ["pipeline=distill"]
ADDED = ["loss.default.divergence=0.5"]
MODELS = ["model.path=policy", "teacher.path=other"]
SIZES = {"num_heads": 2, "num_kv_heads": 1, "intermediate_size": 16}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (MODELS, "teacher.path: not read here, no domain learns from a teacher (loss.NAME.divergence)"),
        (["pipeline=sft", *MODELS], "teacher.path: not read here, sft has no teacher"),
        ([*ADDED, *MODELS, "debug=rollout_only"], "teacher.path: not read here,"),
        (
            [*DISTILL, *MODELS, "loss.default.divergence=0"],
            "loss: the distill pipeline learns from a teacher",
        ),
        (
            DISTILL,
            "teacher.path: there is no model to learn from; give a folder in HF layout with the policy's tokenizer, or "
            "folders of domains (teacher.paths), a server (teacher.endpoint) or the policy itself (teacher.source)",
        ),
        *(
            (
                [*DISTILL, "debug=fake", f"teacher.form={form}"],
                f"teacher.form: {form} compares vocabularies, and the trainer of debug=fake has none; use sampled",
            )
            for form in ("top_k", "full")
        ),
        ([*ADDED, MODELS[0]], "teacher.path: there is no model to learn from; give a folder in HF layout"),
        (
            [*DISTILL, MODELS[1]],
            "teacher.path: the run creates the policy (model.tiny), and no other model has its vocabulary; give "
            "model.path, too",
        ),
        ([*DISTILL, *MODELS, "teacher.engine=vllm"], "teacher.engine: expected fsdp2 or megatron or deepspeed"),
        ([*DISTILL, *MODELS, "teacher.beta=0"], "teacher.beta: not read here, form is sampled, the reverse KL"),
        ([*DISTILL, *MODELS, "teacher.top_k=8"], "teacher.top_k: not read here, form is sampled"),
        ([*DISTILL, *MODELS, "teacher.beta=1.5"], "teacher.beta: expected at most 1"),
        ([*DISTILL, *MODELS, "trainer.megatron.tensor_parallel=2"], "trainer.megatron.tensor_parallel: not read here"),
        (
            [*DISTILL, *MODELS, "teacher.engine=megatron", "trainer.megatron.tensor_parallel=2"],
            "teacher.engine: megatron divides 2 ranks into 1 group(s) with the same rows, and the trainer on these "
            "ranks divides them differently; give the teacher separate ranks: layout.teacher.colocate_with=null "
            "layout.teacher.num_ranks=N",
        ),
        ([*MODELS, "distill.teacher=x"], "distill.teacher: unknown key"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_settings_are_refused_in_one_line(words: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RoleLayout.from_config(load(words))
    assert [line for line in caught.value.problems if line.startswith(expected)], caught.value.problems


def test_the_teachers_ranks_and_engine() -> None:
    def ranks(*more: str) -> tuple[int, ...]:
        config = load([*DISTILL, *MODELS, "rollout.group_size=1", *more])  # no group is compared
        assert config.uses_teacher and not config.uses_reference
        return RoleLayout.from_config(config).ranks["teacher"]

    apart = ["layout.teacher.colocate_with=null", "layout.teacher.num_ranks=4"]
    assert ranks() == (1, 2) and ranks(*apart) == (3, 4, 5, 6)
    assert ranks("trainer.lora.rank=4") == (1, 2), "a teacher is never the policy without adapters"
    split = ["teacher.engine=megatron", "trainer.megatron.tensor_parallel=2"]
    layout = RoleLayout.from_config(load([*DISTILL, *MODELS, *apart, *split]))
    assert layout.division("teacher").leaders == (3, 5) and layout.division("trainer").leaders == (1, 2)


def test_the_teachers_engine_reads_no_keys_of_the_policys_training() -> None:
    words = ["trainer.lora.rank=4", "trainer.param_dtype=bfloat16", "trainer.head_dtype=float32", "debug=train_only"]
    config = load([*DISTILL, *MODELS, *words, "load_rollouts=x", "trainer.router_replay=true"])
    own = config.of_teacher()
    assert own.lora is None and not own.trainer.router_replay and own.model.path == "other"
    assert config.model.dtype == "float32" and own.model.dtype == "bfloat16", "frozen weights need no master weights"
    assert own.trainer.head_dtype == "float32" and own.model.mtp == "drop"
    assert load([*DISTILL, "debug=fake"]).teacher_engine == "fake"


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "policy"
    make_tiny_model(TinyModel(hidden_size=16, num_layers=1, **SIZES), folder)
    return folder


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "other"
    make_tiny_model(TinyModel(architecture="llama", hidden_size=24, num_layers=3, vocab_size=384, **SIZES), folder)
    return folder


def words_for(policy: Path, run: Path, *more: str) -> list[str]:
    words = [*DISTILL, f"model.path={policy}", "data.train=task:sort_digits", f"run_dir={run}"]
    return [*words, "data.max_prompt_tokens=64", "rollout.max_new_tokens=16", *more]


def test_the_plan_counts_and_shows_the_teacher(policy: Path, other: Path, tmp_path: Path) -> None:
    apart = ["layout.teacher.colocate_with=null", "layout.teacher.num_ranks=2", f"teacher.path={other}"]
    config, layout, model, run, shown = prepare(words_for(policy, tmp_path / "a", *apart))
    shape, larger = shape_of(str(policy), ""), shape_of(str(other), "")
    (kind,) = [kind for kind in memory(config, layout, shape) if kind.roles == ("teacher",)]
    parts = {part.name: part for part in kind.parts}
    assert kind.ranks == (3, 4) and parts["weights"].during == PHASES
    assert parts["activations"].during == ("teacher",) and {part.role for part in kind.parts} == {"teacher"}
    whole = 4 * larger.num_parameters
    assert whole / 2 <= parts["weights"].num_bytes < whole / 2 * 1.1
    half = config.model_copy(update={"trainer": config.trainer.model_copy(update={"param_dtype": "bfloat16"})})
    weights = {part.name: part.num_bytes for part in teacher_parts(half, shape, 2)}["weights"]
    assert weights * 2 == parts["weights"].num_bytes
    text = describe(config, layout, model, run, shown)
    assert f"teacher {other} (llama, {larger.num_parameters / 1e3:.3g}k parameters), frozen" in text
    assert "the teacher's pass" in text and "rows 3-4" not in text


def edit(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_folder_that_cannot_be_the_teacher_is_named(policy: Path, other: Path, tmp_path: Path) -> None:
    def problem(path: Path) -> str:
        with pytest.raises(ConfigError) as caught:
            prepare(words_for(policy, tmp_path / "run", f"teacher.path={path}"))
        (line,) = caught.value.problems
        return line.partition(" (override ")[0]

    def changed(name: str, change: Callable[[Path], object]) -> Path:
        folder = shutil.copytree(other, tmp_path / name)
        change(folder)
        return folder

    prepare(words_for(policy, tmp_path / "run", f"teacher.path={other}"))  # with a padded vocabulary
    assert problem(tmp_path / "none").startswith(f"teacher.path: no folder {tmp_path / 'none'}; give one")
    without = changed("without", lambda folder: (folder / "tokenizer.json").unlink())
    assert problem(without) == f"teacher.path: no tokenizer in {without} (tokenizer.json)"
    scorer = changed("scorer", lambda folder: edit(folder, architectures=["LlamaForSequenceClassification"]))
    assert problem(scorer).endswith("whose head gives no probabilities of tokens; give a language model")
    with pytest.raises(
        ConfigError, match=r"teacher.top_k: 400 exceeds vocab_size of .*other = 384; use teacher.form=full"
    ):
        prepare(words_for(policy, tmp_path / "run", f"teacher.path={other}", "teacher.form=top_k", "teacher.top_k=400"))
    short = tmp_path / "short"
    make_tiny_model(TinyModel(hidden_size=16, num_layers=1, max_position_embeddings=64, **SIZES), short)
    assert problem(short).endswith(f"= 80 tokens exceed max_position_embeddings of {short} = 64")

    def renamed(folder: Path) -> None:
        content = json.loads((folder / "tokenizer.json").read_text())
        (special,) = [added for added in content["added_tokens"] if added["content"] == "<|im_end|>"]
        special["content"] = "<|end|>"
        content["model"]["vocab"].pop("<|im_end|>", None)
        (folder / "tokenizer.json").write_text(json.dumps(content))

    other_end, eos = changed("other_end", renamed), json.loads((policy / "config.json").read_text())["eos_token_id"]
    assert problem(other_end) == (
        f"teacher.path: {other_end} has another vocabulary than {policy} (model.path): token '<|im_end|>' does not "
        f"exist, not {eos}; give a model with the policy's tokenizer"
    )


def test_a_teacher_with_fewer_rows_than_the_policy_judges_only_sampled_tokens(policy: Path, tmp_path: Path) -> None:
    few = tmp_path / "few"
    make_tiny_model(TinyModel(hidden_size=16, num_layers=1, vocab_size=300, **SIZES), few)
    config = load([*DISTILL, f"model.path={policy}", f"teacher.path={few}"])
    layout, shape = RoleLayout.from_config(config), shape_of(str(policy), "")
    assert check_sizes(config, layout, shape) == []
    over_all = config.model_copy(update={"teacher": config.teacher.model_copy(update={"form": "full"})})
    found = [problem.text for problem in check_sizes(over_all, layout, shape)]
    text = f"teacher.path: {few} has a vocabulary of 300 rows, the policy's 320; give a model with at least as many"
    assert found == [text]


def test_prompts_without_answers_need_no_reward(policy: Path, other: Path, tmp_path: Path) -> None:
    rows = tmp_path / "prompts.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(64)))
    models = [f"model.path={policy}", f"teacher.path={other}", f"run_dir={tmp_path / 'run'}"]
    words = [*models, f"data.train={rows}", "data.max_prompt_tokens=64", "rollout.max_new_tokens=16"]
    config, *_ = prepare([*words, *DISTILL, "rollout.num_prompts=8"])
    reward = Router(config).of("default")
    item = RewardItem(1, "prompts", "say 1", "1")
    assert reward.name == "none" and NoReward(reward).score([item]) == [Score(0.0, 0.0)]
    with pytest.raises(ConfigError) as caught:
        prepare([*words, *ADDED, "rollout.num_prompts=8"])  # pipeline=rlvr
    assert "has no reward: set reward." in caught.value.problems[0], caught.value.problems
