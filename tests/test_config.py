"""The schema, the composition and the cross-field checks: every problem at once, one line each."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcrl.algorithms.spec import GRPO, Reinforce
from hpcrl.config import Config, ConfigError, RolloutConfig, load, parse
from hpcrl.config.abilities import check_family, check_length
from hpcrl.config.folders import conf_dir, groups
from hpcrl.config.reading import known_keys
from hpcrl.config.renamed_keys import RENAMED, arguments_with_new_names, with_new_keys, with_new_names
from hpcrl.launch.key_docs import meaning
from hpcrl.launch.presets import preset_of
from hpcrl.rollout.scheduling.policies import SchedulerConfig
from hpcrl.rollout.scheduling.scheduler import RolloutScheduler
from hpcrl.rollout.scheduling.selection import PATIENCE
from hpcrl.rollout.types import MAX_ATTEMPTS, MAX_GROUP_SIZE, MAX_VALIDATION_ROWS
from hpcrl.spec.fields import Section
from hpcrl.spec.tables import GEN_ENGINES


def problems(*words: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(words)
    return caught.value.problems


def test_defaults_are_a_complete_configuration() -> None:
    config = load([])
    assert config == parse({}).model_copy(update={"model": config.model})
    assert (config.run_name, config.run_dir, config.layout.name) == ("rlvr", "runs/rlvr", "colocated")
    assert isinstance(config.algorithm, GRPO)


def test_the_run_is_named_after_its_experiment_then_its_pipeline() -> None:
    assert load(["+experiment=demo_sft"]).run_name == "demo_sft"
    assert load(["pipeline=sft"]).run_name == "sft"
    assert load(["+experiment=demo", "run_name=mine"]).run_dir == "runs/mine"
    assert load(["+experiment=demo", "run_dir=elsewhere"]).run_dir == "elsewhere"


@pytest.mark.parametrize("name", ["demo_agentic", "demo_lake_images", "demo_sokoban", "demo_tools", "demo_webshop"])
def test_the_warm_up_of_a_demonstration_uses_the_same_environment(name: str) -> None:
    warm_up, demo = load([f"+experiment={name}_sft"]), load([f"+experiment={name}"])
    ((section, env),) = demo.envs.items()
    assert env == warm_up.envs[section]
    (source,) = warm_up.data.train
    assert source.path == f"expert:{env.name}"
    assert source.options["env"] == env.options and source.options["max_turns"] == env.max_turns


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_every_form_of_an_override_sets_the_value(prefix: str) -> None:
    words = [f"{prefix}trainer.lr=2e-4", f"{prefix}data.train=[a.jsonl,b.jsonl]", f"{prefix}cluster=local"]
    config = load([*words, f"{prefix}layout=single"])
    assert (config.trainer.lr, config.data.train, config.layout.name) == (2e-4, ["a.jsonl", "b.jsonl"], "single")


def test_a_deleted_key_has_its_default_again() -> None:
    assert load(["+experiment=demo"]).algorithm.num_mini_batches == 4
    assert load(["+experiment=demo", "~algorithm.num_mini_batches"]).algorithm.num_mini_batches == 1
    assert load(["env=scripted", "~env"]).env == {}
    assert load(["env=scripted", "env=null"]).env == {}
    assert load(["~trainer.lr"]).trainer.lr == load([]).trainer.lr


def test_later_overrides_win_and_groups_are_applied_before_values() -> None:
    assert load(["seed=1", "seed=2"]).seed == 2
    assert load(["algorithm=grpo", "algorithm=reinforce"]).algorithm.advantage_estimator == "reinforce"
    assert load(["layout.trainer.num_ranks=3", "layout=disaggregated"]).layout.trainer.num_ranks == 3


@pytest.mark.parametrize("name", groups()["experiment"])
def test_every_experiment_is_valid_and_sets_no_unused_key(name: str) -> None:
    config = load([f"+experiment={name}"])
    assert config.run_name == name
    if config.learns and config.trainer.engine == "fsdp2" and config.model.path is not None:
        # Otherwise a run on GPUs would train one sequence at a time, at a fraction of the speed, with only a warning.
        assert config.trainer.fsdp2.packing == "require"
    generates = config.learns and config.learns_from_rewards
    if generates and config.trainer.param_dtype == "bfloat16":  # in which trainer and generator differ by rounding
        assert config.algorithm.correction != "none"
        assert config.trainer.head_dtype == config.generator.head_dtype == "float32"
        mixtures = ("-A", "gpt-oss", "GLM-4.5", "DeepSeek-V3")
        assert config.trainer.router_replay == any(name in (config.model.path or "") for name in mixtures)


def test_every_conf_file_describes_itself() -> None:
    for file in conf_dir().rglob("*.yaml"):
        comments = [line for line in file.read_text().splitlines()[:2] if line.startswith("# ") and "@" not in line]
        assert comments, file


def test_all_problems_are_reported_at_once_with_place_and_suggestion() -> None:
    found = problems(
        "+experiment=demo",
        "rollout.num_promts=4",
        "group_size=4",
        "trainer.lr=fast",
        "seed=true",
        "max_steps=0",
        "algorithm=grop",
        "trainer.betas=[.9]",
        "data.train=[{pth:x}]",
        "reward.default.name=mth",
        "rollout.filter_mean_low=.5",
        "rollout.filter_mean_high=.2",
        "a=1,2",
        "what",
        "--dry-run",
        "run_name=a/b",
    )
    recipes = ", ".join(sorted(path.stem for path in (Path(__file__).parents[1] / "conf" / "algorithm").glob("*.yaml")))
    expected = [
        f"algorithm=grop: no such algorithm; there are: {recipes}; did you mean grpo?",
        "a=1,2: several values; write a list as key=[a,b], or give -m to run each value",
        "what: expected key=value",
        "--dry-run: unknown option; settings are written key=value, --help shows them",
        "run_name: expected letters, digits, '.', '_' and '-' only, got 'a/b' (override 'run_name=a/b')",
        "seed: expected a number, got True (override 'seed=true')",
        "max_steps: expected at least 1, got 0 (override 'max_steps=0')",
        "data.train.0.path: missing (override 'data.train=[{pth:x}]')",
        "data.train.0.pth: unknown key; did you mean data.train.0.path? (override 'data.train=[{pth:x}]')",
        "rollout.num_promts: unknown key; did you mean rollout.num_prompts? (override 'rollout.num_promts=4')",
        "reward.default.name: expected 'exact_match', 'math', 'numeric', 'choice', 'grounding', 'f1', 'regex', "
        "'json_schema', 'ifeval', 'code', 'length', 'repetition', 'tags', 'language', 'composed', 'reasoning_gym', "
        "'judge', 'reward_model', 'sort_digits', 'none', "
        "'fake' or 'function', got 'mth'; did you mean math? (override 'reward.default.name=mth')",
        "trainer.lr: expected a number, got 'fast' (override 'trainer.lr=fast')",
        "trainer.betas.1: missing (override 'trainer.betas=[.9]')",
        "group_size: unknown key; did you mean rollout.group_size? (override 'group_size=4')",
        "rollout.filter_mean_low: 0.5 must be below rollout.filter_mean_high, which is 0.2 "
        "(override 'rollout.filter_mean_low=.5')",
    ]
    assert found == expected


def test_paths_of_other_libraries_suggest_the_key_of_their_deepest_known_part() -> None:
    found = problems(
        "+actor_rollout_ref.actor={clip_ratio_high:.28,strategy:fsdp,optim:{lr:1e-6}}",
        "+actor_rollout_ref.rollout.n=8",
        "+reward_model.overlong_buffer.len=4096",
        "+train_env_manager.group_size=16",
        "+trainr.lr=1",
        "+wandb.a.b=1",
    )
    assert {line.partition(" (override")[0] for line in found} == {
        "actor_rollout_ref.actor.clip_ratio_high: unknown key; here algorithm.pg_clip_high",
        "actor_rollout_ref.actor.strategy: unknown key",
        "actor_rollout_ref.actor.optim.lr: unknown key; did you mean trainer.lr?",
        "actor_rollout_ref.rollout.n: unknown key; here rollout.group_size",
        "reward_model.overlong_buffer: unknown key; here the reward length, reward.NAME.options.buffer_tokens, as a "
        "part of the reward composed",
        "train_env_manager.group_size: unknown key; did you mean rollout.group_size?",
        "trainr: unknown key; did you mean trainer?",
        "wandb: unknown key",
    }


def test_a_misplaced_option_suggests_its_place_in_the_options() -> None:
    found = problems(
        "reward.a.name=code",
        "reward.a.min_level=L1",
        "reward.b.min_level=L1",
        "env.default.name=frozen_lake",
        "env.default.size=4",
    )
    assert {line.partition(" (override")[0] for line in found} == {
        "reward.a.min_level: unknown key; did you mean reward.a.options.min_level?",
        "reward.b.min_level: unknown key",
        "env.default.size: unknown key; did you mean env.default.options.size?",
    }


def test_a_value_from_a_conf_file_is_traced_to_the_file() -> None:
    found = problems("+experiment=demo", "rollout.num_prompts=5", "rollout.group_size=5")
    assert found == [
        "algorithm.num_mini_batches: 4 does not divide 5 prompts x 5 = 25 responses (conf/experiment/demo.yaml)"
    ]


def test_a_value_of_an_inherited_experiment_is_traced_to_its_file() -> None:
    (found,) = problems("+experiment=rlvr_200b_disaggregated", "rollout.filter_mean_high=0.05")
    assert found.endswith("which is 0.05 (conf/experiment/rlvr_7b.yaml)")


def test_consequences_of_an_unreadable_value_are_not_reported() -> None:
    # With the default of 8 instead the group size would be divisible, with 0 it would not.
    assert len(problems("rollout.group_size=none", "algorithm.num_mini_batches=7")) == 1
    assert len(problems("rollout.group_size=3", "algorithm.num_mini_batches=7")) == 1


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["rollout.group_size=1"], "rollout.group_size: grpo compares the responses of a group"),
        (
            ["algorithm=reinforce", "algorithm.norm_std_type=group", "rollout.group_size=1"],
            "rollout.group_size: reinforce",
        ),
        (["algorithm=reinforce", "rollout.group_size=1", "rollout.filter_std=true"], "rollout.filter_std: a filter"),
        (["rollout.temperature=0"], "rollout.temperature: 0 makes the responses of a group equal"),
        (["rollout.top_k=1"], "rollout.top_k: 1 makes the responses of a group equal, so there is nothing to learn"),
        (["rollout.min_p=1"], "rollout.min_p: 1 makes the responses of a group equal, so there is nothing to learn"),
        (["rollout.max_generated_groups=63"], "rollout.max_generated_groups: 63 is less than"),
        (
            ["data.max_prompt_tokens=4000", "rollout.max_new_tokens=97"],
            "data.max_prompt_tokens: prompt 4000 + response 97",
        ),
        (["trainer.lr_schedule=cosine", "trainer.min_lr=1"], "trainer.min_lr: 1 is above trainer.lr"),
        (["trainer.betas=[.9,1]"], "trainer.betas.1: must be below 1"),
        (["rollout.stop=['']"], "rollout.stop: '' ends every response before its first token"),
        (["rollout.top_p=1e-300"], "rollout.top_p: expected at least 0.001, got 1e-300"),
        (["rollout.temperature=1e-300"], "rollout.temperature: 1e-300 is out of range; use 0.01 to 100"),
        (["rollout.temperature=1e300"], "rollout.temperature: 1e+300 is out of range"),
        (
            ["data.val=task:add", "eval.temperature=1e-9"],
            "eval.temperature: 1e-09 is out of range; use 0.01 to 100, or 0 for greedy",
        ),
        (
            ["trainer.engine=tests.planner.models:UNPLANNED", "deterministic=true"],
            "deterministic: the tests.planner.models:UNPLANNED trainer is not deterministic; use false, or trainer.",
        ),
        (
            ["generator.engine=vllm", "deterministic=true"],
            "deterministic: the vllm generator is not deterministic; use false, or generator.engine=native",
        ),
        (
            ["generator.engine=sglang", "rollout.min_p=.1"],
            "rollout.min_p: SGLang cannot draw with min_p from a response's own seed; use 0 with top_p or top_k",
        ),
        (
            ["generator.engine=sglang", "rollout.top_k=5000"],
            "rollout.top_k: 5000, but SGLang gives the log-probs of truncated sampling, which corrections need, only "
            "with top_k up to 4096; use less",
        ),
        (
            ["generator.engine=sglang", "+generator.sglang.options={tp_size: 2}"],
            "generator.sglang.options: tp_size is set by hpcrl; set layout.generator.tensor_parallel inst",
        ),
        (
            ["generator.engine=sglang", "trainer.router_replay=true"],
            "trainer.router_replay: the sglang generator does not support it; use false or generator.engine=native or "
            "vllm",
        ),
        (
            ["generator.engine=sglang", "trainer.lora.rank=8"],
            "trainer.lora.rank: the sglang generator does not support adapters; use 0, or generator.engine=native",
        ),
        (
            ["trainer.lora.rank=8", "algorithm.kl_loss_coef=.1", "algorithm.ref_update_steps=5"],
            "algorithm.ref_update_steps: with LoRA (trainer.lora.rank) the reference is the base model, ",
        ),
        (
            ["algorithm.ref_update_steps=5"],
            "algorithm.ref_update_steps: not read here, kl_reward_coef and kl_loss_coef are 0",
        ),
        (
            ["trainer.engine=megatron", "trainer.lora.rank=8", "trainer.lora.dropout=.1"],
            "trainer.lora.dropout: 0.1: the ranks of the megatron trainer split an adapter's inputs, ",
        ),
        (
            """trainer.engine=megatron trainer.lora.rank=8 trainer.lora.parts=[experts] pipeline=sft
            eval_every=0""".split(),  # noqa: SIM905
            "trainer.lora.parts: the megatron trainer has no adapters of experts; leave experts out, ",
        ),
        (
            ["trainer.engine=megatron", "trainer.lora.rank=8", "trainer.megatron.aux_loss=.1"],
            "trainer.megatron.aux_loss: 0.1 trains routers, and trainer.lora freezes them; use 0",
        ),
        (
            """trainer.lora.rank=8 trainer.lora.dropout=.1 trainer.fsdp2.tensor_parallel=2
            layout.trainer.num_ranks=2""".split(),  # noqa: SIM905
            "trainer.fsdp2.tensor_parallel: 2 needs trainer.lora without dropout; use 1, and context_parallel or repl",
        ),
        (
            """trainer.lora.rank=8 trainer.lora.parts=[experts] pipeline=sft eval_every=0 layout.trainer.num_ranks=2
            trainer.fsdp2.tensor_parallel=2""".split(),  # noqa: SIM905
            "trainer.fsdp2.tensor_parallel: 2 needs trainer.lora without parts=[experts]; use 1, and context_parallel",
        ),
        (
            ["trainer.lora.rank=8", "trainer.lora.target_modules=[]"],
            "trainer.lora.target_modules: ",
        ),
        (["trainer.lora.alpha=8"], "trainer.lora.alpha: not read here, trainer.lora.rank is 0"),
        (
            ["generator.engine=vllm", "generator.native.block_tokens=64"],
            "generator.native.block_tokens: not read here, the engine is vllm",
        ),
        (
            ["generator.native.block_tokens=100000000"],
            "generator.native.block_tokens: 100000000 tokens of cache per response, but the longest has 1280",
        ),
        (["model.tiny.vocab_size=1"], "model.tiny.vocab_size: expected at least 259, got 1"),
        (["model.tiny.num_layers=1000000"], "model.tiny.num_layers: expected at most 1000"),
        (["model.tiny.hidden_size=99999999999999"], "model.tiny.hidden_size: expected at most 65536"),
        (["data.train=[{path: 'task:add', size: 99999999999999}]"], "data.train.0.size: expected less than 16777216"),
        (["timeouts.command_s=1e300"], "timeouts.command_s: expected at most 10000000"),
        (["timeouts.store_s=.001"], "timeouts.store_s: expected at least 1"),
        (["trainer.eps=1e20"], "trainer.eps: expected at most 1"),
        (["reward.default.timeout_s=1e-9"], "reward.default.timeout_s: expected at least 0.01"),
        (["model.dtype=bfloat16"], "trainer.param_dtype: float32 has no advantage"),
        (
            ["trainer.engine=hpcrl.engines.train.fake_trainer.spec:SPEC", "trainer.head_dtype=float32"],
            "trainer.head_dtype: float32, but the hpcrl.engines.train.fake_trainer.spec:SPEC trainer computes the "
            "vocabulary projection only in the model's dtype; use null, or trainer.engine=fsdp2 or megatron or "
            "deepspeed",
        ),
        (
            ["trainer.fsdp2.attention=flash", "trainer.param_dtype=float32"],
            "trainer.fsdp2.attention: flash needs GPUs, trainer.param_dtype=bfloat16 and packing; use auto",
        ),
        (["trainer.head_dtype=bfloat16"], "trainer.head_dtype: expected"),
        (["model.tiny.num_heads=3"], "model.tiny.num_kv_heads: 2 does not divide num_heads"),
        (
            ["model.tiny.architecture=deepseek_v3", "model.tiny.num_experts=1"],
            "model.tiny.num_experts: 1, but deepseek_v3 needs 2 or more",
        ),
        (
            ["model.tiny.architecture=qwen3_next", "model.tiny.num_layers=1"],
            "model.tiny.num_layers: 1, but qwen3_next needs 2 or more",
        ),
        (["model.tiny.hidden_size=20"], "model.tiny.hidden_size: 20 must be a multiple of"),
        (
            ["env=scripted", "data.max_prompt_tokens=2000"],
            "data.max_prompt_tokens: 2 turns x (2000 + 256) = 4512 tokens",
        ),
        (
            ["env=scripted", "data.max_prompt_tokens=300", "env.default.max_turns=50"],
            "data.max_prompt_tokens: 50 turns x (300 + 256) = 27800 tokens exceed "
            "model.tiny.max_position_embeddings = 4096; env.NAME.max_sequence_tokens=4096 ends episodes that reach it",
        ),
        (
            ["env=scripted", "env.default.max_sequence_tokens=100"],
            "env.default.max_sequence_tokens: 100 leaves no room for one turn",
        ),
        (
            ["env=scripted", "env.default.max_sequence_tokens=4000", "env.default.episode=steps"],
            "env.default.max_sequence_tokens: 4000, but by steps every turn is a separate sequence",
        ),
        (["reward.default.name=function"], "reward.default.function: name=function needs"),
        (["reward.a.function=m:f"], "reward.a.function: read only with name=function"),
        (["env.default.name=class"], "env.default.class_path: name=class needs"),
        (
            ["env.name=scripted"],
            "env.name: an environment belongs to a domain; give env.default.name, or",
        ),
        (["env.default.class_path=m:C"], "env.default.class_path: read only with name=class"),
        (
            ["env=scripted", "env.default.history=3"],
            "env.default.history: not read here, with episode=trajectory the model sees all turns",
        ),
        (
            ["env=scripted", "env.default.episode=steps", "trainer.engine=tests.planner.models:UNPLANNED"],
            "env.default.episode: the tests.planner.models:UNPLANNED trainer treats an episode as one sequence; use "
            "trajectory, or trainer.engine=fsdp2 or megatron or deepspeed",
        ),
        (
            ["data.val=task:add", "eval.samples=4"],
            "eval.samples: 4 greedy responses to a prompt are all equal; set eval.temperature above 0",
        ),
        (
            ["data.val=task:add", "eval.temperature=.5", "eval.sets.add={samples:2,temperature:0}"],
            "eval.sets.add.samples: 2 greedy responses to a prompt are all equal; set eval.sets.add.temperature",
        ),
        (
            ["data.val=task:add", "eval.sets.add.temperature=1000"],
            "eval.sets.add.temperature: 1000 is out of range; use 0.01 to 100, or 0 for greedy",
        ),
        (
            ["data.val=task:add", "rollout.domains.add.max_new_tokens=7", "eval.sets.add.max_new_tokens=9"],
            "eval.sets.add.max_new_tokens: 9 is above rollout.domains.add.max_new_tokens=7, which also limits",
        ),
        (
            ["data.val=task:add", "eval.sets.add.num_prompts=1048576"],
            "eval.sets: 1048832 prompts with eval.num_prompts, and an evaluation has at most 1048576",
        ),
        (
            ["rollout.domains={a:{max_new_tokens:999}}"],
            "rollout.domains.a.max_new_tokens: 999 is above rollout.max_new_tokens, which is 256",
        ),
        (
            ["rollout.filter_mean_low=.5", "rollout.domains={a:{filter_mean_high:.4}}"],
            "rollout.domains.a.filter_mean_low: 0.5 must be below rollout.domains.a.filter_mean_high, which is 0.4",
        ),
        (["data.domain_interleave_probs={a:.5,b:.4}"], "data.domain_interleave_probs: the shares must add up to 1"),
        (["pipeline=sft", "sft.stop_score=.2"], "sft.stop_score: needs validation"),
        (
            ["rollout.max_staleness=0.01"],
            "rollout.max_staleness: 0.01 of 64 prompts is less than one, so nothing can be gen",
        ),
        (
            ["rollout.max_staleness=1", "deterministic=true"],
            "rollout.max_staleness: 1, but deterministic=true generates nothing",
        ),
        (
            ["rollout.max_staleness=1.001"],
            "rollout.max_staleness: 0.001 of 64 prompts is less than one, so nothing can be",
        ),
        (
            ["rollout.max_staleness=2", "rollout.max_generated_groups=64"],
            "rollout.max_generated_groups: 64 is less than the 192 that a step may start with max_staleness 2; use",
        ),
        (
            ["rollout.max_staleness=100"],
            "rollout.max_staleness: 100, but with max_steps=100 no staleness can be above 99; use at",
        ),
        (
            ["rollout.max_staleness=.5", "max_steps=1"],
            "rollout.max_staleness: 0.5, but with max_steps=1 no staleness can be above 0",
        ),
        (
            ["rollout.max_staleness=1.5", "max_steps=2"],
            "rollout.max_staleness: 1.5, but with max_steps=2 no staleness can be above",
        ),
        (
            ["rollout.extra_prompts=400", "rollout.num_prompts=8"],
            "rollout.extra_prompts: with 400 a step always starts 408 groups, and rollout.max_generated_groups=null "
            "allows 20 x num_prompts = 160; use at most 152, or rollout.max_generated_groups=408",
        ),
        (
            ["deterministic=true", "rollout.restart_failed_episodes=true"],
            "rollout.restart_failed_episodes: true, but with deterministic=true generation cannot depend on",
        ),
        (
            ["deterministic=true", "+env.default.max_seconds=30"],
            "env.default.max_seconds: 30, but with deterministic=true no episode ends by the clock",
        ),
        (
            ["env=scripted", "+env.default.examples=2"],
            "env.default.examples: scripted has no expert (frozen_lake, sokoban, guess, tic_tac_toe, tools, webshop, "
            "swe have one); give dialogues by env.default.examples_path",
        ),
        (
            ["env=scripted", "+env.default.examples_path=shots.jsonl"],
            "env.default.examples_path: not read here, no examples are shown",
        ),
        (
            ["env=scripted", "+env.default.thinking=cut"],
            "env.default.thinking: cut, but an episode by trajectory keeps every token; use env.default.episode=steps",
        ),
        (
            ["+env.default.memory_mib=512"],
            "env.default.memory_mib: 512, but only episode processes have this limit; use env.",
        ),
        (
            ["deterministic=true", "rollout.extra_members=2"],
            "rollout.extra_members: 2, but deterministic=true waits for",
        ),
        (["rollout.filter_mean_low=1"], "rollout.filter_mean_low: 1, and scores are between 0 and 1, so every"),
        (["rollout.filter_mean_high=0"], "rollout.filter_mean_high: 0, and scores are between 0 and 1, so every"),
        (
            ["debug=fake", "fake.pass_rate=1", "rollout.filter_std=true"],
            "fake.pass_rate: 1 makes the rewards of a group equal, and rollout.filter_std rejects such groups",
        ),
        (
            ["debug=fake", "fake.pass_rate=0", "rollout.filter_mean_low=0"],
            "fake.pass_rate: 0 is the mean score of every group, and rollout.filter_mean_low=0 rejects it; use a share",
        ),
        (
            ["debug=fake", "fake.pass_rate=1", "rollout.filter_mean_high=1"],
            "fake.pass_rate: 1 is the mean score of every group, and rollout.filter_mean_high=1 rejects it; use a sha",
        ),
        (
            ["env=scripted", "env.default.timeout_s=300", "timeouts.command_s=60"],
            "env.default.timeout_s: 300 must be below timeouts.command_s, which is 60",
        ),
        (["rollout.extra_members=16384"], "rollout.extra_members: 16384 with group_size 8; use at most 16375"),
        (
            ["algorithm.loss_aggregation=seq-mean-token-sum-norm"],
            "algorithm.loss_aggregation: seq-mean-token-sum-norm divides by algorithm.loss_norm_tokens; give it",
        ),
        (
            ["algorithm.difficulty_mask=true", "algorithm.difficulty_low_threshold=1"],
            "algorithm.difficulty_low_threshold: 1 must be below difficulty_high_threshold, which is 0.95",
        ),
        (
            ["algorithm.correction=mask", "algorithm.correction_low=3"],
            "algorithm.correction_low: 3 must be below algorithm.correction_high, which is 2",
        ),
        (
            ["algorithm.correction=mask", "algorithm.correction_low=1.5"],
            "algorithm.correction_low: 1.5 drops responses of the weights that are trained, whose ratio is 1; use less",
        ),
        (
            ["algorithm.correction=mask", "algorithm.correction_low=.1", "algorithm.correction_high=.5"],
            "algorithm.correction_high: 0.5 drops responses of the weights that are trained, whose ratio is 1; use mo",
        ),
        (
            ["algorithm.correction=reject", "algorithm.correction_high=1"],
            "algorithm.correction_high: 1 drops responses of the weights that are trained, whose ratio is 1; use more",
        ),
        (
            ["algorithm.correction=truncate", "algorithm.rejection_level=token", "algorithm.rejection_high=1"],
            "algorithm.rejection_high: 1 drops responses of the weights that are trained, whose ratio is 1; use more",
        ),
        (
            ["algorithm.correction=truncate", "algorithm.rejection_level=token", "algorithm.rejection_low=2"],
            "algorithm.rejection_low: 2 must be below algorithm.rejection_high, which is 2",
        ),
        (
            ["algorithm.correction=truncate", "algorithm.rejection_level=sequence", "rollout.top_p=.99"],
            "algorithm.rejection_level: sequence multiplies the shares of probability that rollout.top_p=0.99 keeps",
        ),
        (
            ["algorithm.value_clip=.5"],
            "algorithm.value_clip: unknown key; did you mean critic.value_clip?",
        ),
        (
            ["algorithm.correction=truncate", "algorithm.correction_high=.5"],
            "algorithm.correction_high: 0.5 cuts responses of the weights that are trained, whose ratio is 1; use at",
        ),
        (
            ["algorithm.correction=truncate", "algorithm.correction_level=sequence", "rollout.top_p=.99"],
            "algorithm.correction_level: sequence multiplies the shares of probability that rollout.top_p=0.99 keeps",
        ),
        (
            [
                "algorithm.correction=mask",
                "algorithm.correction_level=sequence",
                "rollout.top_k=50",
                "rollout.min_p=.1",
            ],
            "algorithm.correction_level: sequence multiplies the shares of probability that rollout.top_k=50, "
            "rollout.min_p=0.1 keeps at each token, so long responses get almost no weight even at staleness 0; use "
            "token, turn or geometric, or rollout.top_k=0 rollout.min_p=0",
        ),
        (
            ["algorithm.ratio_to=generator", "algorithm.correction=truncate"],
            "algorithm.correction: truncate weights the loss by the ratio to the generator, which algorithm.ratio_to",
        ),
        (
            ["algorithm.ratio_to=generator", "rollout.top_p=.7"],
            "rollout.top_p: 0.7 lets ratios to the generator's log-probs, which are normalised over the tokens that "
            "sampling keeps, begin at 0.7, below the clip's 1 - algorithm.pg_clip_low = 0.8",
        ),
        (
            ["algorithm.ratio_to=generator", "algorithm.ratio_level=sequence", "rollout.top_k=50"],
            "algorithm.ratio_level: sequence multiplies the shares of probability that rollout.top_k=50 keeps",
        ),
        (
            ["algorithm.ratio_to=generator", "algorithm.ppo_epochs=2", "trainer.max_mismatch=.1"],
            "trainer.max_mismatch: with 2 optimizer steps a step, algorithm.ratio_to=generator computes no log-probs",
        ),
        (
            ["algorithm.kl_estimator=k3"],
            "algorithm.kl_estimator: there are two keys: algorithm.kl_reward_estimator (default k1) for the KL in the "
            "reward, algorithm.kl_loss_estimator (default k2) for the KL in the loss",
        ),
        (
            ["algorithm.kl_loss_coef=.1", "algorithm.kl_loss_estimator=k1"],
            "algorithm.kl_loss_estimator: expected abs, k2, k3 or k3_weighted (in the loss, the expected gradient of "
            "k1 is zero, so it would have no effect), got 'k1'",
        ),
        (["debug=train_only"], "load_rollouts: debug=train_only needs the run folder with the rollouts"),
        (["debug=fake", "pipeline=sft"], "debug: fake is for pipelines that generate and train; the sft pipeline does"),
        (
            ["debug=rollout_only", "algorithm.kl_reward_coef=.1"],
            "algorithm.kl_reward_coef: 0.1 needs log-probs, and debug=rollout_only computes none; use 0",
        ),
        (
            ["debug=fak"],
            "debug: expected 'none', 'rollout_only', 'train_only' or 'fake', got 'fak'; did you mean fake?",
        ),
        (["trainer.lr=inf"], "trainer.lr: expected a finite number"),
        (["rollout.top_p=0"], "rollout.top_p: expected at least 0.001, got 0"),
        (["data.train=[]"], "data.train: expected "),
        (["seed.x=1"], "seed: expected an integer"),
        (["+experiment=dmo"], "+experiment=dmo: no such experiment"),
        (["data.train=a=b"], "data.train=a=b: cannot be read"),
        (["run_name=${nope}"], "run_name: Interpolation key 'nope' not found"),
    ],
)
def test_impossible_values_and_combinations_are_refused(words: list[str], line: str) -> None:
    found = problems(*words)
    assert found[0].startswith(line), found
    assert all("\n" not in problem for problem in found)


def test_a_single_response_with_a_greedy_baseline_can_be_filtered_by_equal_rewards() -> None:
    words = ("algorithm=remax", "rollout.group_size=1", "rollout.filter_std=true")
    assert load(words).rollout.filter_std
    assert problems(*words, "rollout.filter_mean_high=.9")[0].startswith("rollout.filter_mean_high: a filter compares")


def test_recomputing_with_an_engine_without_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("rollout.max_staleness=1", "rollout.on_new_weights=recompute")
    assert load(words).rollout.on_new_weights == "recompute"
    monkeypatch.setitem(vars(GEN_ENGINES["native"]), "recompute", False)
    line = "rollout.on_new_weights: the native generator cannot recompute; use continue or restart"
    assert problems(*words)[0].startswith(line)


@pytest.mark.parametrize(
    "words",
    [
        ["rollout.max_staleness=99"],
        ["rollout.max_staleness=.5", "max_steps=2"],
        ["rollout.extra_prompts=152", "rollout.num_prompts=8"],
        ["rollout.top_k=2"],
        ["rollout.temperature=.01", "rollout.top_p=.001", "generator.native.block_tokens=4096", "trainer.eps=1"],
        ["eval_every=0"],
        ["eval_every=1", "data.val=task:add"],
        ["debug=fake", "fake.pass_rate=0", "rollout.filter_mean_high=1"],
        ["debug=fake", "fake.pass_rate=1", "rollout.filter_mean_low=0"],
        ["debug=fake", "fake.pass_rate=0", "rollout.filter_mean_low=0", "env=scripted"],  # the env computes rewards
        ["algorithm.correction=mask", "algorithm.correction_low=.99", "algorithm.correction_high=1.01"],
        ["algorithm.correction=truncate", "algorithm.correction_high=1"],
        ["algorithm.correction=truncate", "algorithm.correction_level=geometric", "rollout.top_p=.9"],
        ["algorithm.correction=truncate", "rollout.top_k=50"],
        ["algorithm.correction=reject", "algorithm.correction_level=turn", "algorithm.correction_low=.9"],
        ["algorithm.correction=truncate", "algorithm.correction_level=sequence"],
        ["algorithm.ratio_to=generator", "rollout.top_p=.8", "rollout.top_k=50", "trainer.max_mismatch=.1"],
        ["algorithm.ratio_to=generator", "algorithm=cispo", "rollout.top_p=.1"],
        ["algorithm.ratio_to=generator", "algorithm.ratio_level=sequence", "algorithm.num_mini_batches=2"],
        ["algorithm.correction=mask", "algorithm.rejection_level=geometric", "algorithm.rejection_low=.99"],
    ],
)
def test_extreme_but_valid_settings_are_allowed(words: list[str]) -> None:
    assert load(words)


@pytest.mark.parametrize(
    ("words", "correction"),
    [
        ([], "none"),
        (["rollout.max_staleness=4"], "truncate"),
        (["rollout.max_staleness=.5", "algorithm=gspo"], "truncate"),
        (["rollout.max_staleness=1", "algorithm=kimi", "algorithm.correction_high=3"], "truncate"),
        (["rollout.max_staleness=1", "algorithm.correction=none"], "none"),
        (["rollout.max_staleness=1", "algorithm.correction=mask"], "mask"),
        (["rollout.max_staleness=1", "algorithm.ratio_to=generator"], "none"),
        (["+experiment=rlvr_async", "~algorithm.correction", "~algorithm.correction_level"], "truncate"),
        (["+experiment=rlvr_7b_async", "~algorithm.correction"], "truncate"),
    ],
)
def test_asynchronous_rollouts_are_corrected_by_default(words: list[str], correction: str) -> None:
    config = load(words)
    assert config.algorithm.correction == correction
    stored = config.model_dump(mode="json")
    assert stored["algorithm"]["correction"] == correction and parse(stored) == config, "a run's folder says it"


def test_the_default_limit_of_groups_equals_the_schedulers() -> None:
    for rollout in ({"num_prompts": 3}, {"num_prompts": 3, "max_generated_groups": 7}):
        config = parse({"rollout": rollout})
        scheduler = RolloutScheduler(SchedulerConfig.of(config), {1: 4})
        scheduler.begin_step(0, config.rollout.num_prompts)
        assert scheduler.limit == config.rollout.most_generated_groups == rollout.get("max_generated_groups", 60)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["sft.batch_size=4"], "sft.batch_size: not read here, the pipeline is rlvr"),
        (["eval_every=1"], "eval_every: not read here, data.val is null, so there is nothing to evaluate on"),
        (
            ["pipeline=sft", "algorithm.ppo_epochs=2"],
            "algorithm.ppo_epochs: not read here, the sft pipeline has no algorithm",
        ),
        (
            ["pipeline=sft", "trainer.max_mismatch=.1"],
            "trainer.max_mismatch: not read here, sft does not train on",
        ),
        (
            ["debug=fake", "trainer.max_mismatch=.1"],
            "trainer.max_mismatch: not read here, debug=fake does not",
        ),
        (
            ["debug=rollout_only", "trainer.router_replay=true"],
            "trainer.router_replay: not read here, debug=rollout_only trains no model on rollouts",
        ),
        (["data.label_key=score"], "data.label_key: not read here, the rlvr pipeline does not learn from answers"),
        (["data.unusable_rows=drop"], "data.unusable_rows: not read here, the rlvr pipeline does not learn from"),
        (
            ["pipeline=sft", "data.chosen_key=a"],
            "data.chosen_key: not read here, the rows of the sft pipeline are answers",
        ),
        (["pipeline=sft", "rollout.group_size=4"], "rollout.group_size: not read here, the sft pipeline generates"),
        (
            ["algorithm=reinforce", "algorithm.std_normalize=true"],
            "algorithm.std_normalize: read only by algorithm=grpo and algorithm=gigpo",
        ),
        (
            ["algorithm.surrogate=topr", "algorithm.dual_clip=3"],
            "algorithm.dual_clip: not read here, surrogate is topr",
        ),
        (["algorithm.loss_norm_tokens=8"], "algorithm.loss_norm_tokens: not read here, loss_aggregation is token-mean"),
        (["algorithm.difficulty_low_threshold=.2"], "algorithm.difficulty_low_threshold: not read here, difficulty"),
        (["algorithm.kl_reward_estimator=k1"], "algorithm.kl_reward_estimator: not read here, kl_reward_coef is 0"),
        (
            ["algorithm.kl_reward_coef=.1", "algorithm.kl_loss_estimator=k3"],
            "algorithm.kl_loss_estimator: not read here, kl_loss_coef is 0",
        ),
        (["rollout.on_stale=cancel"], "rollout.on_stale: not read here, max_staleness is 0"),
        (["deterministic=true", "rollout.prompt_affinity=true"], "rollout.prompt_affinity: not read here, determini"),
        (
            ["deterministic=true", "rollout.speed_aware_routing=false"],
            "rollout.speed_aware_routing: not read here, deterministic=true distributes responses by their ids",
        ),
        (
            ["debug=rollout_only", "algorithm.correction=mask"],
            "algorithm.correction: not read here, debug=rollout_only",
        ),
        (
            ["debug=rollout_only", "algorithm.correction_high=3"],
            "algorithm.correction_high: not read here, debug=rollout_only does not train",
        ),
        (["algorithm.correction_high=3"], "algorithm.correction_high: not read here, correction is none"),
        (
            ["algorithm.ratio_to=generator", "rollout.max_staleness=1", "algorithm.correction_high=3"],
            "algorithm.correction_high: not read here, correction is none",
        ),
        (
            ["algorithm.ratio_to=generator", "algorithm.surrogate=vanilla"],
            "algorithm.ratio_to: not read here, surrogate is vanilla",
        ),
        (
            ["algorithm.correction=truncate", "algorithm.correction_low=.1"],
            "algorithm.correction_low: not read here, correction is truncate",
        ),
        (["algorithm.rejection_level=token"], "algorithm.rejection_level: not read here, correction is none"),
        (
            ["algorithm.correction=reject", "algorithm.rejection_level=token"],
            "algorithm.rejection_level: not read here, correction is reject",
        ),
        (
            ["algorithm.correction=mask", "algorithm.rejection_high=3"],
            "algorithm.rejection_high: not read here, rejection_level is null",
        ),
        (["model.path=m", "model.tiny.seed=1"], "model.tiny.seed: not read here, model.path is given"),
        (["eval.temperature=1"], "eval.temperature: not read here, data.val is null"),
        (["trainer.min_lr=1e-9"], "trainer.min_lr: not read here, the learning rate is constant"),
        (
            ["trainer.lr_schedule=linear", "trainer.lr_decay_steps=2"],
            "trainer.lr_decay_steps: not read here, the learning rate is linear",
        ),
        (["load_rollouts=runs/demo"], "load_rollouts: not read here, debug is none"),
        (["debug=fake", "load_rollouts=runs/demo"], "load_rollouts: not read here, debug is fake"),
        (["fake.decode_s=1"], "fake.decode_s: not read here, debug is none"),
        (["layout.trainer.min_ranks=2"], "layout.trainer.min_ranks: not read here"),
        (["layout.teacher.num_ranks=8"], "layout.teacher.num_ranks: not read here, the run has no teacher ranks"),
        (["layout.env={num_ranks: 4}"], "layout.env.num_ranks: not read here, the run has no env ranks"),
        (
            ["trainer.lora.rank=4", "algorithm.kl_loss_coef=.1", "layout.reference.num_ranks=2"],
            "layout.reference.num_ranks: not read here, the run has no reference ranks of its own: other ranks do its "
            "work",
        ),
        (["pipeline=sft", "layout.reward.min_ranks=2"], "layout.reward.min_ranks: not read here, the run has no"),
        (["layout.judge.num_ranks=2"], "layout.judge.num_ranks: not read here, no reward uses it"),
    ],
)
def test_a_key_that_nothing_reads_is_refused_if_the_user_set_it(words: list[str], line: str) -> None:
    found = problems(*words)
    assert len(found) == 1 and found[0].startswith(line), found


@pytest.mark.parametrize(
    "words",
    [
        ["+experiment=agentic_sokoban", "~env", "pipeline=rlvr"],  # whose recipe has ranks for its environment
        ["layout.env.num_ranks=null", "layout.env.colocate_with=trainer"],
        ["layout=disaggregated"],
        ["pipeline=evaluate", "data.val=task:add", "layout.trainer.num_ranks=4"],
        ["env=scripted", "layout.env.num_ranks=1"],
    ],
)
def test_a_layout_may_have_more_roles_than_the_run(words: list[str]) -> None:
    load(words)


def test_a_role_that_an_unreadable_value_would_need_is_not_missed() -> None:
    (line,) = problems("env.default.name=scriptd", "layout.env.num_ranks=4")
    assert line.startswith("env.default.name: expected")


@pytest.mark.parametrize(
    "key",
    ["teacher.endpoint.model", "teacher.path", "teacher.paths.math", "reference.path", "model.path", "critic.path"],
)
def test_an_empty_path_is_called_empty(key: str) -> None:
    assert problems(f"{key}=")[0].startswith(f"{key}: empty; give a value, or leave the key out (override '{key}='")


def test_train_only_reads_evaluation_keys_and_the_batch_size_of_rollout() -> None:
    alone, read = ["debug=train_only", "load_rollouts=runs/demo"], {"num_prompts", "group_size", "min_replicas"}
    read |= {"max_new_tokens", "temperature", "top_p", "top_k", "min_p", "stop"}
    keys = {key: "null" if info.default is None else info.default for key, info in RolloutConfig.model_fields.items()}
    keys["domains.a.filter_std"], keys["domains.a.max_new_tokens"] = "true", keys.pop("domains") or 4
    read.add("domains.a.max_new_tokens")
    lines = problems(*alone, *(f"rollout.{key}={value}" for key, value in keys.items()))
    found = [re.match(r"rollout\.([\w.]+): not read here, debug=train_only generates nothing", line) for line in lines]
    assert all(found), lines
    assert sorted(match[1] for match in found if match) == sorted(keys.keys() - read)


def test_unused_keys_of_an_experiment_do_not_conflict_with_the_command_line() -> None:
    assert load(["+experiment=demo", "pipeline=sft"]).algorithm.num_mini_batches == 4
    assert load(["+experiment=demo", "data.val=null"]).eval.num_prompts == 256
    assert load(["+experiment=rlvr_async", "debug=train_only", "load_rollouts=runs/demo"]).rollout.max_staleness == 1
    assert load(["+experiment=rlvr_async", "debug=rollout_only"]).algorithm.correction == "truncate"
    assert "algorithm.pg_clip_low: not read here" in problems("+experiment=demo_sft", "algorithm.pg_clip_low=.1")[0]


@pytest.mark.parametrize(
    "words",
    [
        ["debug=train_only", "load_rollouts=runs/demo", "max_steps=1"],
        ["debug=train_only", "load_rollouts=runs/demo", "deterministic=true"],
        ["debug=train_only", "load_rollouts=runs/demo", "rollout.top_k=1"],
        ["debug=rollout_only", "rollout.top_p=.9"],
        ["debug=rollout_only", "rollout.max_staleness=0"],
    ],
)
def test_a_debug_run_ignores_conflicts_of_keys_that_it_does_not_read(words: list[str]) -> None:
    """Otherwise the conflict could not be resolved: the conflicting keys may not be given either."""
    assert load(["+experiment=rlvr_async", *words]).debug in words[0]


def test_a_debug_run_has_a_different_default_folder() -> None:
    assert load(["+experiment=demo", "debug=fake"]).run_dir == "runs/demo_fake"
    assert load(["+experiment=demo", "debug=none"]).run_dir == "runs/demo"
    assert load(["debug=rollout_only", "run_name=mine"]).run_dir == "runs/mine"


def test_the_longest_sequence_includes_evaluation_and_turns() -> None:
    assert parse({"data": {"max_prompt_tokens": 10}, "rollout": {"max_new_tokens": 5}}).max_sequence_tokens == 15
    evaluated = {"data": {"max_prompt_tokens": 10, "val": "task:add"}, "eval": {"max_new_tokens": 30}}
    assert parse({**evaluated, "env": {"default": {"max_turns": 3}}}).max_sequence_tokens == 3 * (10 + 256)
    stepped = parse({**evaluated, "env": {"default": {"max_turns": 3, "episode": "steps"}}})
    assert (stepped.max_sequence_tokens, stepped.max_row_tokens) == (10 + 256, 3 * (10 + 256))
    assert parse({**evaluated, "rollout": {"max_new_tokens": 5}}).max_sequence_tokens == 10 + 30


def test_limits_of_the_schema_fit_into_sample_ids() -> None:
    most_attempts = 200
    assert (PATIENCE + 1) * most_attempts < MAX_ATTEMPTS  # dropped so often, and failed so often
    assert parse({"rollout": {"group_size": MAX_GROUP_SIZE, "max_attempts": most_attempts}}).rollout
    for key, limit in (("group_size", MAX_GROUP_SIZE), ("max_attempts", most_attempts)):
        with pytest.raises(ConfigError, match=f"rollout.{key}: expected at most {limit}"):
            parse({"rollout": {key: limit + 1}})
    assert parse({"eval": {"num_prompts": MAX_VALIDATION_ROWS}}).eval
    with pytest.raises(ConfigError, match=f"eval.num_prompts: expected at most {MAX_VALIDATION_ROWS}"):
        parse({"eval": {"num_prompts": MAX_VALIDATION_ROWS + 1}})


def test_unsupported_families_are_refused_only_if_the_native_generator_is_used() -> None:
    (problem,) = check_family(parse({}), "mamba", ("model", "path"))
    assert "the native generator supports qwen2, " in problem.text
    assert problem.text.endswith(", not mamba; generator.engine=vllm or sglang runs all models of its library")
    assert not list(check_family(parse({"pipeline": "sft"}), "mamba", ("model", "path")))  # nothing is generated


@pytest.mark.parametrize(
    ("cluster", "dtype"),
    [
        ({}, "float32"),
        ({"device": "cuda"}, "bfloat16"),
        ({"components": {"main": {"gpus_per_node": 4}}}, "bfloat16"),
        ({"components": {"main": {"gpus_per_node": "0"}}}, "float32"),
        ({"device": "cpu", "components": {"main": {"gpus_per_node": 4}}}, "float32"),
    ],
)
def test_gpus_compute_in_bfloat16_by_default(cluster: dict[str, Any], dtype: str) -> None:
    config = parse({"cluster": cluster, "trainer": {"lr": 1e-5}})
    assert (config.trainer.param_dtype, config.generator.dtype, config.model.dtype) == (dtype, dtype, "float32")
    said = parse({"cluster": cluster, "trainer": {"param_dtype": "float32"}, "generator": {"dtype": "float32"}})
    assert (said.trainer.param_dtype, said.generator.dtype) == ("float32", "float32")
    assert parse(config.model_dump(mode="json")) == config


def test_a_configuration_round_trips_through_its_file() -> None:
    config = load(["+experiment=demo", "algorithm=reinforce", "env=scripted", "trainer.betas=[.8,.9]"])
    again = parse(config.model_dump(mode="json"))
    assert again == config and isinstance(again.algorithm, Reinforce)


def test_every_key_is_documented() -> None:
    def undocumented(model: type) -> list[str]:
        return [name for name in model.model_fields if not meaning(model, name)]

    def below(model: type) -> set[type]:
        return {model}.union(*(below(inner) for inner in model.__subclasses__()))

    models = {model for model in below(Section) if model.__module__.startswith("hpcrl.")}
    assert {Config, GRPO} < models and len(models) > 25
    assert {model.__name__: names for model in models if (names := undocumented(model))} == {}


@settings(max_examples=10, deadline=None)
@given(st.sampled_from([key for key in known_keys() if "*" not in key]), st.integers(0, 10**6), st.data())
def test_a_misspelt_key_is_always_refused_and_named(key: tuple[str, ...], number: int, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(key[-1])))
    wrong = (*key[:-1], key[-1][:at] + "q" + key[-1][at:])
    if wrong[0] in groups() and len(wrong) == 1:
        return
    found = problems(f"{'.'.join(wrong)}={number}")
    assert any(line.startswith(".".join(wrong) + ": ") for line in found)


def test_config_imports_no_torch_and_composing_changes_no_folder(tmp_path: Path) -> None:
    code = (
        "import os, sys; from hpcrl.config import load; load(['+experiment=demo']);"
        "assert not os.listdir('.'), os.listdir('.');"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, timeout=60)


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("cluster.account=???", "cluster.account: '???' is a placeholder; give the value (override"),
        ("cluster.partition='<your partition>'", "cluster.partition: '<your partition>' is a placeholder"),
        ("model.path=/path/to/model", "model.path: '/path/to/model' is a placeholder"),
        ("trainer.lr=CHANGE_ME", "trainer.lr: 'CHANGE_ME' is a placeholder"),
        ("cluster.mounts=[/data,'<scratch>']", "cluster.mounts.1: '<scratch>' is a placeholder"),
        ("cluster.time=1h", "cluster.time: expected a wall time: MINUTES, HH:MM:SS or D-HH:MM:SS, got '1h'"),
        ("cluster.components={a: {memory: 5 GB}}", "cluster.components.a.memory: expected a memory size"),
        ("cluster.components={a: {gpu_type: h 100}}", "cluster.components.a.gpu_type: expected one word for sbatch"),
        (
            "cluster.components={a: {memory: 5G, roles: [trainer]}, b: {roles: [reward]}}",
            "cluster.components.b.memory: missing; Slurm would use the value of another component",
        ),
        (
            "cluster={name: slurm, time: '5', signal_lead_s: 300}",
            "cluster.signal_lead_s: 300 s is not below the job's time limit of 300 s; lower it",
        ),
        ("cluster=null", "cluster: expected a section of keys, got None"),
        ("cluster.components={A: {}}", "cluster.components.A: expected a name of lower-case letters"),
        ("cluster={container: pyxis, image: a b}", "cluster.image: expected a file or an image's address"),
        ("cluster={after: chain, num_links: 1000}", "cluster.num_links: expected at most 100"),
        ("cluster.threads_per_rank=100000", "cluster.threads_per_rank: expected at most 1024, got 100000"),
        ("layout.trainer.num_ranks=100000000", "layout.trainer.num_ranks: expected at most 65536, got 100000000"),
        ("reward.default.num_processes=100000", "reward.default.num_processes: expected at most 1024"),
        ("cluster.components={a: {gpu_type: h100}}", "cluster.components.a.gpu_type: not read here, the component"),
        ("pipeline=convert", "convert.source: set it to the run folder or the checkpoint"),
        ("cluster.account=<YOUR_ACCOUNT>", "cluster.account: '<YOUR_ACCOUNT>' is a placeholder; give the value"),
        (
            "model.path=<MODEL>",
            "model.path: '<MODEL>' is a placeholder; give the value (override 'model.path=<MODEL>')",
        ),
        (
            "cluster.sbatch_options.time=60",
            "cluster.sbatch_options: --time is set by hpcrl itself; use cluster",
        ),
        ("cluster.sbatch_options={tim: 60}", "cluster.sbatch_options: --tim is set by hpcrl itself; use"),
        (
            "cluster.sbatch_options=['--wait']",
            "cluster.sbatch_options: --wait is set by hpcrl itself (over",
        ),
        ("cluster.srun_options={export: NONE}", "cluster.srun_options: --export is set by hpcrl itself"),
        ("cluster.sbatch_options={N: 2}", "cluster.sbatch_options.N: expected the long name of an option"),
        ("cluster.sbatch_options=[a=1,a=2]", "cluster.sbatch_options=[a=1,a=2]: cannot be read"),
        ("cluster.sbatch_options=['a=1','a=2']", "cluster.sbatch_options: expected --a may be given only once"),
        ('cluster.sbatch_options={comment: "a\nb"}', "cluster.sbatch_options.comment: expected text on one line"),
    ],
)
def test_settings_that_slurm_or_the_site_would_refuse_are_one_line(word: str, line: str) -> None:
    (found,) = problems(word)
    assert found.startswith(line)


def test_only_a_whole_path_or_word_counts_as_a_placeholder() -> None:
    for real in ("/data/path/to/model", "~/path/to/model", "/data/exchange_metrics", "interchangeme"):
        assert load([f"model.path='{real}'"]).model.path == real
    for command in ("source /path/to/venv/bin/activate", "PATH=/path/to/bin", "PATH=$PATH:/path/to/bin"):
        (found,) = problems(f'cluster.prologue="{command}"')
        assert found.startswith(f"cluster.prologue: {command!r} is a placeholder")


@pytest.mark.parametrize(("typed", "name"), [("12e4567", "12e4567"), ("1e3", "1e3"), ("0x10", "0x10"), ("'q1'", "q1")])
def test_run_name_is_read_literally(typed: str, name: str) -> None:
    config = load([f"run_name={typed}"])
    assert (config.run_name, config.run_dir) == (name, f"runs/{name}")


def test_sbatch_options_are_read_literally() -> None:
    words = ["partition=low,high", "time=60", "exclude=n[1-4],m2", "constraint=a100|h100", "components.x.partition=a,b"]
    cluster = load([f"cluster.{word}" for word in words]).cluster
    assert (cluster.partition, cluster.time, cluster.time_s) == ("low,high", "60", 3600)
    assert (cluster.exclude, cluster.constraint) == ("n[1-4],m2", "a100|h100")
    assert cluster.components["x"].partition == "a,b"
    cluster = load(["cluster.partition='low,high'", 'cluster.time="90"', "cluster.account=null"]).cluster
    assert (cluster.partition, cluster.time, cluster.account) == ("low,high", "90", None), "as before, in quotes"


def test_extra_options_can_be_a_mapping_or_a_list() -> None:
    listed = load(["cluster.sbatch_options=['--exclusive','licenses=fs:1','--gpus-per-node=1']"]).cluster
    mapped = load(["cluster.sbatch_options={exclusive: true, licenses: 'fs:1', gpus-per-node: 1}"]).cluster
    assert listed == mapped
    assert mapped.sbatch_options == {"exclusive": True, "licenses": "fs:1", "gpus-per-node": "1"}
    assert parse(load(["cluster.sbatch_options.exclusive=true"]).model_dump(mode="json")).cluster.sbatch_options


def test_text_for_the_model_may_resemble_a_placeholder() -> None:
    assert load(["rollout.stop=['<answer>']", "data.system_prompt='<think>'"]).rollout.stop == ["<answer>"]


def test_an_edited_conf_file_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep or a user's script may compose more than once in a process."""
    folder = tmp_path / "conf"
    shutil.copytree(conf_dir(), folder)
    monkeypatch.setattr("hpcrl.config.folders.conf_dir", lambda: folder)
    for steps in (5, 77):
        (folder / "experiment/mine.yaml").write_text(f"# @package _global_\nmax_steps: {steps}\n")
        assert load(["+experiment=mine"]).max_steps == steps


