"""Requirements of a teacher behind an endpoint on the configuration; it needs no ranks and no memory of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import ConfigError, TinyModel, load
from hpcrl.engines.tiny import make_tiny_model
from hpcrl.launch.plan import describe
from hpcrl.launch.prepare import prepare
from hpcrl.models.families import shape_of
from hpcrl.planner.memory import check_sizes, memory
from hpcrl.run_folder.changes import permitted_changes
from hpcrl.run_folder.records import CONFIG

URL = "http://serving.example:8000/v1"
DISTILL = ["pipeline=distill", "model.path=policy"]
BEHIND = [f"teacher.endpoint.url={URL}", "teacher.endpoint.model=large"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([*DISTILL, BEHIND[0]], f"teacher.endpoint.model: missing; {URL} serves models by name"),
        ([*DISTILL, BEHIND[1]], "teacher.endpoint.model: not read here, teacher.endpoint.url is null"),
        (
            [*DISTILL, *BEHIND, "teacher.path=x"],
            "teacher.path: the teacher is behind teacher.endpoint.url; give one of",
        ),
        ([*DISTILL, *BEHIND, "teacher.form=full"], "teacher.form: full, but an endpoint gives no hidden states; use"),
        (
            [*DISTILL, *BEHIND, "teacher.form=top_k", "teacher.endpoint.protocol=openai"],
            "teacher.form: top_k, but the protocol openai names tokens by their texts, not by ids; use sampled, or",
        ),
        ([*DISTILL, *BEHIND, "teacher.endpoint.protocol=tgi"], "teacher.endpoint.protocol: expected 'vllm', 'sglang'"),
        ([*DISTILL, "teacher.endpoint.protocol=sglang"], "teacher.endpoint.protocol: not read here, teacher.endpoint"),
        (
            [*DISTILL, *BEHIND, "rollout.temperature=0.7"],
            "rollout.temperature: 0.7, but an endpoint's log-probs are at",
        ),
        ([*DISTILL, *BEHIND, "deterministic=true"], "deterministic: an endpoint's log-probs depend on what else"),
        ([*DISTILL, *BEHIND, "teacher.engine=megatron"], "teacher.engine: not read here, the teacher is behind"),
        ([*DISTILL, *BEHIND, "teacher.top_k=8"], "teacher.top_k: not read here, form is sampled"),
        (
            [*DISTILL, *BEHIND, "timeouts.command_s=300"],
            "teacher.endpoint.retry_s: 300 must be below timeouts.command_s",
        ),
        (["pipeline=distill", *BEHIND], "teacher.endpoint.url: the run creates the policy (model.tiny), and no other"),
        (["model.path=policy", *BEHIND], "teacher.endpoint.url: not read here, no domain learns from a teacher"),
        ([*DISTILL, "teacher.endpoint.url=https://me:pw@h/v1"], "teacher.endpoint.url: expected an address without"),
        ([*DISTILL, "teacher.endpoint.url='https://h/v1?key=1'"], "teacher.endpoint.url: expected an address without"),
        (
            [*DISTILL, "teacher.endpoint.url=localhost:8000"],
            "teacher.endpoint.url: expected an address such as http://HOST:8000/v1, got 'localhost:8000'",
        ),
        (
            [*DISTILL, "teacher.endpoint.url=http://h:80a/v1"],
            "teacher.endpoint.url: expected an address such as http://HOST:8000/v1 (Port could not be cast",
        ),
        ([*DISTILL, "teacher.endpoint.url=http://h:99999/v1"], "teacher.endpoint.url: expected an address such as"),
        ([*DISTILL, "teacher.endpoint.url='http://[::1/v1'"], "teacher.endpoint.url: expected an address such as"),
        ([*DISTILL, "teacher.endpoint.url=http://:80/v1"], "teacher.endpoint.url: expected an address such as"),
        (
            [*DISTILL, *BEHIND, "teacher.endpoint.api_key_env=sk-12"],
            "teacher.endpoint.api_key_env: expected the name of",
        ),
        (
            [*DISTILL, *BEHIND, "teacher.endpoint.max_in_flight=0"],
            "teacher.endpoint.max_in_flight: expected at least 1",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_settings_are_refused_in_one_line(words: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RoleLayout.from_config(load(words))
    assert [line for line in caught.value.problems if line.startswith(expected)], caught.value.problems


def test_a_malformed_address_is_the_only_problem() -> None:
    with pytest.raises(ConfigError) as caught:
        load([*DISTILL, "teacher.endpoint.url=localhost:8000", BEHIND[1]])
    (line,) = caught.value.problems
    assert line.startswith("teacher.endpoint.url: expected an address")


def test_teachers_of_domains_beside_it_are_one_problem(tmp_path: Path) -> None:
    """Which domain has none does not matter."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "say {i}", "tag": "{"ab"[i % 2]}"}}\n' for i in range(16)))
    make_tiny_model(TinyModel(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1), tmp_path / "policy")
    words = ["pipeline=distill", f"model.path={tmp_path}/policy", f"data.train={rows}", "rollout.num_prompts=8"]
    words += [f"run_dir={tmp_path}/run", "data.max_prompt_tokens=64", "rollout.max_new_tokens=16"]
    with pytest.raises(ConfigError) as caught:
        prepare([*words, *BEHIND, "teacher.paths.a=large"])
    (line,) = caught.value.problems
    assert line.startswith("teacher.paths: the teacher is behind teacher.endpoint.url; give one of the two")


