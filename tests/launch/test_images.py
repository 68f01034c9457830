"""Images that a run could not use are refused before the start, with file and row."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import Config, Problem, TinyModel, load, parse
from hpcrl.data.templates import CHATML
from hpcrl.engines.gen.native.unsupported import unsupported
from hpcrl.engines.tiny import make_tiny_model
from hpcrl.launch.__main__ import main
from hpcrl.launch.model_folder import inspect_model
from hpcrl.launch.prepare import prepare
from hpcrl.models.families import read_shape
from hpcrl.models.rope import rope_types
from hpcrl.models.shape import ModelShape
from hpcrl.planner.image_memory import controller_pixels, with_row_tokens
from hpcrl.planner.trainer import critic_shape, reference_shape
from hpcrl.rewards.seeing import why_judge_sees_nothing
from hpcrl.spec.media import MAX_PIXEL_BYTES
from hpcrl.spec.tables import GEN_ENGINES
from hpcrl.system.exit_codes import ExitCode
from tests.vlm_families import make_small

BLIND = replace(GEN_ENGINES["native"], media=frozenset())
BLIND_ENGINE = f"{__name__}:BLIND"
SEEING = "model.tiny.architecture=qwen2_5_vl"
"""Its images have at most 64 tokens of 28 x 28 pixels."""
OWN = "+env.default={name: class, class_path: hpcrl.envs.games.guess:Guess}"
BEHIND = ("teacher.endpoint.url=http://node7/v1", "teacher.endpoint.model=large")
CROPS = ("pipeline=agentic", "+env.default={name: tools}")
SHOWING = "+env.default={name: sokoban, options: {show: image}}"
WORDS = ["data.max_prompt_tokens=40", "rollout.max_new_tokens=3", "reward.default.name=exact_match", "run_dir=run"]
WORDS += ["dry_run=true"]


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, (width, height) in {"small": (28, 28), "tall": (28, 56), "large": (280, 280)}.items():
        pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{name}.png")
    sideways = Image.Exif()
    sideways[0x0112] = 6
    Image.new("RGB", (28 * 6, 28)).save(tmp_path / "sideways.jpg", exif=sideways)
    (tmp_path / "half.png").write_bytes((tmp_path / "large.png").read_bytes()[:20])
    return tmp_path


def row(*images: str) -> dict[str, Any]:
    return {"prompt": "what?", "answer": "2", "images": list(images)} if images else {"prompt": "1+1", "answer": "2"}


def start(at: Path, *rows: dict[str, Any], words: tuple[str, ...] = (SEEING,)) -> ExitCode:
    """The exit code of a start on these rows, of which the first has no image."""
    lines = [json.dumps(line) for line in (row(), *rows)]
    (at / "rows.jsonl").write_text("\n".join(lines))
    return ExitCode(main(["data.train=rows.jsonl", *WORDS, *words]))


TOO_LONG = "raise the limit, lower data.max_pixels, or leave the row out (data.overlong_prompts=drop)"
BAD = {
    "too large": (
        ("large.png",),
        f"images[0]: the image of 280 x 280 pixels has 64 tokens, more than data.max_prompt_tokens=40; {TOO_LONG}",
    ),
    "too many": (
        ("small.png",) * 200,
        f"the row's 200 images have 200 tokens, more than data.max_prompt_tokens=40; {TOO_LONG}",
    ),
    "cut off": (
        ("small.png", "half.png"),
        "images[1]: it cannot be decoded: ",
    ),
    "missing": (("none.png",), "images[0]: none.png cannot be read: No such file or directory"),
}


@pytest.mark.parametrize(("images", "said"), BAD.values(), ids=BAD)
def test_a_row_with_unusable_images_is_refused(
    images: tuple[str, ...], said: str, at: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (SEEING, "data.overlong_prompts=error")
    assert start(at, row("small.png"), row(*images), words=words) == ExitCode.BAD_INPUT
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"rows.jsonl:3: {said}"), line


def test_an_image_too_large_for_the_prompt_is_dropped_as_texts_are(
    at: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert start(at, row("small.png"), row("large.png")) == ExitCode.DONE
    assert "at most 1 tokens" in capsys.readouterr().out, "of the rows that are used"
    answers = ("pipeline=sft", SEEING)
    assert start(at, {**row("large.png"), "answer": "b"}, words=answers) == ExitCode.DONE, "no limit for answers"


def test_a_template_that_writes_nothing_for_images_is_refused(at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_tiny_model(TinyModel(architecture="qwen2_5_vl"), at / "model")
    config = json.loads((at / "model/tokenizer_config.json").read_text())
    (at / "model/tokenizer_config.json").write_text(json.dumps(config | {"chat_template": CHATML}))
    capsys.readouterr()  # progress of the model's writing
    assert start(at, row("small.png"), words=("model.path=model",)) == ExitCode.BAD_INPUT
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "rows.jsonl:2: the row has images, for which the model's chat template writes nothing"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            None,
            "rows.jsonl:2: the row has images, which model without preprocessor_config.json does not take; add the f",
        ),
        ({"patch_size": 16}, "model.path: the files of model are unusable for images: patch_size=16 of the image proc"),
        ({"patch_size": "x"}, "model.path: the files of model are unusable for images: patch_size is 'x', not a posit"),
        ("{", "model.path: model/preprocessor_config.json is not JSON: "),
    ],
    ids=["missing", "of other patches", "unusable", "damaged"],
)
def test_a_model_without_a_usable_image_processor_is_refused(
    change: Any, said: str, at: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_tiny_model(TinyModel(architecture="qwen2_5_vl"), at / "model")
    capsys.readouterr()
    processor = at / "model/preprocessor_config.json"
    if change is None:
        processor.unlink()
        assert start(at, words=("model.path=model",)) == ExitCode.DONE, "texts need none"
    else:
        content = change if isinstance(change, str) else json.dumps(json.loads(processor.read_text()) | change)
        processor.write_text(content)
    assert start(at, row("small.png"), words=("model.path=model",)) == ExitCode.BAD_INPUT
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(said), line


def test_marks_without_images_are_noted(at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Such as of a column with another name."""
    named = {"prompt": "<image>what?", "answer": "2", "pictures": ["small.png"]}
    assert start(at, named, named, row("small.png")) == ExitCode.DONE
    said = "rows.jsonl:2: <image> stays text, since the row has no images (looked for images, image); data.train has 2 "
    assert said in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("role", ["reference", "teacher", "critic"])