def test_max_sequence_tokens_replaces_the_product_of_full_turns() -> None:
    data = {"data": {"max_prompt_tokens": 8000}, "rollout": {"max_new_tokens": 2000}}
    data |= {"model": {"tiny": {"max_position_embeddings": 500_000}}}
    plain = parse(data | {"env": {"default": {"max_turns": 50}}})
    limited = parse(data | {"env": {"default": {"max_turns": 50, "max_sequence_tokens": 32000}}})
    short = parse(data | {"env": {"default": {"max_turns": 2, "max_sequence_tokens": 32000}}})
    assert [plain.max_sequence_tokens, plain.max_row_tokens] == [500_000, 500_000]
    assert [limited.max_sequence_tokens, limited.max_row_tokens] == [32000, 32000]
    assert short.max_sequence_tokens == 20_000
    env = {"a": {"max_turns": 50, "max_sequence_tokens": 32000}, "b": {"max_turns": 3, "episode": "steps"}}
    both = parse(data | {"env": env})
    assert (both.max_sequence_tokens, both.max_row_tokens) == (32000, 32000)
    assert list(check_length(limited, 32000, "limit")) == [] and list(check_length(plain, 32000, "limit")) != []


@pytest.mark.parametrize(
    "kind", ["algorithm.advantage_estimator", "pipeline", "trainer.engine", "generator.engine", "trackers"]
)
@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("leaves:SPEC", "leaves:SPEC cannot be loaded: SystemExit: 5"),
        ("nowhere:SPEC", "nowhere:SPEC cannot be loaded: ModuleNotFoundError: No module named 'nowhere'"),
        ("json:dumps", "json:dumps is not a"),
    ],
)
def test_a_part_that_cannot_be_loaded_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, path: str, why: str
) -> None:
    (tmp_path / "leaves.py").write_text("raise SystemExit(5)")
    monkeypatch.syspath_prepend(tmp_path)
    (line,) = problems(f"{kind}=[{path}]" if kind == "trackers" else f"{kind}={path}")
    assert line.startswith(kind) and why in line and "(override '" in line and "expected" not in line


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run_name=x${y}"], ["run_name: Interpolation key 'y' not found"]),
        (["trainer={lr: ${zz}}", "seed=${trainer.lr}"], ["trainer.lr: Interpolation key 'zz'", "seed: Interpolation"]),
        (["rollout.stop=[a,'${y}']"], ["rollout.stop: Interpolation key 'y' not found"]),
        (["trainer.lr=${foo:1}"], ["trainer.lr: Unsupported interpolation type foo"]),
    ],
)
def test_a_failing_interpolation_names_its_override(words: list[str], said: list[str]) -> None:
    found = problems(*words)
    assert len(found) == len(said)
    for line in found:
        assert any(line.startswith(start) for start in said) and "; as text, ${ is written \\${ (override " in line
    assert load(["run_name=x${seed}", "seed=3"]).run_name == "x3"
    assert load(["data.system_prompt='\\${y}'"]).data.system_prompt == "${y}"


