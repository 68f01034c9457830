"""Requirements of served models on the configuration: refused before the start, and counted in the plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import ConfigError, TinyModel, load
from hpcrl.engines.tiny import make_tiny_model
from hpcrl.launch.plan import describe
from hpcrl.launch.prepare import prepare
from hpcrl.models.families import read_shape
from hpcrl.planner.memory import PROGRAM_BYTES, memory
from hpcrl.planner.memory_parts import PHASES

JUDGE = "{name: judge, options: {judges: {own: {role: judge}}}}"
JUDGED = f"+reward.default={JUDGE}"
JUDGED_IN_PART = f"+reward.default={{name: composed, options: {{parts: {{a: {{name: tags}}, b: {JUDGE}}}}}}}"
SCORED = "+reward.default={name: reward_model}"
DATA = "data.train=task:sort_digits"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_model(TinyModel(max_position_embeddings=512), path)
    return path


def refused(*words: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        RoleLayout.from_config(load(words))
    return caught.value.problems


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([JUDGED], "judge.path: missing; reward.default has a judge with role=judge, which needs a model folder"),
        ([JUDGED_IN_PART], "judge.path: missing; reward.default has a judge with role=judge"),
        ([SCORED], "reward_model.path: missing; reward.default.name=reward_model needs the folder of one"),
        (["judge.path=/m"], "judge.path: not read here, no reward uses it (reward.DOMAIN.options.judges"),
        (["layout.judge.num_ranks=2"], "layout.judge.num_ranks: not read here, no reward uses it"),
        (["reward_model.path=/m"], "reward_model.path: not read here, no reward uses it (reward.DOMAIN.name="),
        ([JUDGED, "judge.path=/m", "judge.vllm.enforce_eager=true"], "judge.vllm.enforce_eager: not read here, the "),
        ([JUDGED, "judge.path=/m", "judge.native.block_tokens=9999"], "judge.native.block_tokens: 9999 tokens of cac"),
        ([JUDGED, "judge.path=/m", "judge.engine=vllm", "deterministic=true"], "deterministic: the vllm judge"),
        (
            [JUDGED, "judge.path=/m", "layout.judge.num_ranks=2", "layout.judge.tensor_parallel=2"],
            "layout.judge.tensor_parallel: 2, but each judge rank holds a whole model; use 1",
        ),
        ([JUDGED, "judge.path=/m", "layout.judge.min_ranks=2"], "layout.judge.min_ranks: 2 is more than the 1 ranks"),
        (
            [JUDGED, "judge.path=/m", "judge.engine=vllm", "generator.engine=vllm", "layout=single"],
            "judge.engine: rank 0 has a generator and a judge, and a process can have only one vllm engine",
        ),
        ([JUDGED, "debug=fake", "judge.path=/m"], "judge.path: not read here"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_invalid_settings_are_refused_in_one_line(words: list[str], expected: str) -> None:
    (line,) = refused(*words)
    assert expected in line


def problems(*words: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        prepare([DATA, "dry_run=true", *words])
    return caught.value.problems


def test_model_folders_are_checked(folder: Path, tmp_path: Path) -> None:
    judged = [JUDGED, f"judge.path={folder}", "judge.max_prompt_tokens=400", "judge.max_new_tokens=100"]
    (line,) = problems(*judged[:2])
    assert "judge.max_prompt_tokens: prompt 8192 + response 1024 = 9216 tokens exceed max_position_embeddings" in line
    (line,) = problems(*judged, "judge.native.kv_cache_gib=1e-6")
    assert "GiB of KV cache, but 500 tokens" in line and "judge.native.kv_cache_gib: " in line
    assert "lower judge.max_prompt_tokens or judge.max_new_tokens" in line
    (line,) = problems(JUDGED, f"judge.path={tmp_path / 'none'}")
    assert f"judge.path: no folder {tmp_path / 'none'}" in line
    (line,) = problems(SCORED, f"reward_model.path={folder}", "reward_model.max_tokens=512")
    assert "reward_model.path: " in line and "is of Qwen2ForCausalLM with 2 label(s); a reward model is" in line
    bare = tmp_path / "bare"
    make_tiny_model(TinyModel(), bare)
    file = bare / "tokenizer_config.json"
    file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "chat_template"}))
    (line,) = problems(JUDGED, f"judge.path={bare}", *judged[2:])
    assert f"judge.path: the tokenizer in {bare} has no chat template" in line


def test_the_heads_of_a_reward_model_need_weights(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    make_tiny_model(TinyModel(), folder)
    config = json.loads((folder / "config.json").read_text()) | {"architectures": ["Qwen2ForSequenceClassification"]}
    (folder / "config.json").write_text(json.dumps(config | {"id2label": {"0": "helpful", "1": "long"}}))
    words = [SCORED, f"reward_model.path={folder}"]
    for weights, text in (
        ("{}", "has 2 heads (helpful, long); give the weight of each in the score, as in reward_model.head_weights={h"),
        ("{kind: 1}", "has no head kind of reward_model.head_weights; its heads are helpful, long"),
    ):
        (line,) = problems(*words, f"reward_model.head_weights={weights}")
        assert line.startswith(f"reward_model.path: {folder} {text}")
    (line, *_) = problems(*words, "reward_model.head_weights={long: 0}")
    assert line.startswith(
        "reward_model.head_weights: expected a weight that is not 0, since all scores would be equal"
    )


def test_the_judges_images_have_its_own_processors_limit() -> None:
    config = load([DATA, JUDGED, "judge.path=/m", "data.max_pixels=4000"])
    assert config.data.max_pixels == 4000 and config.of_judge().data.max_pixels is None


def test_the_plan_counts_the_judge(folder: Path) -> None:
    words = [DATA, JUDGED, f"judge.path={folder}", "judge.max_prompt_tokens=400", "judge.max_new_tokens=100"]
    config, layout, model, run, shown = prepare([*words, "dry_run=true", "layout.judge.num_ranks=2"])
    assert layout.ranks["judge"] == (3, 4)
    shape = read_shape(config.model.tiny.hf_config())
    (judges,) = (kind for kind in memory(config, layout, shape) if kind.roles == ("judge",))
    sizes = {part.name: part.num_bytes for part in judges.parts}
    judge = read_shape(json.loads((folder / "config.json").read_text()))
    assert sizes["weights"] == 4 * judge.num_parameters and sizes["program"] == PROGRAM_BYTES
    tokens = config.judge.max_num_seqs * 512  # 16 blocks of 32 tokens for 500
    token = 2 * judge.num_layers * judge.num_kv_heads * judge.head_dim * 4
    assert sizes["KV cache"] == tokens * token * (judge.num_layers + 1) // judge.num_layers
    text = describe(config, layout, model, run, shown)
    assert "3-4     judge" in text and "rank 3-4 (judge): " in text and f"judge   {folder} (qwen2, " in text


def test_a_judge_on_trainer_ranks_keeps_its_weights_on_the_gpu(folder: Path) -> None:
    """Only training engines and the generator take turns."""
    words = [DATA, JUDGED, f"judge.path={folder}", "judge.max_prompt_tokens=400", "judge.max_new_tokens=100"]
    shared = ["layout.judge.colocate_with=trainer", "layout.judge.num_ranks=null", "layout.offload=always"]
    config = load([*words, *shared, "cluster.device=cuda"])
    (kind,) = memory(config, RoleLayout.from_config(config), read_shape(config.model.tiny.hf_config()))
    held = {p.role: p.during for p in kind.parts if p.name == "weights" and not p.on_host}
    assert held["judge"] == PHASES and "generate" not in held["trainer"]
