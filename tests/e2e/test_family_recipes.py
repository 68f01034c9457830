"""The recipes of other families, small: their own keys with a tiny model of the family, on two ranks."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hpcrl.config import TinyModel
from hpcrl.engines.tiny import make_tiny_model
from hpcrl.metrics.log import read_metrics
from hpcrl.system.exit_codes import ExitCode
from tests.conftest import ROOT
from tests.e2e.program import Start
from tests.engines.worlds import make_model_folder
from tests.vlm_families import make_small

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not find_spec("megatron"), reason="megatron-core is not installed (extra: megatron)"),
    pytest.mark.skipif(not find_spec("vllm"), reason="vllm is not installed (extra: vllm)"),
]

SMALL = """
cluster.device=cpu ~cluster.components cluster.threads_per_rank=1 cluster.oversubscribe=true layout.trainer.num_ranks=2
model.dtype=float32 data.train=task:sort_digits data.val=null ~data.domain_interleave_probs data.max_prompt_tokens=64
eval_every=0 trainer.param_dtype=float32 trainer.head_dtype=null trainer.max_tokens_per_micro_batch=512
trainer.lr_warmup_steps=0 trainer.lr=1e-3 max_steps=2 save_every=0
reward.default.name=regex generator.max_num_seqs=8 rollout.num_prompts=4
rollout.group_size=4 rollout.max_new_tokens=8 rollout.extra_prompts=0 rollout.filter_mean_low=null
rollout.filter_mean_high=null layout.generator.num_ranks=2 layout.generator.tensor_parallel=1 layout.reward.num_ranks=1
""".split()  # noqa: SIM905
LETTER = "reward.default.options={pattern: '[a-z]'}"
"""About every second response has one."""
TEXT: dict[str, Any] = {"vocab_size": 512, "hidden_size": 64, "num_attention_heads": 2, "tie_word_embeddings": False}
GATED: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2], "partial_rotary_factor": 0.5}
    | {"rope_theta": 1e4, "mrope_interleaved": True},
}
"""Sizes for which vLLM has kernels on a CPU."""


class Twin(NamedTuple):
    """A tiny model of a recipe's family, the keys that two ranks need, and the largest mean difference between trainer
    and generator in log-probs. vLLM, the generator of all recipes, takes half a minute to start: one twin has it."""

    family: str
    sizes: dict[str, Any]
    words: str
    difference: float = 1e-5


MEGATRON = "trainer.megatron.expert_parallel=2 trainer.megatron.pipeline_parallel=1 trainer.megatron.virtual_pipeline=1"
NATIVE = "generator.engine=native generator.dtype=float32 generator.head_dtype=null"
TWINS = {
    "rlvr_qwen3_5_9b": Twin("qwen3_5", GATED, "trainer.fsdp2.replicas=1", 1e-3),
    "rlvr_glm4_5_air": Twin(
        "glm4_moe",
        TEXT | {"num_key_value_heads": 2, "head_dim": 32, "moe_intermediate_size": 32, "attention_bias": True},
        f"{MEGATRON} trainer.megatron.tensor_parallel=2 {NATIVE}",
    ),
    "rlvr_gpt_oss_20b": Twin(
        "gpt_oss", TEXT | {"num_key_value_heads": 2, "head_dim": 32}, f"trainer.megatron.expert_parallel=2 {NATIVE}"
    ),
    "rlvr_deepseek_v3": Twin(
        "deepseek_v3",
        TEXT | {"num_hidden_layers": 3, "num_key_value_heads": 2},
        "trainer.megatron.expert_parallel=1 trainer.megatron.tensor_parallel=1 trainer.megatron.pipeline_parallel=2 "
        "trainer.megatron.sequence_parallel=false trainer.megatron.num_layers_in_first_pipeline_stage=2 "
        f"trainer.megatron.num_layers_in_last_pipeline_stage=1 {NATIVE}",
    ),
}


def make_twin(twin: Twin, folder: Path) -> Path:
    if twin.family == "qwen3_5":
        return make_small("qwen3_5", folder, text_config=twin.sizes)
    make_tiny_model(TinyModel(), folder)  # its tokenizer
    return make_model_folder(twin.family, folder, **twin.sizes)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", TWINS)
def test_a_tiny_twin_learns_with_the_keys_of_its_recipe(recipe: str, tmp_path: Path) -> None:
    twin = TWINS[recipe]
    model = make_twin(twin, tmp_path / "model")
    words = [f"+experiment={recipe}", *SMALL, LETTER, *twin.words.split(), f"model.path={model}"]
    paths = [str(ROOT), *([] if find_spec("torchvision") else [str(ROOT / "tests" / "vllm_cpu")])]
    start = Start(tmp_path / "run", words, {"PYTHONPATH": os.pathsep.join(paths)})
    assert start.wait(250.0) == ExitCode.DONE, start.text
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows][-1] == 2
    assert any((row["actor/grad_norm"] or 0.0) > 0 for row in rows[1:])
    assert all((row["mismatch/diff/mean"] or 0.0) < twin.difference for row in rows[1:])
