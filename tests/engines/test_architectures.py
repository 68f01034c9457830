"""Every causal language model of transformers, tiny: trained as transformers has it, packed or row by row, or refused
with a reason before weights are read."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engines.architectures import UNMADE, make_folder
from tests.engines.expected import EXPECTED, SAMPLE

pytestmark = [pytest.mark.numerics, pytest.mark.timeout(600)]

LENGTHS = (9, 41, 7, 60, 33)
"""Of rows, two of which are longer than every window, chunk and choice of keys of these models."""
AT = ("model", "path")
SETTINGS: dict[str, Any] = {
    "lr": 1e-2, "weight_decay": 0.3, "eps": 1e-2, "max_grad_norm": 1e9, "logits_chunk_tokens": 16,
}  # fmt: skip


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root, made = tmp_path_factory.mktemp("architectures"), dict[str, Path]()

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = make_folder(family, root / family)
        return made[family]

    return folder


def start_problems(folder: Path, trainer: dict[str, Any] | None = None) -> list[str]:
    """Reasons to refuse a start, except for the tokenizer that these folders lack."""
    from hpcrl.config import parse
    from hpcrl.config.abilities import check_trainable
    from hpcrl.launch.model_folder import NO_TOKENIZER, inspect_model

    found = inspect_model(folder)
    config = parse({"trainer": trainer or {}})
    problems = [*found.problems, *(problem.text for problem in check_trainable(config, found.config, AT))]
    return [text for text in problems if NO_TOKENIZER not in text]


def engine(folder: Path, **own: Any) -> Any:
    import torch

    from hpcrl.config import TrainerConfig
    from hpcrl.engines.train.fsdp2.engine import FSDP2Engine
    from hpcrl.engines.train.fsdp2.spec import FSDP2Config

    settings = TrainerConfig(**SETTINGS)
    return FSDP2Engine(settings, folder, own=FSDP2Config(**own), dtype=torch.float32, total_steps=3)


def of_deepspeed(folder: Path) -> Any:
    import torch

    from hpcrl.config import TrainerConfig
    from hpcrl.engines.train.deepspeed.engine import ZeroEngine

    return ZeroEngine(TrainerConfig(**SETTINGS), folder, dtype=torch.float32, total_steps=3)


OF_DEEPSPEED = ("doge", "cohere", "gemma3", "lfm2")
"""Row by row, packed, with a tower that takes no part, with convolutions that their layers compute."""
ENGINES: dict[str, Callable[[Path], Any]] = {"fsdp2": engine, "deepspeed": of_deepspeed}


def step_of_torch(folder: Path, batch: Any) -> tuple[Any, dict[str, Any]]:
    """(log-probs of the batch, one row at a time, and weights after a step of torch's AdamW, by name) of transformers'
    model."""
    import torch
    from transformers import AutoModelForCausalLM

    from hpcrl.algorithms.interface import Outputs
    from tests.engines.worlds import Weighted, norms_of

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    rows = []
    for tokens in batch.token_ids.split(batch.lengths.tolist()):
        log_p = model(tokens[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
        rows.append(torch.cat([log_p.new_zeros(1), log_p.gather(1, tokens[1:, None])[:, 0]]))
    found = torch.cat(rows) * batch.loss_mask
    Weighted().loss(Outputs(found, None), batch, norms_of(batch))[0].backward()
    decayed = {n: p.ndim >= 2 and not n.endswith("bias") for n, p in model.named_parameters()}
    groups = [
        {"params": [p for n, p in model.named_parameters() if decayed[n]], "weight_decay": SETTINGS["weight_decay"]},
        {"params": [p for n, p in model.named_parameters() if not decayed[n]], "weight_decay": 0.0},
    ]
    torch.optim.AdamW(groups, lr=SETTINGS["lr"], eps=SETTINGS["eps"]).step()
    return found.detach(), {name: p.detach() for name, p in model.named_parameters()}


def check_weights(found: dict[str, Any], after: dict[str, Any]) -> None:
    for name, weight in found.items():
        if name not in after:  # a buffer
            continue
        # A part of the learning rate: what rounding makes of gradients beside eps.
        far = (weight - after[name]).abs() - 1e-5 * after[name].abs()
        assert far.max() <= 2e-2 * SETTINGS["lr"], name


def log_prob_limit(family: str) -> float:
    return 1e-4 if family == "longcat_flash" else 5e-5  # 8.7e-5 at one token, with AVX2 and on an EPYC with AVX-512


def check_steps(outcomes: list[Any], folder: Path, batch: Any) -> None:
    """The ranks' outcomes of outcomes_of_two_ranks()."""
    want, after = step_of_torch(folder, batch)
    for log_p, weights in outcomes:
        assert (log_p - want).abs().max() < log_prob_limit(folder.name), folder.name
        assert after.keys() <= weights.keys()
        check_weights(weights, after)


def check(family: str, folder: Path, out: Path, using: str = "fsdp2") -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from tests.engines.worlds import Weighted, make_batch, norms_of

    expected = EXPECTED[family]
    at_start = start_problems(folder, {"engine": using})
    if expected.startswith("start: "):
        assert any(re.search(expected.removeprefix("start: "), text) for text in at_start), at_start
        return
    assert at_start == []
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if expected not in ("packed", "rows"):
            with pytest.raises(ValueError, match=expected) as refusal:
                ENGINES[using](folder)
            assert str(refusal.value).startswith("model.path ") and "\n" not in str(refusal.value)
            return
        trainer = ENGINES[using](folder)
    assert trainer.packing == (expected == "packed")
    assert any("one sequence at a time" in str(one.message) for one in said) == (expected == "rows")
    batch = make_batch(LENGTHS)
    want, after = step_of_torch(folder, batch)
    everything = [list(range(len(LENGTHS)))]
    assert (trainer.logprobs(batch, everything, 1.0) - want).abs().max() < log_prob_limit(family)
    trainer.train_step(batch, everything, Weighted(), norms_of(batch))
    trainer.export_hf(out)
    exported = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    check_weights(dict(exported.named_parameters()), after)


@pytest.mark.slow
@pytest.mark.parametrize("family", SAMPLE)
def test_a_family_is_trained_like_transformers_or_refused(
    family: str, folder_of: Callable[[str], Path], world_of_one: None, tmp_path: Path
) -> None:
    check(family, folder_of(family), tmp_path / "hf")


@pytest.mark.soak
@pytest.mark.parametrize("family", sorted(EXPECTED.keys() - set(SAMPLE)))
def test_every_other_family_is_trained_like_transformers_or_refused(
    family: str, folder_of: Callable[[str], Path], world_of_one: None, tmp_path: Path
) -> None:
    check(family, folder_of(family), tmp_path / "hf")


@pytest.mark.slow
@pytest.mark.parametrize("family", OF_DEEPSPEED)
def test_deepspeed_trains_a_family_like_transformers_or_refuses_it(
    family: str, folder_of: Callable[[str], Path], world_of_one: None, tmp_path: Path
) -> None:
    pytest.importorskip("deepspeed")
    check(family, folder_of(family), tmp_path / "hf", "deepspeed")


@pytest.mark.soak
@pytest.mark.parametrize("family", sorted(EXPECTED.keys() - set(OF_DEEPSPEED)))
def test_deepspeed_trains_every_family_like_transformers_or_refuses_it(
    family: str, folder_of: Callable[[str], Path], world_of_one: None, tmp_path: Path
) -> None:
    check(family, folder_of(family), tmp_path / "hf", "deepspeed")


def test_no_family_of_transformers_is_missing_in_the_table() -> None:
    """The families of the tested version; a newer version may have more."""
    from importlib.metadata import version

    from hpcrl.models.transformers_models import causal_families

    if version("transformers") != "5.19.0":
        pytest.skip("the table is of transformers 5.19.0")
    assert EXPECTED.keys() | UNMADE.keys() == causal_families()
    assert not EXPECTED.keys() & UNMADE.keys()
    assert len(EXPECTED) > 150 and set(SAMPLE) <= EXPECTED.keys()


# ---- ranks that divide rows

TENSOR, CONTEXT = {"tensor_parallel": 2}, {"context_parallel": 2}
SPLITS: dict[tuple[str, str], str] = {
    ("gpt_oss", "tensor"): "",  # attention sinks, and experts with biases
    ("deepseek_v3", "tensor"): "",  # latent attention
    ("olmo2", "tensor"): "",  # norms over all heads
    ("phi3", "tensor"): "",  # fused matrices
    ("qwen2_moe", "tensor"): "",  # a shared expert, and experts that transformers' plan lacks
    ("gemma3", "context"): "",  # a folder with a vision tower
    ("gpt_oss", "context"): "",  # attention sinks
    ("llama4", "context"): "",  # chunks, and layers that count positions from a cache
    ("phimoe", "context"): "",  # windows that the mask alone defines
    ("minimax_m3_vl_text", "context"): "",  # keys selected by an indexer
    ("glm_moe_dsa", "tensor"): "",  # the same, also for the next layer
    ("falcon", "context"): "",  # attention that runs row by row
    ("nemotron", "tensor"): "",  # layers that pass no layout on
    ("bloom", "context"): "needs a model that can be packed; bloom cannot: alibi adds a token's place",
    ("minimax", "tensor"): "",
    ("nemotron_h", "context"): "",
    ("nemotron_h", "tensor"): "",  # every part of a layer is called mixer
    ("granitemoehybrid", "tensor"): "",  # fused matrices of a shared expert
    ("lfm2_moe", "tensor"): "",  # w1, w2 and w3
    ("mamba2", "context"): "",  # no attention heads
    ("mamba2", "tensor"): "mamba2 cannot be split: all of its matrices are in recurrent mixers, which stay whole",
    ("gpt2", "tensor"): "gpt2 cannot be split: transformers has no plan for it, and its matrices have other names",
}
"""(family, what is divided) -> why the ranks refuse; empty: they compute what transformers does."""


def outcomes_of_two_ranks(folders: dict[str, Path], asked: list[tuple[str, str]]) -> dict[tuple[str, str], Any]:
    """For each (family, what is divided) the log-probs and the weights after a step, or the refusal."""
    import torch

    from tests.engines.worlds import Weighted, make_batch, norms_of

    batch, everything = make_batch(LENGTHS), [list(range(len(LENGTHS)))]
    found: dict[tuple[str, str], Any] = {}
    for family, what in asked:
        try:
            trainer = engine(folders[family], **{"tensor": TENSOR, "context": CONTEXT}[what])
            log_p = trainer.logprobs(batch, everything, 1.0)
            trainer.train_step(batch, everything, Weighted(), norms_of(batch))
            weights = {name: trainer.weights.full_tensor(name, torch.float32) for name in trainer.weights.names}
            found[family, what] = log_p, weights
        except ValueError as error:
            found[family, what] = str(error)
    return found


@pytest.mark.slow
def test_ranks_divide_the_rows_of_a_family_or_all_refuse_it(folder_of: Callable[[str], Path]) -> None:
    from tests.engines.worlds import make_batch, run_ranks

    folders = {family: folder_of(family) for family, _ in SPLITS}
    batch = make_batch(LENGTHS)
    results = run_ranks(2, outcomes_of_two_ranks, folders, list(SPLITS))
    for (family, what), refusal in SPLITS.items():
        found = [result[family, what] for result in results]
        refusals = [text for text in found if isinstance(text, str)]
        if refusal:
            assert len(refusals) == 2, (family, what)
            assert all(re.search(refusal, text) and "\n" not in text for text in refusals), refusals
        else:
            assert not refusals, refusals
            check_steps(found, folders[family], batch)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("what", ["tensor", "context"])
def test_ranks_divide_the_rows_of_every_other_family_or_all_refuse_it(
    what: str, folder_of: Callable[[str], Path]
) -> None:
    from tests.engines.worlds import make_batch, run_ranks

    families = [family for family in sorted(EXPECTED) if EXPECTED[family] in ("packed", "rows")]
    folders = {family: folder_of(family) for family in families}
    first, second = run_ranks(2, outcomes_of_two_ranks, folders, [(family, what) for family in families])
    batch, divided = make_batch(LENGTHS), 0
    for family in families:
        one, other = first[family, what], second[family, what]
        if isinstance(one, str):
            assert one == other and "\n" not in one, (one, other)
            continue
        divided += 1
        check_steps([one, other], folders[family], batch)
    assert divided > {"tensor": 60, "context": 80}[what]


# ---- folders as they are published

ROPE3 = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}  # fmt: skip
YARN = {
    "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096, "type": "yarn",
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
        "rope_theta": 500000.0, "rope_scaling": ROPE3, "bos_token_id": 128000, "eos_token_id": [128001, 128008],
        "tie_word_embeddings": False,
    },
    "Qwen2.5-0.5B": {
        "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 32768,
        "max_window_layers": 24, "sliding_window": 32768, "use_sliding_window": False, "tie_word_embeddings": True,
        "eos_token_id": 151643, "bos_token_id": 151643,
    },
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "vocab_size": 151936, "max_position_embeddings": 40960, "sliding_window": None,
    },
    "gemma-2-9b": {
        "model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "query_pre_attn_scalar": 256,
        "sliding_window": 4096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "vocab_size": 256000,
    },
    "DeepSeek-V3": {
        "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_group": 8,
        "topk_group": 4, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1,
        "first_k_dense_replace": 3, "num_nextn_predict_layers": 1, "max_position_embeddings": 163840,
        "rope_scaling": YARN, "vocab_size": 129280,
    },
    "Kimi-Linear-48B-A3B": {
        "model_type": "kimi_linear", "hidden_size": 2304, "intermediate_size": 9216, "moe_intermediate_size": 1024,
        "num_hidden_layers": 27, "num_attention_heads": 32, "num_key_value_heads": 32, "q_lora_rank": None,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts": 256,
        "num_experts_per_token": 8, "num_shared_experts": 1, "first_k_dense_replace": 1, "vocab_size": 163840,
        "linear_attn_config": {
            "full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128, "num_heads": 32,
            "kda_layers": [layer for layer in range(1, 27) if layer % 4], "short_conv_kernel_size": 4,
        },
    },
}  # fmt: skip
"""Of their config.json what makes the model."""


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_small_copy_of_a_published_model_can_be_made_and_packed(
    name: str, tmp_path: Path, world_of_one: None
) -> None:
    """All layers, in seconds; several ranks divide its heads like those of the published model."""
    import json
    from types import SimpleNamespace

    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from hpcrl.engines.train.fsdp2.exchange import TokenRanks
    from hpcrl.engines.train.fsdp2.model import PackedCausalLM
    from hpcrl.engines.train.fsdp2.model_kind import CAUSAL
    from hpcrl.engines.train.fsdp2.small_model import MAX_PARAMETERS, REACH, small_config
    from hpcrl.engines.train.fsdp2.spec import FSDP2Config
    from hpcrl.engines.train.fsdp2.trial import LENGTHS as ROWS
    from hpcrl.engines.train.fsdp2.trial import try_architecture

    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    config = AutoConfig.from_pretrained(tmp_path)
    small = small_config(config)
    assert small.num_hidden_layers == config.num_hidden_layers
    assert (getattr(small, "sliding_window", None) or REACH) <= REACH < min(ROWS) / 2
    divided = small_config(config, (2, 2))
    assert divided.num_attention_heads % 4 == divided.num_key_value_heads % 2 == 0
    with torch.device("meta"):
        of_many = AutoModelForCausalLM.from_config(small_config(config, (8, 1)))
    assert sum(p.numel() for p in of_many.parameters()) < MAX_PARAMETERS
    tried = SimpleNamespace(
        name="fsdp2", kind=CAUSAL, tried_class=PackedCausalLM, model_path=tmp_path, own=FSDP2Config(),
        device=torch.device("cpu"),
    )  # fmt: skip
    assert try_architecture(tried, config, TokenRanks()) == ""


@pytest.mark.parametrize("error", [ImportError("needs timm"), TypeError("expected int"), RuntimeError("shapes")])
def test_an_error_in_a_models_own_code_is_one_line(error: Exception, tmp_path: Path) -> None:
    from types import SimpleNamespace

    import torch

    from hpcrl.engines.train.fsdp2.model import empty_model
    from hpcrl.engines.train.fsdp2.model_kind import Kind

    def fails(*given: Any, **keys: Any) -> None:
        raise error

    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match=f"config.json makes no causal language model: {error}"):
        empty_model(tmp_path, torch.float32, Kind(auto=SimpleNamespace(from_config=fails)))


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ({"model_type": "bert"}, "does not train model_type=bert: its vocabulary projection is not one matrix"),
        ({"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}, "has no quantised weights"),
    ],
)
@pytest.mark.parametrize("name", ["fsdp2", "deepspeed"])
def test_configs_no_engine_can_train_are_refused_before_the_start(name: str, model: dict[str, Any], why: str) -> None:
    from hpcrl.config import parse
    from hpcrl.config.abilities import check_trainable

    (problem,) = check_trainable(parse({"trainer": {"engine": name}}), model, AT)
    assert problem.text.startswith(f"model.path: the {name} trainer ") and why in problem.text