def test_a_preset_name_is_not_an_estimator_name() -> None:
    (line,) = problems("algorithm.advantage_estimator=ppo")
    assert line.endswith("got 'ppo'; ppo is a preset: algorithm=ppo (override 'algorithm.advantage_estimator=ppo')")


@pytest.mark.parametrize("name", groups()["algorithm"])
def test_the_plan_names_the_preset(name: str) -> None:
    models = ["model.path=a", "teacher.path=b"] if name == "distill" else []
    config = load([f"algorithm={name}", "rollout.max_new_tokens=256", *models])
    assert preset_of(config) == name
    assert preset_of(load(["algorithm=dapo", "algorithm.pg_clip_high=.5"])) == "grpo", "negative control"


# -- renamed keys


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_a_renamed_key_is_refused_with_its_new_name(old: str, new: str) -> None:
    assert tuple(new.split(".")) in known_keys()
    if "*" not in old:
        assert any(line.startswith(f"{old}: unknown key; it is now {new} (") for line in problems(f"{old}=1"))


def test_a_renamed_pipeline_is_refused_with_its_new_name() -> None:
    (line,) = problems("pipeline=rlvr_vl")
    assert line.startswith("pipeline: rlvr_vl is now rlvr, for rows with and without images (")


def test_a_renamed_key_in_a_list_is_refused_with_its_position() -> None:
    (line,) = problems("data.train=[task:add,{path:task:add,tag:sums}]")
    assert line.startswith("data.train.1.tag: unknown key; it is now data.train.1.domain (")


