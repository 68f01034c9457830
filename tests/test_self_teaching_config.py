"""A policy that is its own teacher, and a teacher with its own prompt: what is refused, which ranks teach, the plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import ConfigError, TinyModel, load
from hpcrl.config.teacher import TeacherConfig
from hpcrl.config.teacher_paths import teacher_of, teachers
from hpcrl.data import PromptSource
from hpcrl.data.chat import bind
from hpcrl.data.privileged import PrivilegedContext
from hpcrl.engines.tiny import make_tiny_model
from hpcrl.launch.plan import describe
from hpcrl.launch.prepare import prepare
from hpcrl.models.families import shape_of, vision_of
from hpcrl.planner.memory import memory
from hpcrl.planner.trainer import trainer_parts
from hpcrl.rollout.types import Prompt
from tests.vlm import png

BASE = ["pipeline=distill", "teacher.source=base", "trainer.lora.rank=4"]
POLICY = ["pipeline=distill", "teacher.source=policy"]
CONTEXT = "teacher.context='{prompt} Answer: {answer}'"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            [*BASE[:2], "model.path=m"],
            "teacher.source: base is the policy without its adapters, and trainer.lora.rank is 0; raise it, or use "
            "folder with teacher.path=m",
        ),
        (
            POLICY,
            "teacher.source: policy: the policy would learn from itself, so there is nothing to learn; give "
            "teacher.sync_every or teacher.context",
        ),
        ([*POLICY, "teacher.sync_every=0"], "teacher.source: policy: the policy would learn from itself"),
        (
            [*POLICY, CONTEXT, "teacher.form=full"],
            "teacher.form: full reads the teacher's output head, which the step's update changes; use top_k or "
            "sampled, or teacher.sync_every=1",
        ),
        (
            [*BASE, CONTEXT, "+env.default.name=guess"],
            "teacher.context: environments show turns that no template describes; use null, or prompts without env",
        ),
        (
            [*POLICY, CONTEXT, "debug=train_only", "load_rollouts=x"],
            "teacher.context: debug=train_only: stored rollouts do not have the rows' columns",
        ),
        (
            [*BASE, CONTEXT, "trainer.router_replay=true"],
            "teacher.context: the generator chose no experts for the teacher's prompt; use trainer.router_replay=false",
        ),
        ([*POLICY, "teacher.context='the answer is {answer}'"], "teacher.context: expected a text with {prompt}"),
        ([*BASE, "teacher.path=x"], "teacher.path: not read here, source is base"),
        ([*BASE, "teacher.paths.default=x"], "teacher.paths.default: not read here, source is base"),
        (
            [*POLICY, "teacher.sync_every=2", "teacher.paths.default=x"],
            "teacher.paths.default: not read here, source is policy",
        ),
        ([*BASE, "teacher.sync_every=3"], "teacher.sync_every: not read here, source is base"),
        ([*BASE, "teacher.engine=megatron"], "teacher.engine: not read here, the trainer's engine computes"),
        ([*BASE, "teacher.max_prompt_tokens=9"], "teacher.max_prompt_tokens: not read here, teacher.context is null"),
        ([*POLICY, "teacher.sync_every=-1"], "teacher.sync_every: expected at least 0"),
        ([*POLICY, "teacher.source=self"], "teacher.source: expected 'folder', 'base' or 'policy'"),
        (
            ["teacher.source=base", "trainer.lora.rank=4"],
            "teacher.source: not read here, no domain learns from a teacher",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_settings_are_refused_in_one_line(words: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RoleLayout.from_config(load(words))
    assert [line for line in caught.value.problems if line.startswith(expected)], caught.value.problems


def test_only_a_copy_has_ranks() -> None:
    def teachers(*words: str) -> tuple[int, ...]:
        return RoleLayout.from_config(load(list(words))).ranks["teacher"]

    assert teachers(*BASE) == teachers(*POLICY, CONTEXT) == teachers(*POLICY, CONTEXT, "teacher.sync_every=0") == ()
    assert teachers(*POLICY, "teacher.sync_every=5") == (1, 2)
    apart = ["layout.teacher.colocate_with=null", "layout.teacher.num_ranks=1"]
    assert teachers(*POLICY, "teacher.sync_every=5", *apart) == (3,)
    assert teachers("loss.default.divergence=0.5", *BASE[1:]) == (), "beside rewards"


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "policy"
    sizes = {"hidden_size": 16, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 16}
    make_tiny_model(TinyModel(num_layers=1, max_position_embeddings=128, **sizes), folder)
    return folder


def words_for(policy: Path, run: Path, *more: str) -> list[str]:
    words = [f"model.path={policy}", "data.train=task:sort_digits", f"run_dir={run}", "data.max_prompt_tokens=64"]
    return [*words, "rollout.max_new_tokens=16", *more]


def test_the_plan_counts_a_copy_only_if_there_is_one(policy: Path, tmp_path: Path) -> None:
    def planned(*more: str) -> tuple[str, set[str]]:
        config, layout, model, run, shown = prepare(words_for(policy, tmp_path / "run", *more))
        (kind,) = memory(config, layout, shape_of(str(policy), ""))
        return describe(config, layout, model, run, shown), {part.role for part in kind.parts if part.name == "weights"}

    text, with_weights = planned(*BASE, CONTEXT, "teacher.max_prompt_tokens=100")
    assert with_weights == {"trainer", "generator"}
    assert "teacher: the policy without its adapters, by the trainer's engine; no copy of weights" in text
    assert "the teacher reads prompts up to 100 tokens with teacher.context" in text
    (line,) = [line for line in text.splitlines() if "the teacher reads: " in line]
    assert " Answer: " in line and line.endswith('<|im_end|>\\n<|im_start|>assistant\\n"')
    text, with_weights = planned(*POLICY, CONTEXT)
    assert with_weights == {"trainer", "generator"} and "teacher: the policy before each step's update" in text
    text, with_weights = planned(*POLICY, "teacher.sync_every=5", "teacher.form=full")
    assert with_weights == {"trainer", "generator", "teacher"} and "updated every 5 step(s)" in text


def test_longer_prompts_of_a_teacher_are_in_the_trainers_plan(policy: Path) -> None:
    def bytes_of(*more: str) -> dict[str, int]:
        words = [*words_for(policy, policy.parent, *BASE, *more), "trainer.max_tokens_per_micro_batch=64"]
        parts = trainer_parts(load(words), shape_of(str(policy), ""), 1)
        return {part.name: part.num_bytes for part in parts if part.during == ("teacher",)}

    short, long = bytes_of(CONTEXT), bytes_of(CONTEXT, "teacher.max_prompt_tokens=112")
    assert bytes_of() == {} and short.keys() == long.keys()
    name = "activations of teaching"
    assert short[name] > 0 and long[name] == pytest.approx(short[name] * 128 / 80, rel=0.25)


def test_what_does_not_fit_the_model_is_refused(policy: Path, tmp_path: Path) -> None:
    def problems(*more: str) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            prepare(words_for(policy, tmp_path / "run", *more))
        return [line.partition(" (override ")[0] for line in caught.value.problems]

    assert problems(*BASE, CONTEXT, "teacher.max_prompt_tokens=113") == [
        f"teacher.max_prompt_tokens: prompt 113 + response 16 = 129 tokens exceed max_position_embeddings of {policy} "
        "= 128"
    ]
    of_folder = ["pipeline=distill", f"teacher.path={policy}", CONTEXT, "teacher.max_prompt_tokens=113"]
    assert problems(*of_folder)[0].startswith("teacher.max_prompt_tokens: prompt 113 + response 16 = 129 tokens exceed")
    assert problems(*BASE, "teacher.form=top_k", "teacher.top_k=400")[0].startswith("teacher.top_k: 400 exceeds vocab")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": str(n), "answer": "4" if n else ""}) + "\n" for n in range(3)))
    (line,) = problems(*BASE, CONTEXT, f"data.train={rows}")
    assert line == f"{rows}:1: no answer, which teacher.context reads; the row has answer"


def test_prompts_that_the_context_makes_too_long_are_counted(policy: Path, tmp_path: Path) -> None:
    """In tokens of the policy, as transformers counts them."""
    rows, template = tmp_path / "rows.jsonl", "{prompt} {answer}"
    prompts = [{"prompt": "a" * (1 + n % 4) + " b" * n, "answer": "c"} for n in range(40)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in prompts))
    tokenizer = AutoTokenizer.from_pretrained(policy)

    def tokens_of(said: str) -> int:
        message = [{"role": "user", "content": said}]
        return len(tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=True)["input_ids"])

    lengths = [tokens_of(f"{row['prompt']} {row['answer']}") for row in prompts]
    words = words_for(policy, tmp_path / "run", *BASE, f"data.train={rows}", f"teacher.context='{template}'")
    words += ["data.max_prompt_tokens=112", "rollout.num_prompts=8"]
    limit = sorted(lengths)[19]
    over = sum(length > limit for length in lengths)
    first = 1 + next(n for n, length in enumerate(lengths) if length > limit)
    told = f"{rows}:{first}: longer than teacher.max_prompt_tokens={limit} with teacher.context; {over} of 40 rows of "
    assert f"{told}data.train are and are dropped" in prepare([*words, f"teacher.max_prompt_tokens={limit}"])[-1].notes
    most = f"teacher.max_prompt_tokens={max(lengths)}"
    assert not [note for note in prepare([*words, most])[-1].notes if "teacher.context" in note]
    with pytest.raises(ConfigError) as caught:
        prepare([*words, f"teacher.max_prompt_tokens={min(lengths) - 1}"])
    (line,) = caught.value.problems
    assert line.startswith(
        f"teacher.max_prompt_tokens: {min(lengths) - 1}, but all 40 rows of data.train have more tokens with "
        f"teacher.context, the shortest {min(lengths)}; raise it"
    )
    with pytest.raises(ConfigError, match=r"null \(data.max_prompt_tokens=9\), but all 40 rows"):
        prepare([*words, "data.max_prompt_tokens=9"])


def test_images_count_in_what_the_teacher_reads(tmp_path: Path) -> None:
    """As the run counts them: 4 tokens each in the teacher's prompt."""
    folder, rows = tmp_path / "policy", tmp_path / "rows.jsonl"
    make_tiny_model(TinyModel(architecture="qwen2_5_vl"), folder)
    (tmp_path / "a.png").write_bytes(png(9, 56, 56))
    given = [{"prompt": "a" * n, "answer": "b", "images": ["a.png"] * 2} for n in (1, 30)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in given))
    tokenizer = bind(AutoTokenizer.from_pretrained(folder), {}, vision_of(folder))
    words = words_for(folder, tmp_path / "run", *BASE, f"data.train={rows}", "rollout.num_prompts=2", CONTEXT)
    source = PromptSource(load(words).data, "train", tokenizer, 0, 1, PrivilegedContext.of(load(words)))
    prompts = [source.of_row(row) for row in (0, 1)]
    short, long = (len(prompt.teacher_ids) for prompt in prompts if isinstance(prompt, Prompt))
    assert prepare([*words, f"teacher.max_prompt_tokens={long}"])[-1].notes == []
    (note,) = prepare([*words, f"teacher.max_prompt_tokens={long - 1}"])[-1].notes
    assert note.startswith(f"{rows}:2: longer than teacher.max_prompt_tokens={long - 1} with teacher.context; 1 of 2")
    with pytest.raises(ConfigError, match=f"teacher.context, the shortest {short}; raise it"):
        prepare([*words, f"teacher.max_prompt_tokens={short - 1}"])


@pytest.mark.parametrize("given", [{"path": "m"}, {"paths": {"math": "m", "default": "n"}}])
def test_folders_of_a_recipe_do_not_replace_the_policy_as_teacher(given: dict[str, Any]) -> None:
    """A recipe's keys that the command line's source leaves unread are not refused."""
    config = load([*POLICY, "teacher.sync_every=2"])
    own = TeacherConfig(source="policy", sync_every=2, **given)
    assert teachers(own) == [] and teacher_of(own, "code") == 0
    assert config.model_copy(update={"teacher": own}).of_teacher().model.path == config.model.path
