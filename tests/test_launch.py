"""The real command line: its output, its refusals, and that a refusal leaves nothing behind."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hpcrl.launch.__main__ import main
from hpcrl.launch.help import EXIT_CODES, IMPORTANT, overview, reference, section
from hpcrl.launch.model_folder import inspect_model
from hpcrl.launch.prepare import prepare
from hpcrl.spec.problems import ConfigError
from hpcrl.system.exit_codes import ExitCode
from tests import in_process
from tests.conftest import ROOT

CONFIG = {
    "model_type": "qwen2",
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "vocab_size": 16,
    "intermediate_size": 12,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
SHAPES = {
    "model.embed_tokens.weight": [16, 8],
    "model.norm.weight": [8],
    "model.layers.0.input_layernorm.weight": [8],
    "model.layers.0.self_attn.q_proj.weight": [8, 8],
    "model.layers.0.self_attn.k_proj.weight": [4, 8],
    "model.layers.0.self_attn.v_proj.weight": [4, 8],
    "model.layers.0.self_attn.q_proj.bias": [8],
    "model.layers.0.self_attn.k_proj.bias": [4],
    "model.layers.0.self_attn.v_proj.bias": [4],
    "model.layers.0.self_attn.o_proj.weight": [8, 8],
    "model.layers.0.post_attention_layernorm.weight": [8],
    "model.layers.0.mlp.gate_proj.weight": [12, 8],
    "model.layers.0.mlp.up_proj.weight": [12, 8],
    "model.layers.0.mlp.down_proj.weight": [8, 12],
}
SHORT = ("data.max_prompt_tokens=64", "rollout.max_new_tokens=32")


def launch(*words: str, at: Path) -> subprocess.CompletedProcess[str]:
    return in_process.run(main, *words, at=at)


def launch_program(*words: str, at: Path) -> subprocess.CompletedProcess[str]:
    """Start it as a user does."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "hpcrl.launch", *words]
    return subprocess.run(command, cwd=at, env=environment, capture_output=True, text=True, timeout=60, check=False)


def refused(*words: str, at: Path, start: Any = launch) -> list[str]:
    """The lines of a refusal; the folder must be unchanged."""
    before = sorted(at.rglob("*"))
    done = start(*words, at=at)
    assert (done.returncode, done.stdout) == (ExitCode.BAD_INPUT, ""), done
    assert "Traceback" not in done.stderr
    assert sorted(at.rglob("*")) == before
    return done.stderr.splitlines()