def test_a_second_model_of_other_patches_is_refused(role: str, at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The policy's pixels would not be cut into its patches."""
    make_tiny_model(TinyModel(architecture="qwen2_5_vl"), at / "other")
    processor, config = at / "other/preprocessor_config.json", at / "other/config.json"
    processor.write_text(json.dumps(json.loads(processor.read_text()) | {"patch_size": 16}))
    estimators = {"reference": "algorithm.kl_loss_coef=0.1", "teacher": "loss.default.divergence=1"}
    use = estimators.get(role, "algorithm.advantage_estimator=gae")
    assert start(at, row("small.png"), words=(SEEING, use, f"{role}.path=other")) == ExitCode.BAD_INPUT
    said = (
        "the files of other are unusable for images: patch_size=16 of the image processor, but 14 in vision_config of"
    )
    assert f"which {role}.path ({said} config.json) does not take; leave such rows out" in capsys.readouterr().err
    known = json.loads(config.read_text())
    config.write_text(json.dumps(known | {"vision_config": known["vision_config"] | {"patch_size": 16}}))
    assert start(at, row("small.png"), words=(SEEING, use, f"{role}.path=other")) == ExitCode.BAD_INPUT
    assert f"which {role}.path other of other patches than the policy's does not take" in capsys.readouterr().err


def test_a_teacher_behind_an_endpoint_is_shown_no_images(at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (SEEING, "loss.default.divergence=1", *BEHIND)
    assert start(at, row("small.png"), words=words) == ExitCode.BAD_INPUT
    said = "the row has images, which the teacher's endpoint does not take; use teacher.path, or leave such rows out"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("words", [("teacher.path=other",), BEHIND], ids=["text model", "endpoint"])
def test_images_of_generated_rows_are_refused_alike(
    words: tuple[str, ...], at: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A teacher would read the image's tokens without the image."""
    make_tiny_model(TinyModel(), at / "other")
    given = ["data.train=task:shapes", *(word for word in WORDS if not word.startswith("reward"))]
    assert main([*given, SEEING, "loss.default.divergence=1", *words]) == ExitCode.BAD_INPUT
    who = "teacher.path other" if len(words) == 1 else "the teacher's endpoint"
    assert f"task:shapes[0]: the row has images, which {who} does not take; " in capsys.readouterr().err


def test_a_teacher_that_shows_pictures_in_other_sizes_is_refused(at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It would give them other numbers of tokens. A limit for both makes them equal, other colours do not matter."""
    for name in ("policy", "other"):
        make_tiny_model(TinyModel(architecture="qwen2_5_vl"), at / name)
    processor = at / "other/preprocessor_config.json"
    known = json.loads(processor.read_text())
    smaller = {"size": {"shortest_edge": 784, "longest_edge": 784 * 9}, "image_mean": [0.5] * 3}
    processor.write_text(json.dumps(known | smaller))
    words = ("model.path=policy", "loss.default.divergence=1", "teacher.path=other")
    refused = (
        "rows.jsonl:2: the row has images, which teacher.path other, whose processor makes other sizes of pictures"
    )
    assert start(at, row("small.png"), words=words) == ExitCode.BAD_INPUT
    told = "(max_pixels=7056, not 50176), does not take; use data.max_pixels=7056, or leave such rows out (1 of 2 rows"
    assert f"{refused} {told}" in capsys.readouterr().err
    assert start(at, row(), words=words) == ExitCode.DONE, "texts alone"
    assert start(at, row("small.png"), words=(*words, "data.max_pixels=7056")) == ExitCode.DONE
    processor.write_text(json.dumps(known | {"size": {"shortest_edge": 784 * 4, "longest_edge": 50176}}))
    assert start(at, row("small.png"), words=words) == ExitCode.BAD_INPUT
    told = "(min_pixels=3136, not 784), does not take; give it the policy's preprocessor_config.json, or leave such"
    assert f"{refused} {told}" in capsys.readouterr().err
    assert start(at, row("small.png"), words=(*words, "data.max_pixels=1000")) == ExitCode.BAD_INPUT
    assert "pictures (min_pixels=3136, not 784; max_pixels=50176, not 1000), does" in capsys.readouterr().err


def test_a_teacher_on_another_engine_that_takes_no_images_is_refused(
    at: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_tiny_model(TinyModel(architecture="qwen2_5_vl"), at / "policy")
    shutil.copytree(at / "policy", at / "other")
    words = ("model.path=policy", "loss.default.divergence=1", "teacher.path=other", "teacher.engine=megatron")
    assert start(at, row("small.png"), words=words) == ExitCode.BAD_INPUT
    lines = capsys.readouterr().err
    assert (
        "the row has images, which the megatron teacher does not take; use teacher.engine=fsdp2 or deepspeed" in lines
    )
    assert "teacher.path: the megatron teacher trains " in lines and "not qwen2_5_vl; use teacher.engine=" in lines


def test_more_pixels_than_a_message_holds_are_refused(at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """224 x 224 pixels, the most of the tiny model, have 147 KiB: 168 such images are more than 24 MiB."""
    words = (SEEING, "data.max_prompt_tokens=20000", "model.tiny.max_position_embeddings=32768")
    assert start(at, row(*["large.png"] * 168), words=words) == ExitCode.BAD_INPUT
    (line,) = capsys.readouterr().err.splitlines()
    said = (
        "the row's 168 images have more than 24 MiB of pixels, which are sent with the prompt; lower data.max_pixels, "
    )
    assert line == f"rows.jsonl:2: {said}or leave the row out"
    assert start(at, row(*["large.png"] * 167), words=words) == ExitCode.DONE


def test_a_limit_of_pixels_makes_images_fit_and_shows_in_the_plan(at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """28 x 28 x 10 pixels are ten tokens at most: 9 of the square image, 2 of the tall one; 6 lie sideways."""
    assert start(at, row("large.png", "tall.png"), words=(SEEING, "data.max_pixels=7840")) == ExitCode.DONE
    assert "at most 11 tokens, 8,624 pixels a row, as counted in the data" in capsys.readouterr().out
    assert start(at, row("sideways.jpg"), row("tall.png")) == ExitCode.DONE
    assert "at most 6 tokens" in capsys.readouterr().out
    assert start(at, row("tall.png"), words=(SEEING, "data.max_pixels=700")) == ExitCode.BAD_INPUT
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("data.max_pixels: 700, but the model's smallest image has 784 pixels"), line


def test_a_model_that_takes_images_needs_none(at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert start(at, row()) == ExitCode.DONE
    assert "at most 0 tokens, 0 pixels a row, as counted in the data" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "rows", "tokens"),
    [
        ((), [()], 0),
        ((), [("tall.png",)], 2),
        (("data.val=more.jsonl", "eval_every=1"), [()], 3),
        (("pipeline=agentic", "data.train=env:default", "+env.default={name: sokoban}"), [], 0),
        (("pipeline=agentic", "data.train=env:default", SHOWING), [], None),
        ((*CROPS, "+env.default.options={tools: [crop]}"), [("tall.png",)], None),
        ((*CROPS, "+env.default.options={tools: [guess]}"), [("tall.png",)], 2),
        (("pipeline=agentic", OWN), [("tall.png",)], None),
        (("data.train=task:shapes",), [], None),
        (("data.train=task:sort_digits",), [], 0),
    ],
    ids=[
        "texts",
        "images",
        "validation",
        "text environment",
        "showing environment",
        "crop",
        "other tool",
        "class",
        "drawn",
        "generated texts",
    ],
)
def test_sizes_are_checked_with_the_counted_images(
    words: tuple[str, ...], rows: list[tuple[str, ...]], tokens: int | None, at: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with an image of maximum size in rows without images."""
    checked: list[int | None] = []

    def check(config: Config, layout: RoleLayout, shape: ModelShape) -> list[Problem]:
        assert shape.tower is not None
        checked.append(shape.tower.row_tokens)
        return []

    monkeypatch.setattr("hpcrl.launch.prepare.check_host_memory", check)
    (at / "rows.jsonl").write_text("\n".join(json.dumps(row(*images)) for images in rows))
    (at / "more.jsonl").write_text(json.dumps(row("small.png", "tall.png")))
    unread = ("dry_run", "reward") if "pipeline=agentic" in words else ("dry_run",)
    known = [word for word in WORDS if not word.startswith(unread)]
    _, _, _, _, shown = prepare(["data.train=rows.jsonl", *known, "data.max_prompt_tokens=500", SEEING, *words])
    assert checked == [tokens] == [shown.image_tokens]


def test_pixels_of_a_row_are_planned_up_to_the_limit_of_a_message() -> None:
    """20,000 tokens of 28 x 28 pixels, of which a prompt may have 24 MiB. The controller holds the prompts, and
    copies for two generator ranks, each up to 256 MiB and a prompt."""
    words = ["model.path=/nowhere", "data.max_prompt_tokens=20000"]
    config, many = (load([*words, f"rollout.num_prompts={number}"]) for number in (3, 20))
    layout = RoleLayout.from_config(config)
    shape = read_shape(parse({"model": {"tiny": {"architecture": "qwen2_5_vl"}}}).model.tiny.hf_config())
    assert 20_000 * 28 * 28 * 3 > MAX_PIXEL_BYTES == 24 << 20
    assert controller_pixels(config, layout, shape) == (3 + 2 * 3) * (24 << 20)
    assert controller_pixels(config, layout, with_row_tokens(shape, 10)) == (3 + 2 * 3) * 10 * 28 * 28 * 3
    assert controller_pixels(many, layout, shape) == 20 * (24 << 20) + 2 * ((256 << 20) + (24 << 20))


def test_other_models_get_the_policys_rows(tmp_path: Path) -> None:
    tiny = parse({"model": {"tiny": {"architecture": "qwen2_5_vl"}}}).model.tiny.hf_config()
    (tmp_path / "config.json").write_text(json.dumps(tiny))
    critic = load(["algorithm=ppo", f"critic.path={tmp_path}", "model.path=/nowhere"])
    reference = load(["algorithm.kl_loss_coef=0.1", f"reference.path={tmp_path}", "model.path=/nowhere"])
    for tokens in (None, 0, 7):
        policy = with_row_tokens(read_shape(tiny), tokens)
        for shape in (reference_shape(reference, policy), critic_shape(critic, policy)):
            assert shape.tower is not None and shape.tower.row_tokens == tokens


def test_a_model_of_texts_is_refused_with_images(at: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert start(at, row("small.png"), row("small.png"), words=()) == ExitCode.BAD_INPUT
    (line,) = capsys.readouterr().err.splitlines()
    said = "rows.jsonl:2: the row has images, which model.tiny.architecture=qwen2 does not take; use a model with "
    assert line.startswith(said), line


@pytest.mark.parametrize(
    "env", ["{name: sokoban, options: {show: image}}", "{name: frozen_lake, options: {show: image}}"]
)
def test_an_environment_that_shows_images_needs_a_model_that_takes_them(
    env: str, at: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "pipeline=agentic",
        "data.train=env:default",
        f"+env.default={env}",
        "data.max_prompt_tokens=500",
        "run_dir=run",
    ]
    assert main([*words, "dry_run=true"]) == ExitCode.BAD_INPUT
    (line,) = capsys.readouterr().err.splitlines()
    said = " shows images, which model.tiny.architecture=qwen2 does not take; use a model with model_type qwen2_5_vl, "
    assert line.startswith("env.default.options: ") and said in line and ", or let it show text" in line, line
    assert main([*words, SEEING, "dry_run=true"]) == ExitCode.DONE
    assert main([*words, SEEING, f"generator.engine={BLIND_ENGINE}", "dry_run=true"]) == ExitCode.BAD_INPUT
    (line,) = capsys.readouterr().err.splitlines()
    assert f"shows images, which the {BLIND_ENGINE} generator does not take; use generator.engine=native" in line, line


def as_override(value: Any) -> str:
    """In Hydra's syntax, where keys have no quotes."""
    return re.sub(r'"(\w+)":', r"\1:", json.dumps(value))


JUDGED = ("rollout.max_new_tokens=3", "data.max_prompt_tokens=40", "run_dir=run", "dry_run=true", SEEING)


@pytest.mark.parametrize(
    ("judge", "note", "problem"),
    [
        ({"url": "http://j/v1", "model": "m"}, " if its model takes images, set KEY.images=true", ""),
        ({"url": "http://j/v1", "model": "m", "images": False}, "", ""),
        ({"url": "http://j/v1", "model": "m", "images": True}, "", ""),
        ({"role": "judge"}, ": judge.path text takes none", ""),
        ({"role": "judge", "composed": True}, ": judge.path text takes none", ""),
        ({"role": "judge", "images": False}, "", ""),
        ({"role": "judge", "images": True}, "", "KEY.images: true, but judge.path text takes none"),
        ({"role": "judge", "path": "seeing", "images": True}, "", ""),
        ({"role": "judge", "path": "seeing"}, "", ""),
        (
            {"role": "judge", "path": "other", "engine": "sglang", "images": True},
            "",
            "KEY.images: true, but judge.engine=sglang takes none with model_type=glm4v",
        ),
    ],
)
def test_a_judge_that_does_not_see_the_rows_images_is_named(
    judge: dict[str, Any], note: str, problem: str, at: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, architecture in (("text", "qwen2"), ("seeing", "qwen2_5_vl")):
        make_tiny_model(TinyModel(architecture=architecture), at / name)
    capsys.readouterr()
    judge = dict(judge)
    path, engine, composed = judge.pop("path", "text"), judge.pop("engine", "native"), judge.pop("composed", False)
    if path == "other":
        make_small("glm4v", at / path)
    options = {"judges": {"own": judge}}
    section: dict[str, Any] = {"name": "judge", "options": options}
    key = "reward.default.options.judges.own"
    if composed:
        section = {"name": "composed", "options": {"parts": {"grade": section}}}
        key = "reward.default.options.parts.grade.options.judges.own"
    (at / "rows.jsonl").write_text("\n".join(json.dumps(line) for line in (row(), row("small.png"))))
    of_role = (
        [f"judge.path={path}", f"judge.engine={engine}", "judge.max_prompt_tokens=2000"] if "role" in judge else []
    )
    words = ["data.train=rows.jsonl", *JUDGED, *of_role, f"+reward.default={as_override(section)}"]
    code = ExitCode(main(words))
    out, err = capsys.readouterr()
    told = f"rows.jsonl:2: {key} does not see the images of rows (data.train has 1 with images)"
    assert out.count(told) == bool(note)
    if problem:
        assert code == ExitCode.BAD_INPUT and problem.replace("KEY", key) in err, err
    else:
        assert code == ExitCode.DONE, err
        assert note.replace("KEY", key) in " ".join(out.split())


@pytest.mark.parametrize(
    ("limit", "images", "words", "code"),
    [
        (191, "true", (), ExitCode.BAD_INPUT),
        (191, "null", (), ExitCode.DONE),
        (191, "false", (), ExitCode.DONE),
        (192, "true", (), ExitCode.DONE),
        (191, "true", ("data.max_pixels=7840",), ExitCode.DONE),
    ],
)
def test_images_that_are_too_long_for_a_judge_are_named(
    limit: int, images: str, words: tuple[str, ...], code: ExitCode, at: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The large image has 64 tokens, of 10 x 28 x 28 pixels 9; the instructions have 128."""
    make_tiny_model(TinyModel(architecture="qwen2_5_vl"), at / "judge")
    capsys.readouterr()
    (at / "rows.jsonl").write_text("\n".join(json.dumps(line) for line in (row("small.png"), row("large.png"))))
    judge = f"+reward.default={{name: judge, options: {{judges: {{own: {{role: judge, images: {images}}}}}}}}}"
    served = ("judge.path=judge", f"judge.max_prompt_tokens={limit}", "judge.max_new_tokens=20")
    given = ["data.train=rows.jsonl", *JUDGED, "data.max_prompt_tokens=100", judge, *served, *words]
    assert main(given) == code
    out, err = capsys.readouterr()
    said = (
        "the question about rows.jsonl:2 is too long: 64 tokens of images and at least 128 of text exceed "
        "judge.max_prompt_tokens=191, so the judge has no vote; raise it, or lower data.max_pixels"
    )
    key = "reward.default.options.judges.own"
    assert (f"{key}.images: true, but {said}" in err) == (code == ExitCode.BAD_INPUT), err
    assert (f"{key}: {said}" in " ".join(out.split())) == (images == "null"), out


def test_an_engine_of_a_package_and_a_folder_without_a_processor_hide_images_from_a_judge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The values of an absent processor are not known. Packages may add engines, which judge.engine may name."""
    folder = tmp_path / "judge"
    make_tiny_model(TinyModel(architecture="qwen2_5_vl"), folder)
    config = parse({"data": {"train": "rows.jsonl"}, "judge": {"path": str(folder)}})
    assert why_judge_sees_nothing(config) == ""
    with monkeypatch.context() as patched:
        patched.setattr("hpcrl.rewards.seeing.GEN_ENGINES", {"native": BLIND})
        assert why_judge_sees_nothing(config) == "judge.engine=native takes none"
    (folder / "preprocessor_config.json").unlink()
    assert why_judge_sees_nothing(config) == f"judge.path {folder} takes none without preprocessor_config.json"


def test_engines_with_images_take_the_tiny_models() -> None:
    """The plan compares only model folders with an engine's families."""
    families = [
        spec.media_families for spec in (GEN_ENGINES[name] for name in GEN_ENGINES) if spec.media_families is not None
    ]
    assert families and all("qwen2_5_vl" in known for known in families)


def test_the_models_maximum_length_is_read_in_text_config(tmp_path: Path) -> None:
    """transformers writes the keys of a vision-language model's decoder there."""
    text = {"max_position_embeddings": 4096}
    for name, config in {"nested": {"text_config": text}, "flat": text}.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_vl", **config}))
        assert inspect_model(folder, to_plan=True).max_positions == 4096


def test_features_of_a_decoder_are_read_in_text_config() -> None:
    """Published folders of Qwen2.5-VL have the keys at the top level and name the default rotary embedding mrope."""
    published = {"model_type": "qwen2_5_vl", "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}
    assert not list(unsupported(published))
    for text, said in (
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope type 'dynamic'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ):
        assert list(unsupported({"model_type": "qwen2_5_vl", "text_config": text})) == [said]
    assert rope_types({"text_config": {"rope_scaling": {"rope_type": "yarn"}}}) == {"yarn"}