def test_stored_configurations_get_the_new_key_names() -> None:
    stored = {
        "rollouts": "runs/a",
        "rollout": {"max_lag": 1, "top_k": 0},
        "data": {"train": [{"path": "task:add", "tag": "sums"}, "task:add"], "val": "task:add"},
        "env": {"game": {"options": {"tag": "answer"}}},
    }
    assert with_new_names(stored) == {
        "load_rollouts": "runs/a",
        "rollout": {"max_staleness": 1, "top_k": 0},
        "data": {"train": [{"path": "task:add", "domain": "sums"}, "task:add"], "val": "task:add"},
        "env": {"game": {"options": {"tag": "answer"}}},
    }
    arguments = [
        "+rollout.max_lag=rollout.max_lag",
        "~judge.max_slots",
        "rollouts=a=b",
        "--config=a",
    ]
    assert arguments_with_new_names(arguments) == (
        "+rollout.max_staleness=rollout.max_lag", "~judge.max_num_seqs", "load_rollouts=a=b", "--config=a",
    )  # fmt: skip
    assert with_new_keys({"generator.native": {"kv_bucket": 16}, "judge.max_slots": 2, "trainer ranks": [0]}) == {
        "generator.native": {"block_tokens": 16}, "judge.max_num_seqs": 2, "trainer ranks": [0],
    }  # fmt: skip