def write_model(folder: Path, config: dict[str, Any] = CONFIG, shapes: dict[str, list[int]] = SHAPES) -> Path:
    """A complete model folder, except that all weights are zero."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    write_weights(folder / "model.safetensors", shapes)
    return folder


def write_weights(file: Path, shapes: dict[str, list[int]]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * (shape[0] * shape[1] if len(shape) == 2 else shape[0])
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))


def test_a_dry_run_prints_the_plan_and_writes_nothing(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    words = ["+experiment=demo", "cluster=local", f"model.path={model}", "dry_run=true", "layout=disaggregated"]
    done = launch(*words, at=tmp_path)
    assert done.returncode == ExitCode.DONE, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == f"run     demo, new, folder {tmp_path}/runs/demo"
    assert f"{model} (qwen2, 648 parameters)" in done.stdout
    assert "64 prompts x 8 = 512 responses a step; 4 optimizer step(s) of 128 over 2 trainer rank(s)" in done.stdout
    assert [line.split() for line in lines if line.split()[:1] in (["0"], ["1-2"], ["3-4"], ["5"])] == [
        ["0", "controller"],
        ["1-2", "trainer"],
        ["3-4", "generator"],
        ["5", "reward"],
    ]
    assert sorted(tmp_path.iterdir()) == [model]


def test_the_plan_of_an_asynchronous_run_explains_its_log_probs(tmp_path: Path) -> None:
    words = ["+experiment=rlvr_async", "cluster=local", f"model.path={write_model(tmp_path / 'model')}", "dry_run=true"]
    plan = launch(*words, "rollout.max_staleness=1.5", at=tmp_path).stdout
    assert "async   up to 1.5 steps behind, on_stale=wait; correction: truncate weights of each sequence" in plan
    ahead = launch(*words, "~algorithm.correction", "~algorithm.correction_level", at=tmp_path).stdout
    assert "correction: truncate weights of each token" in ahead and "note: without correction" not in ahead
    alone = launch(*words, "algorithm.correction=none", at=tmp_path).stdout
    assert "correction: none" in alone and "note: without correction (algorithm.correction=none)" in alone
    bypass = launch(*words, "~algorithm.correction", "algorithm.ratio_to=generator", at=tmp_path).stdout
    assert "correction: none, the loss uses the ratio to the generator's probabilities per token" in bypass
    assert "log-probs belong to no single policy; token/mixed_weights_ratio" in plan
    assert "no single policy" not in launch(*words, "rollout.on_new_weights=recompute", at=tmp_path).stdout
    assert "async " not in launch(*words, "rollout.max_staleness=0", at=tmp_path).stdout


@pytest.mark.slow
def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n{"prompt": \n')
    (tmp_path / "file").write_text("in the way")
    model = write_model(tmp_path / "model")
    (model / "model.safetensors").unlink()
    lines = refused(
        "+experiment=demo",
        "rollout.gruop_size=4",
        "trainer.lr=quick",
        "layout.generator.num_ranks=5",
        "data.train=bad.jsonl",
        "data.val=missing.jsonl",
        f"model.path={model}",
        "run_dir=file/run",
        at=tmp_path,
        start=launch_program,
    )
    expected = [
        "rollout.gruop_size: unknown key; did you mean rollout.group_size? (override 'rollout.gruop_size=4')",
        "trainer.lr: expected a number, got 'quick' (override 'trainer.lr=quick')",
        "layout.generator.num_ranks: 5 ranks of trainer requested, which has 2 (override ",
        f"model.path: no weights in {model} (*.safetensors)",
        "bad.jsonl:2: ",
        "missing.jsonl",
        f"run folder {tmp_path}/file/run cannot be created: {tmp_path}/file is not a folder",
    ]
    assert len(lines) == len(expected), lines
    for line, part in zip(lines, expected, strict=True):
        assert part in line


def test_a_malformed_row_is_named_by_file_and_line(tmp_path: Path) -> None:
    rows = [
        '{"prompt": "1+1", "answer": "2"}',
        '["no", "object"]',
        '{"answer": "4"}',
        '{"prompt": "2+2", "answer": "4"}',
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    lines = refused("data.train=rows.jsonl", at=tmp_path)
    assert [line.split(": ")[0] for line in lines] == ["rows.jsonl:2", "rows.jsonl:3"]
    (tmp_path / "empty.jsonl").write_text("")
    assert "empty.jsonl" in refused("data.train=empty.jsonl", at=tmp_path)[0]


def test_a_folder_with_other_content_is_not_mistaken_for_a_run(tmp_path: Path) -> None:
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    (tmp_path / "runs" / "demo" / "thesis.tex").write_text("")
    (line,) = refused("+experiment=demo", at=tmp_path)
    assert "is not a run folder" in line and "thesis.tex" in line


@pytest.mark.parametrize(
    "words",
    [["--hlep"], ["demo"], ["+experiment=demmo"], ["cluster=slrm"], ["--help", "trainerr"], ["--help", "env.d.x"]],
)
def test_meaningless_arguments_are_refused_in_one_line(words: list[str], tmp_path: Path) -> None:
    assert len(refused(*words, at=tmp_path)) == 1


@pytest.mark.slow
def test_help_explains_the_launch_and_imports_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from hpcrl.launch.__main__ import main\n"
        "for words in sys.argv[1:]: assert main(words.split()) == 0 and 'torch' not in sys.modules, words"
    )
    command = [sys.executable, "-c", code, "--help", "+experiment=demo -h trainer", "+experiment=demo dry_run=true"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60, capture_output=True)
    text = overview()
    for word in ("usage:", "examples", "disaggregated", "rlvr_gsm8k", "exit codes", *IMPORTANT):
        assert word in text
    for line in text.partition("\nimportant keys")[0].partition("groups (")[2].splitlines():
        if line.startswith("  ") and len(line.split()) > 2:
            assert line.endswith((".", ":")), "a description cut in mid-sentence"
    assert "GRPO on digit sorting" in text  # from the experiment's first comment
    assert set(EXIT_CODES) <= set(ExitCode)


@pytest.mark.parametrize(
    ("key", "shown"),
    [
        ("trainer.lr", ["trainer.lr"]),
        ("env.max_turns", ["env.NAME.max_turns"]),
        ("env.frozen.max_turns", ["env.NAME.max_turns"]),
        ("reward.maths.timeout_s", ["reward.NAME.timeout_s"]),
        ("max_steps", ["max_steps"]),
    ],
)
def test_help_can_show_a_single_key(key: str, shown: list[str]) -> None:
    assert [line.split("=")[0].strip() for line in section(key).splitlines()] == shown


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--help", "env"], ["+experiment=demo", "dry_run=true"]])
def test_a_closed_pipe_ends_the_launch_silently(words: list[str], tmp_path: Path) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "hpcrl.launch", *words]
    ended = subprocess.run(command, check=False, cwd=tmp_path, timeout=60, stdout=writes, stderr=subprocess.PIPE)
    os.close(writes)
    assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["env=null"], r"env:default gives starts of an environment; set env\.default\.name\n"),
        (
            ["env.default.name=class", "env.default.class_path=nope"],
            r"expected an import path, package\.module:NAME or file\.py:NAME, got 'nope'",
        ),
        (["env.default.runs_in=task"], r"runs_in=task: neither reset\(\) nor step\(\) is a coroutine; use thread"),
    ],
)
def test_an_impossible_environment_is_reported_before_the_start(
    words: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=told):
        prepare(["+experiment=agentic_tiny", *words])


@pytest.mark.parametrize("name", ["max_step", "max_steps.no"])
def test_help_for_an_unknown_name_lists_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--help {name}: no such section or key; there are pipeline, .*max_steps,"):
        section(name)


def test_the_documented_keys_and_exit_codes_match_the_code() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == reference() + "\n", "run make docs"
    table = (ROOT / "docs" / "exit_codes.md").read_text()
    assert [f"| {int(code)} | {code.name} |" in table for code in ExitCode] == [True] * len(ExitCode)


def test_a_valid_model_folder_has_no_problems(tmp_path: Path) -> None:
    found = inspect_model(write_model(tmp_path / "model"))
    assert (found.problems, found.model_type, found.max_positions) == ([], "qwen2", 256)
    assert found.shapes == {name: tuple(shape) for name, shape in SHAPES.items()}


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "qwen3_next", "num_key_value_heads": 2},  # layers with attention unlike Llama's
        {"model_type": "falcon_mamba", "num_attention_heads": None},
        {"model_type": "gemma3n_text", "intermediate_size": [12]},
        {"model_type": "glm4_moe", "num_nextn_predict_layers": 1},
    ],
    ids=lambda changes: str(changes["model_type"]),
)
def test_a_folder_of_a_family_with_unknown_tensors_is_left_to_the_engine(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    assert inspect_model(write_model(tmp_path / "model", CONFIG | changes)).problems == []


@pytest.mark.parametrize(("ahead", "accepted"), [(1, True), (0, False), (None, False)])
def test_extra_layers_for_multi_token_prediction_are_valid(ahead: int | None, accepted: bool, tmp_path: Path) -> None:
    """DeepSeek-V3 as published has num_hidden_layers=61 and the weights of layer 61."""
    from hpcrl.models.families import read_shape

    latent = {"kv_lora_rank": 4, "qk_nope_head_dim": 2, "qk_rope_head_dim": 2, "v_head_dim": 2, "q_lora_rank": 4}
    config = (
        CONFIG | latent | {"model_type": "deepseek_v3", "num_nextn_predict_layers": ahead, "num_key_value_heads": 2}
    )
    published = read_shape(config | {"num_hidden_layers": 2}).parameters
    shapes = {p.name: list(p.shape) for p in published if p.split != "expert"}
    problems = inspect_model(write_model(tmp_path / "model", config, shapes)).problems
    assert problems == [] if accepted else "more layers than num_hidden_layers = 1" in problems[0]


def test_a_model_that_takes_images_needs_the_weights_of_its_tower(tmp_path: Path) -> None:
    config = {"model_type": "gemma3", "text_config": CONFIG | {"model_type": "gemma3_text"}, "vision_config": {}}
    text = {"model.embed_tokens.weight": [4, 4]}
    seeing = config | {"vision_config": {"hidden_size": 8}}
    (line,) = inspect_model(write_model(tmp_path / "a", seeing, text)).problems
    assert "config.json has a vision tower (vision_config), but none of the 1 tensors belongs to it" in line
    tower = {"vision_tower.vision_model.post_layernorm.weight": [8]}
    assert inspect_model(write_model(tmp_path / "b", seeing, text | tower)).problems == []
    assert inspect_model(write_model(tmp_path / "c", config, text)).problems == []


@pytest.mark.slow
def test_a_generated_tiny_model_has_no_problems(tmp_path: Path) -> None:
    from hpcrl.config import TinyModel
    from hpcrl.engines.tiny import make_tiny_model

    make_tiny_model(TinyModel(), tmp_path / "tiny")
    assert inspect_model(tmp_path / "tiny").problems == []


def broken_models() -> list[tuple[str, Any, str]]:
    def drop(name: str) -> Any:
        return lambda folder: (folder / name).unlink()

    def shapes(**changed: list[int] | None) -> Any:
        merged = SHAPES | {name.replace("__", "."): shape for name, shape in changed.items()}
        return lambda folder: write_weights(folder / "model.safetensors", {n: s for n, s in merged.items() if s})

    def truncate(folder: Path) -> None:
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-4])

    def index(folder: Path) -> None:
        names = {"a": "model.safetensors", "b": "other.safetensors"}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))

    def config(folder: Path) -> None:
        (folder / "config.json").write_text("{")

    return [
        ("no weights", drop("model.safetensors"), "no weights in"),
        ("no config", drop("config.json"), "no config.json in"),
        ("no tokenizer", drop("tokenizer.json"), "no tokenizer in"),
        ("unreadable config", config, "config.json cannot be read"),
        ("truncated", truncate, "it has "),
        ("missing shard", index, "other.safetensors is missing"),
        (
            "wrong shape",
            shapes(model__embed_tokens__weight=[17, 8]),
            "model.embed_tokens.weight has shape [17, 8], config.json requires [16, 8]",
        ),
        ("missing tensor", shapes(model__norm__weight=None), "model.norm.weight is missing from the weights"),
        (
            "more layers",
            shapes(model__layers__1__input_layernorm__weight=[8]),
            "more layers than num_hidden_layers = 1",
        ),
    ]


@pytest.mark.parametrize(("name", "damage", "expected"), broken_models())
def test_a_broken_model_folder_is_refused_before_the_start(
    name: str, damage: Any, expected: str, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / name.replace(" ", "_"))
    damage(folder)
    problems = inspect_model(folder).problems
    assert problems and any(expected in line for line in problems), problems
    assert all(line.startswith("model.path: ") for line in problems)


def test_engines_without_a_model_need_its_tokenizer_but_no_weights(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).unlink()
    lacking = [f"model.path: no weights in {folder}", f"model.path: no tokenizer in {folder}"]
    words = [f"model.path={folder}", "data.max_prompt_tokens=64", "rollout.max_new_tokens=64"]
    for debug, expected in (("none", lacking), ("fake", lacking[1:])):
        lines = refused(*words, f"debug={debug}", at=tmp_path)
        assert [line for line in lines if line.startswith(tuple(lacking))] == [
            next(line for line in lines if line.startswith(text)) for text in expected
        ]


def test_maximum_length_and_family_of_the_model_are_checked(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    lines = refused(f"model.path={model}", at=tmp_path)
    assert lines[0] == (
        "data.max_prompt_tokens: prompt 1024 + response 256 = 1280 tokens exceed "
        f"max_position_embeddings of {model} = 256"
    )
    other = write_model(tmp_path / "other", config=CONFIG | {"model_type": "mamba"})
    assert "native generator supports" in refused(f"model.path={other}", *SHORT, at=tmp_path)[0]
    dynamic = write_model(tmp_path / "dynamic", config=CONFIG | {"rope_scaling": {"type": "dynamic", "factor": 2.0}})
    assert (
        "the native generator lacks rope type 'dynamic'; generator.engine=vllm or"
        in refused(f"model.path={dynamic}", *SHORT, at=tmp_path)[0]
    )
    assert "no folder nowhere" in refused("model.path=nowhere", at=tmp_path)[0]
