"""Requirements of a critic on the configuration: refused before the start, and counted in the plan."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import ConfigError, TinyModel, load, parse
from hpcrl.engines.tiny import make_tiny_model
from hpcrl.launch.prepare import prepare
from hpcrl.models.families import read_shape
from hpcrl.planner.memory import memory
from hpcrl.planner.memory_parts import PHASES
from hpcrl.planner.trainer import checkpoint_bytes, critic_checkpoint_bytes, critic_parts, critic_shape, trainer_parts

PPO = "algorithm=ppo"
OWN = ["layout.critic.colocate_with=null", "layout.critic.num_ranks=2"]


def refused(*words: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        RoleLayout.from_config(load(words))
    return caught.value.problems


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["critic.lr=1e-4"], "critic.lr: not read here, grpo has no critic"),
        (["pipeline=sft", "critic.path=x"], "critic.path: not read here, sft has no critic"),
        ([PPO, "critic.min_lr=1e-6"], "critic.min_lr: not read here, the learning rate is constant"),
        ([PPO, "critic.engine=fake"], "critic.engine: expected fsdp2 or megatron or deepspeed, got 'fake'"),
        (
            [PPO, "critic.warmup_steps=5", "max_steps=5"],
            "critic.warmup_steps: 5 of max_steps=5 leaves no step that trains",
        ),
        (
            [PPO, "debug=rollout_only"],
            "algorithm.advantage_estimator: gae needs values, and debug=rollout_only has no critic",
        ),
        (
            [PPO, "critic.lr=1e-5", "critic.lr_schedule=cosine", "critic.min_lr=1e-4"],
            "critic.min_lr: 0.0001 is above critic.lr, which is 1e-05",
        ),
        (
            [PPO, "trainer.fsdp2.tensor_parallel=2", OWN[0], "layout.critic.num_ranks=3"],
            "= 2 ranks, and the layout gives 3, which is not a multiple of it (layout.critic)",
        ),
        (
            [PPO, "trainer.engine=megatron", "trainer.megatron.tensor_parallel=2", "critic.engine=fsdp2"],
            "critic.engine: fsdp2 divides 2 ranks into 2 group(s) with the same rows, and the trainer on these ranks "
            "divides them differently; give the critic separate ranks: layout.critic.colocate_with=null layout",
        ),
        ([PPO, "algorithm.cliprange_value=0.2"], "algorithm.cliprange_value: unknown key; here critic.value_clip"),
        (["algorithm=grpo", "algorithm.lam=0.9"], "algorithm.lam: unknown key; here algorithm.lambd"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_settings_are_refused_in_one_line(words: list[str], expected: str) -> None:
    (line,) = refused(*words)
    assert expected in line


def test_a_critic_on_another_engine_reads_that_engines_section() -> None:
    words = [PPO, "trainer.engine=megatron", "critic.engine=fsdp2", "trainer.fsdp2.activation_checkpointing=true"]
    config = load([*words, "trainer.megatron.recompute=full", "critic.lr=3e-5", "critic.lr_warmup_steps=7"])
    own = config.of_critic()
    assert (own.trainer.engine, own.trainer.lr, own.trainer.lr_warmup_steps) == ("fsdp2", 3e-5, 7)
    assert (config.trainer.engine, config.trainer.lr, config.trainer.lr_warmup_steps) == ("megatron", 1e-6, 0)
    assert refused("algorithm=grpo", "trainer.engine=megatron", "trainer.fsdp2.activation_checkpointing=true")
    whole = load([PPO, "trainer.lora.rank=4", "trainer.lora.alpha=8"])
    assert whole.lora is not None and whole.of_critic().lora is None


def test_a_run_without_a_critic_has_no_critic_ranks() -> None:
    assert RoleLayout.from_config(load([])).ranks["critic"] == ()
    assert refused(*OWN)[0].startswith("layout.critic.num_ranks: not read here, the run has no critic ranks")
    assert RoleLayout.from_config(load([PPO, *OWN])).ranks["critic"] == (3, 4)
    colocated = RoleLayout.from_config(load([PPO]))
    assert colocated.ranks["critic"] == colocated.ranks["trainer"] == (1, 2)
    assert parse({"critic": {"warmup_steps": 3}}).policy_waits == 0
    assert parse({"algorithm": {"advantage_estimator": "gae"}, "critic": {"warmup_steps": 3}}).policy_waits == 3


def test_the_plan_counts_a_second_model_without_logits() -> None:
    config = load([PPO, *OWN, "cluster.device=cuda", "model.tiny.tie_word_embeddings=false", "trainer.lora.rank=2"])
    layout, shape = RoleLayout.from_config(config), read_shape(config.model.tiny.hf_config())
    critic = critic_shape(config, shape)
    matrix = shape.vocab_size * shape.hidden_size
    assert critic.num_parameters == shape.num_parameters - matrix + shape.hidden_size + 1
    own = config.of_critic()
    as_trainer = {part.name: part for part in trainer_parts(own, critic, 2) if part.during == PHASES}
    parts = critic_parts(config, shape, 2)
    assert {part.name for part in parts if part.during == PHASES} == as_trainer.keys() >= {"weights", "optimizer"}
    assert {part.role for part in parts} == {"critic"} and "logits" not in {part.name for part in parts}
    assert {phase for part in parts for phase in part.during if part.during != PHASES} == {"critic", "critic_update"}
    kinds = {kind.roles: kind for kind in memory(config, layout, shape)}
    assert kinds[("critic",)].ranks == (3, 4)
    assert kinds[("critic",)].total("critic") > kinds[("critic",)].total("generate") > 0
    full = 2 * 4 * critic.num_parameters
    assert 0 <= critic_checkpoint_bytes(config, shape) - (full + 4 * critic.num_parameters) < 1000
    assert critic_checkpoint_bytes(config, shape) > checkpoint_bytes(config, shape)  # only of adapters


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_model(TinyModel(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=16), made)
    return made


def test_a_damaged_critic_folder_is_named(folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"prompt": "1+1", "answer": "2"}\n')
    words = [PPO, f"data.train={data}", "reward.default.name=exact_match", f"run_dir={tmp_path / 'run'}"]
    words += ["data.max_prompt_tokens=32", "rollout.max_new_tokens=4", f"model.path={folder}", "rollout.num_prompts=1"]

    def problems(path: Path) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            prepare([*words, f"critic.path={path}"])
        return caught.value.problems

    (line,) = problems(tmp_path / "none")
    assert line.startswith(f"critic.path: no folder {tmp_path / 'none'}")
    small = tmp_path / "small"
    sizes = {"num_heads": 2, "num_kv_heads": 1, "intermediate_size": 16}
    make_tiny_model(TinyModel(hidden_size=16, num_layers=1, vocab_size=300, **sizes), small)
    (line,) = problems(small)
    assert "has 300 tokens, the policy's model 320; give a model with the same tokenizer" in line
    critic = tmp_path / "critic"  # as exported, without a tokenizer and with another head
    critic.mkdir()
    weights = load_file(folder / "model.safetensors")
    body = {name: tensor for name, tensor in weights.items() if not name.startswith("lm_head")}
    save_file(body | {"score.weight": weights["model.norm.weight"][None].clone()}, critic / "model.safetensors")
    text = (folder / "config.json").read_text().replace('"tie_word_embeddings": true', '"tie_word_embeddings": false')
    (critic / "config.json").write_text(text)
    config, *_ = prepare([*words, f"critic.path={critic}"])
    assert config.critic.path == str(critic)
    save_file(body | {"score.weight": weights["model.norm.weight"][:8][None].clone()}, critic / "model.safetensors")
    (line,) = problems(critic)
    assert line.startswith(f"critic.path: {critic}: score.weight has shape [1, 8], config.json requires [1, 16]")