def test_its_ranks_have_the_rows_of_the_ranks_they_share() -> None:
    def groups(*more: str) -> tuple[tuple[int, ...], ...]:
        words = ["trainer.engine=megatron", "trainer.megatron.tensor_parallel=2", *more]
        return RoleLayout.from_config(load([*DISTILL, *BEHIND, *words])).division("teacher").groups

    assert groups() == ((1, 2),)  # in turns with the trainer, as the default
    assert groups("layout.teacher.colocate_with=null", "layout.teacher.num_ranks=3") == ((3,), (4,), (5,))


def test_the_plan_names_the_server_and_counts_no_weights(tmp_path: Path) -> None:
    policy = tmp_path / "policy"
    make_tiny_model(TinyModel(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=16), policy)
    words = [f"model.path={policy}", "pipeline=distill", *BEHIND, "data.train=task:sort_digits"]
    words += ["data.max_prompt_tokens=64", "rollout.max_new_tokens=16", f"run_dir={tmp_path / 'run'}"]
    words += ["layout.teacher.colocate_with=null", "layout.teacher.num_ranks=1", "rollout.group_size=1"]
    config, layout, model, run, seen = prepare([*words, "dry_run=true"])
    text = describe(config, layout, model, run, seen)
    assert f"teacher large at {URL}, asked once before the first step" in text and "teacher (sampled)" in text
    shape = shape_of(str(policy), "")
    assert check_sizes(config, layout, shape) == []
    kinds = memory(config, layout, shape)
    (own,) = [kind for kind in kinds if kind.roles == ("teacher",)]
    assert {part.name for part in own.parts if part.role == "teacher"} == {"teacher's fields", "program"}


def test_a_resumed_run_may_find_the_server_elsewhere(tmp_path: Path) -> None:
    (tmp_path / CONFIG).write_text(yaml.safe_dump(load([*DISTILL, *BEHIND]).model_dump(mode="json")))
    moved = load([*DISTILL, "teacher.endpoint.url=http://node7:8000/v1", BEHIND[1], "teacher.endpoint.retry_s=60"])
    lines = permitted_changes(moved.model_dump(mode="json"), tmp_path)
    assert [line.split(":")[0] for line in lines] == ["run_dir", "teacher.endpoint.url", "teacher.endpoint.retry_s"]
    other = load([*DISTILL, BEHIND[0], "teacher.endpoint.model=small"])
    with pytest.raises(ConfigError, match=r"teacher.endpoint.model: .*large.* -> .*small"):
        permitted_changes(other.model_dump(mode="json"), tmp_path)
