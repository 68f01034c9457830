"""pipeline=reward_model before the start: refusals in one line, model folders, the plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForTokenClassification

from hpcrl.config import ConfigError, TinyModel, load
from hpcrl.engines.tiny import make_tiny_model
from hpcrl.launch.plan import describe, plan_shape
from hpcrl.launch.prepare import prepare
from hpcrl.planner.adapters import trained
from hpcrl.planner.memory import memory
from hpcrl.planner.memory_parts import samples_of_a_step
from hpcrl.planner.trainer import trained_shape
from tests.engines.test_scalar import make_reward_model
from tests.vlm import make_vlm, png
from tests.vlm_families import make_small

RECIPE = "+experiment=reward_model_tiny"


def refused(*words: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load([RECIPE, *words])
    return caught.value.problems


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["trainer.lora.rank=4", "trainer.engine=megatron"],
            "trainer.lora.rank: the megatron trainer has no adapters below a value head; use 0, or trainer.engine=",
        ),
        (["trainer.freeze=[embeddings]"], "trainer.freeze: a value head is trained with all weights; use []"),
        (["model.tiny.architecture=qwen2_5_vl"], "model.tiny.architecture: transformers has no model of"),
        (["model.mtp=train"], "model.mtp: a reward model has no prediction layers; use keep or drop"),
        (["trainer.head_dtype=float32"], "trainer.head_dtype: a value head is always in float32; use null"),
        (["data.chat_template_kwargs={x: 1}"], "data.chat_template_kwargs: the role reward_model renders dialogues"),
        (["rollout.group_size=4"], "rollout.group_size: not read here, the reward_model pipeline generates nothing"),
        (["eval.samples=4"], "eval.samples: not read here, the reward_model pipeline generates nothing"),
        (["data.max_prompt_tokens=9"], "data.max_prompt_tokens: not read here, the length of dialogues is rm.max_tok"),
        (["rm.rows=scores", "rm.center_coef=1"], "rm.center_coef: not read here, rm.rows is scores"),
        (["rm.heads=[a,b]"], "rm.heads: 2 heads learn from a row's scores; use rm.rows=scores, or leave it out"),
        (["rm.rows=steps", "rm.heads=2"], "rm.heads: 2 heads learn from a row's scores; use rm.rows=scores"),
        (["rm.rows=scores", "rm.heads=[a,a]"], "rm.heads: expected each head once, not a twice, got"),
        (["rm.rows=scores", "rm.heads=[]"], "rm.heads: expected a list of names or a number from 1 to 9999, got []"),
        (["rm.rows=scores", "rm.heads=0"], "rm.heads: expected a list of names or a number from 1 to 9999, got 0"),
        (
            ["rm.rows=scores", "rm.heads=[a b]"],
            "rm.heads: expected names of letters, digits, '.', '_' and '-', not 'a b'",
        ),
        (["rm.rows=ranks"], "rm.rows: expected 'pairs', 'scores' or 'steps', got 'ranks'"),
        (["keep_best.metric=val/accuracy", "data.val=null", "eval_every=0"], "keep_best.metric: 'val/accuracy' needs"),
        (["pipeline=sft", "rm.batch_size=3"], "rm.batch_size: not read here, the pipeline is sft"),
        (["reward_model.path=x"], "reward_model.path: not read here, no reward uses it"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_settings_that_cannot_work_are_refused_in_one_line(words: list[str], expected: str) -> None:
    assert any(line.startswith(expected) for line in refused(*words)), refused(*words)


def problems(*words: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        prepare([RECIPE, "dry_run=true", *words])
    return caught.value.problems


def with_labels(folder: Path, count: int) -> Path:
    """The reward model of a folder with more labels."""
    tensors = load_file(folder / "model.safetensors")
    tensors["score.weight"] = tensors["score.weight"].repeat(count, 1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    labels = {str(number): f"LABEL_{number}" for number in range(count)}
    (folder / "config.json").write_text(json.dumps(config | {"id2label": labels}))
    return folder


def renamed(folder: Path, architecture: str) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    return folder


def test_model_folders_with_other_heads_are_refused(tmp_path: Path) -> None:
    scorer, critic = make_reward_model(tmp_path / "scorer"), tmp_path / "critic"
    make_reward_model(critic, AutoModelForTokenClassification)
    prepare([RECIPE, "dry_run=true", f"model.path={scorer}"])
    prepare([RECIPE, "dry_run=true", f"model.path={critic}", "rm.rows=steps", *steps(tmp_path)])
    for folder, rows, text in (
        (critic, "pairs", f"{critic} has the head of Qwen2ForTokenClassification, and rm.rows=pairs trains one of"),
        (scorer, "steps", f"{scorer} has the head of Qwen2ForSequenceClassification, and rm.rows=steps trains one"),
    ):
        lines = problems(f"model.path={folder}", f"rm.rows={rows}", *(steps(tmp_path) if rows == "steps" else ()))
        assert any(line.startswith(f"model.path: {text}") for line in lines), lines
    many = with_labels(make_reward_model(tmp_path / "many"), 3)
    assert problems(f"model.path={many}") == [
        f"model.path: the head of {many} has 3 labels, and a row gives 1 number (rm.heads); give a language model, or "
        "a reward model with 1"
    ]
    words = [f"model.path={many}", "rm.rows=scores", *helpsteer(tmp_path)]
    prepare([RECIPE, "dry_run=true", *words[:-1], "rm.heads=[LABEL_0,LABEL_1,LABEL_2]"])
    assert problems(*words) == [
        f"model.path: the heads of {many} are LABEL_0, LABEL_1, LABEL_2, and rm.heads has {', '.join(HEADS)}; give the "
        "same names in the same order, or a language model"
    ]
    other = renamed(make_reward_model(tmp_path / "other"), "Qwen2ForQuestionAnswering")
    assert problems(f"model.path={other}")[0].startswith(f"model.path: {other} is of Qwen2ForQuestionAnswering, and a")


def test_models_that_take_images_are_trained_if_transformers_has_their_class(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(9))
    row = {"images": ["a.png"], "prompt": "<image>what?", "chosen": "grey", "rejected": "red"}
    (tmp_path / "pairs.jsonl").write_text(json.dumps(row) + "\n")
    rows = [f"data.train={tmp_path}/pairs.jsonl", f"data.val={tmp_path}/pairs.jsonl"]
    able, unable = make_small("gemma3", tmp_path / "able"), make_vlm("qwen2_5_vl", tmp_path / "unable")
    prepare([RECIPE, "dry_run=true", f"model.path={able}", *rows])
    assert problems(f"model.path={unable}", *rows) == [
        f"model.path: {unable} takes images, and transformers has no class ...ForSequenceClassification for its "
        "model_type, qwen2_5_vl, only for qwen3_5 and gemma3; give such a model or a text model"
    ]
    assert problems(f"model.path={able}", "rm.rows=steps", *steps(tmp_path)) == [
        f"model.path: {able} takes images, and a model that scores steps (rm.rows=steps) is made of a text model; give "
        "such a model"
    ]
    line = "pairs.jsonl:1: the row has images, which model.tiny.architecture=qwen2 does not take; use a model with "
    assert problems(*rows)[0].startswith(f"{tmp_path}/{line}model_type qwen3_5, gemma3, or leave such rows out")
    with_images = {"images": ["a.png"], "prompt": "<image>what?", "completions": ["4"], "labels": [True]}
    words = steps(tmp_path)
    (tmp_path / "steps.jsonl").write_text(json.dumps(with_images) + "\n")
    assert problems("rm.rows=steps", *words)[0] == (
        f"{tmp_path}/steps.jsonl:1: the row has images, and a model that scores steps is made of a text model; leave "
        "them out, or score whole answers (rm.rows=scores)"
    )


def test_a_reward_model_that_takes_images_is_not_served(tmp_path: Path) -> None:
    folder = renamed(make_small("gemma3", tmp_path / "able"), "Gemma3ForSequenceClassification")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"id2label": {"0": "LABEL_0"}}))
    with pytest.raises(ConfigError) as caught:
        run = ["+experiment=demo", f"run_dir={tmp_path / 'run'}", "dry_run=true"]  # not the folder of make demo
        prepare([*run, "reward.default.name=reward_model", f"reward_model.path={folder}"])
    lines = [line for line in caught.value.problems if line.startswith("reward_model.path")]
    text = "is a reward model that takes images, and the role reward_model scores texts only; give a text model, or let"
    assert len(lines) == 1 and lines[0].startswith(
        f"reward_model.path: {folder} {text} a judge that takes images score"
    )


def test_a_model_without_rows_for_the_tokenizers_tokens_is_refused(tmp_path: Path) -> None:
    make_tiny_model(TinyModel(hidden_size=32, num_heads=2, num_kv_heads=1, intermediate_size=64), tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"vocab_size": 300}))
    assert any("but vocab_size in config.json is 300" in line for line in problems(f"model.path={tmp_path}/model"))


HEADS = ["helpfulness", "correctness", "verbosity"]


def helpsteer(folder: Path, **changed: object) -> list[str]:
    """Rows with HelpSteer's columns, of which the second is changed, and a number for each head of with_labels()."""
    row = {"prompt": "2+2?", "response": "4", "helpfulness": 4, "correctness": 4, "verbosity": 1, "coherence": 3}
    row |= {f"LABEL_{number}": number for number in range(3)}
    second = {key: value for key, value in (row | changed).items() if value is not None}
    (folder / "scores.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(second)}\n")
    file = f"{folder}/scores.jsonl"
    return [f"data.train={file}", f"data.val={file}", "rm.rows=scores", f"rm.heads=[{','.join(HEADS)}]"]


def test_more_heads_than_labels_are_refused_with_file_line_and_key(tmp_path: Path) -> None:
    prepare([RECIPE, "dry_run=true", *helpsteer(tmp_path)])
    lines = problems(*helpsteer(tmp_path, verbosity=None))
    assert lines[0].startswith(
        f"{tmp_path}/scores.jsonl:2: no verbosity: the row has 2 of the 3 scores in rm.heads, and the columns prompt, "
    )
    lines = problems(*helpsteer(tmp_path, correctness="good"))
    assert lines[0].startswith(f"{tmp_path}/scores.jsonl:2: correctness must be a finite number up to")
    words = helpsteer(tmp_path, score=[1, 2])
    lines = problems(*words[:-1], "rm.heads=3")
    assert lines[0] == f"{tmp_path}/scores.jsonl:1: score must be a list of rm.heads=3 numbers, got None"
    assert lines[1].startswith(f"{tmp_path}/scores.jsonl:2: score must be a list of rm.heads=3 numbers, got 2 numbers")


def steps(folder: Path) -> list[str]:
    row = {"prompt": "2+2?", "completions": ["4"], "labels": [True]}
    (folder / "steps.jsonl").write_text(json.dumps(row) + "\n")
    return [f"data.train={folder}/steps.jsonl", f"data.val={folder}/steps.jsonl"]


def test_bad_rows_of_both_splits_are_refused_before_the_start(tmp_path: Path) -> None:
    good, bad = {"prompt": "2+2?", "chosen": "4", "rejected": "5"}, {"prompt": "2+2?", "chosen": "4", "rejected": "4"}
    for name, row in (("train", bad), ("val", {**good, "margin": None, "rejected": None})):
        (tmp_path / f"{name}.jsonl").write_text(f"{json.dumps(good)}\n{json.dumps(row)}\n")
    lines = problems(f"data.train={tmp_path}/train.jsonl", f"data.val={tmp_path}/val.jsonl")
    assert lines[0] == f"{tmp_path}/train.jsonl:2: chosen and rejected are equal"
    assert lines[1].startswith(f"{tmp_path}/val.jsonl:2: no rejected:")


def test_the_plan_counts_the_head_instead_of_a_vocabulary_projection(tmp_path: Path) -> None:
    words = ["model.tiny.vocab_size=4096", "rm.max_tokens=512", "cluster.device=cpu"]
    config, layout, model, run, shown = prepare([RECIPE, "dry_run=true", *words])
    shape = plan_shape(config, model)
    assert [p.name for p in shape.parameters][-1] == "score.weight" and config.max_sequence_tokens == 513
    assert samples_of_a_step(config) == 128
    (kind,) = memory(config, layout, shape)
    assert not any(part.name == "logits" for part in kind.parts)
    adapted, *_ = prepare([RECIPE, "dry_run=true", *words, "trainer.lora.rank=4"])
    learnt = {p.name: p.shape for p in trained(adapted, trained_shape(adapted, shape)).parameters}
    assert learnt["score.weight"] == (1, 64) and sum("lora" in name for name in learnt) == len(learnt) - 1 == 2 * 7 * 2
    text = describe(config, layout, model, run, shown)
    assert "reward_model, on pairs, 300 steps, evaluation every 50" in text and "rejected: " in text
    assert "of up to 512 tokens; longer ones are dropped" in text
