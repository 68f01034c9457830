"""The native generator against transformers: log-probs, greedy tokens, weight updates, and refusals."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    DynamicCache,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    HunYuanDenseV1Config,
    HunYuanMoEV1Config,
    LlamaConfig,
    LogitsProcessorList,
    MiniMaxM2Config,
    MinistralConfig,
    MinPLogitsWarper,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    SeedOssConfig,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hpcrl.config import parse
from hpcrl.engines.gen.generation_engine import Output, Request, SamplingParams
from hpcrl.engines.gen.native.architecture import read_architecture
from hpcrl.engines.gen.native.engine import NativeEngine
from hpcrl.engines.gen.native.kv import block_bytes
from hpcrl.engines.gen.native.transformer import Transformer
from hpcrl.engines.gen.native.unsupported import unsupported
from hpcrl.engines.gen.native.weights import FusedWeights
from hpcrl.engines.hf_folder import read_safetensors
from hpcrl.engines.tiny import make_tokenizer
from hpcrl.models.families import read_shape
from hpcrl.planner.generator import token_bytes
from hpcrl.rollout.types import FinishReason
from tests.conftest import ROOT
from tests.engines.mtp import add_mtp_layers

pytestmark = pytest.mark.numerics

VOCAB = 320
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MOE: dict[str, Any] = {"head_dim": 16, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
ALPHA = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 100.0, "factor": 1.0}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 128,
    "short_factor": [1.5] * 3, "long_factor": [9.0] * 3, "partial_rotary_factor": 0.75,
}  # fmt: skip
LATENT = SIZES | {
    "num_key_value_heads": 4, "kv_lora_rank": 20, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
    "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "n_shared_experts": 2,
}  # fmt: skip
WINDOW = {"sliding_window": 11}
SOFT_CAPS = {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 4.0, "query_pre_attn_scalar": 9}
LOCAL_AND_GLOBAL = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
}
SLIDING, FULL, RECURRENT = "sliding_attention", "full_attention", "linear_attention"
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 3, "layer_types": [RECURRENT, FULL, RECURRENT],
}  # fmt: skip
MOE_SIZES = {key: value for key, value in SIZES.items() if key != "intermediate_size"}
CONFIGS = {
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=16, attention_bias=True),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **MOE, mlp_only_layers=[1], norm_topk_prob=True),
    "llama": LlamaConfig(**SIZES, rope_parameters=LLAMA3, attention_bias=True, tie_word_embeddings=True),
    "mistral": MistralConfig(**SIZES, **WINDOW),
    "ministral": MinistralConfig(**SIZES, **WINDOW, head_dim=8, layer_types=[SLIDING, FULL, SLIDING]),
    "phi3": Phi3Config(**SIZES, pad_token_id=0, rope_parameters=LONGROPE, original_max_position_embeddings=128),
    "gemma2": Gemma2Config(**SIZES, **SOFT_CAPS, **WINDOW, head_dim=8, attn_implementation="eager"),
    "gemma3_text": Gemma3TextConfig(
        **SIZES, **WINDOW, head_dim=16, query_pre_attn_scalar=9, rope_parameters=LOCAL_AND_GLOBAL,
        layer_types=[SLIDING, FULL, SLIDING],
    ),
    "gpt_oss": GptOssConfig(
        **SIZES, **WINDOW, head_dim=16, num_local_experts=5, num_experts_per_tok=2, swiglu_limit=0.5,
        rope_parameters=YARN | {"truncate": False}, attn_implementation="eager",
    ),
    "qwen2_moe": Qwen2MoeConfig(**SIZES, **MOE, shared_expert_intermediate_size=20, mlp_only_layers=[1]),
    "mixtral": MixtralConfig(**SIZES, **WINDOW, num_local_experts=5),
    "glm4_moe": Glm4MoeConfig(
        **SIZES, head_dim=16, attention_bias=True, use_qk_norm=True, n_routed_experts=6, num_experts_per_tok=3,
        n_group=3, topk_group=2, moe_intermediate_size=16, n_shared_experts=2, routed_scaling_factor=1.5,
    ),
    "seed_oss": SeedOssConfig(**SIZES, head_dim=16, attention_out_bias=True),
    "olmo2": Olmo2Config(**SIZES, attention_bias=True),
    "olmo3": Olmo3Config(
        **SIZES, **WINDOW, rope_parameters=LOCAL_AND_GLOBAL, layer_types=[SLIDING, FULL, SLIDING]
    ),
    "ernie4_5": Ernie4_5Config(**SIZES, head_dim=16),
    "deepseek_v2": DeepseekV2Config(
        **LATENT, q_lora_rank=None, rope_parameters=YARN | {"mscale": 0.7, "mscale_all_dim": 0.8}, n_group=3,
        topk_group=2, topk_method="group_limited_greedy", routed_scaling_factor=4.0,
    ),
    "deepseek_v3": DeepseekV3Config(
        **LATENT, q_lora_rank=12, first_k_dense_replace=1, n_group=3, topk_group=2, attention_bias=True,
        rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, num_nextn_predict_layers=0,
    ),
    "minimax_m2": MiniMaxM2Config(
        **SIZES, head_dim=16, num_local_experts=5, num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    ),
    "ernie4_5_moe": Ernie4_5_MoeConfig(
        **SIZES, moe_num_experts=6, moe_k=3, moe_intermediate_size=16, moe_num_shared_experts=2,
    ),
    "hunyuan_v1_moe": HunYuanMoEV1Config(
        **SIZES, head_dim=16, num_experts=5, moe_topk=[2] * 3, rope_parameters=ALPHA,
    ),
    "glm4_moe_lite": Glm4MoeLiteConfig(**LATENT, q_lora_rank=12, mlp_layer_types=["sparse", "dense", "sparse"]),
    "hunyuan_v1_dense": HunYuanDenseV1Config(**SIZES, head_dim=16, rope_parameters=ALPHA),
    "qwen3_next": Qwen3NextConfig(
        **SIZES, **MOE, **DELTA, attention_bias=True, shared_expert_intermediate_size=20, mlp_only_layers=[1]
    ),
    "qwen3_5_text": Qwen3_5TextConfig(**SIZES, **DELTA, head_dim=16),
    "qwen3_5_moe_text": Qwen3_5MoeTextConfig(**MOE_SIZES, **MOE, **DELTA, shared_expert_intermediate_size=20),
}  # fmt: skip
"""A config of every family."""
CENTRED = ("gemma", "qwen3_next", "qwen3_5")
"""Families whose norms add 1 to their weights."""
FEATURES = {
    "qwen2, windows from the second layer on": Qwen2Config(
        **SIZES, **WINDOW, use_sliding_window=True, max_window_layers=1
    ),
    "qwen3, yarn": Qwen3Config(**SIZES, head_dim=16, rope_parameters=YARN),
    "qwen3_moe, windows": Qwen3MoeConfig(**SIZES, **MOE, **WINDOW, use_sliding_window=True),
    "llama, linear": LlamaConfig(**SIZES, rope_parameters=LINEAR),
    "llama ignores windows": LlamaConfig(**SIZES, **WINDOW),
    "mistral, no window": MistralConfig(**SIZES, sliding_window=None, head_dim=16),
    "phi3, window": Phi3Config(**SIZES, **WINDOW, pad_token_id=0),
    "gpt_oss, no biases": GptOssConfig(**SIZES, num_local_experts=5, attention_bias=False, attn_implementation="eager"),
    "qwen2_moe, windows": Qwen2MoeConfig(
        **SIZES, **MOE, **WINDOW, use_sliding_window=True, qkv_bias=False, norm_topk_prob=True
    ),
    "glm4_moe, plain": Glm4MoeConfig(
        **SIZES, n_routed_experts=6, num_experts_per_tok=3, moe_intermediate_size=12, norm_topk_prob=False
    ),
    "deepseek_v3, as Moonlight, pairs of halves": DeepseekV3Config(
        **LATENT,
        q_lora_rank=None,
        rope_interleave=False,
        attention_bias=True,
        n_group=1,
        topk_group=1,
        tie_word_embeddings=True,
        num_nextn_predict_layers=0,
    ),
    "deepseek_v2, greedy": DeepseekV2Config(**LATENT, q_lora_rank=12, first_k_dense_replace=2, attention_bias=True),
    "ernie4_5_moe, some layers, nothing shared": Ernie4_5_MoeConfig(
        **SIZES,
        moe_num_experts=6,
        moe_k=2,
        moe_intermediate_size=16,
        moe_num_shared_experts=0,
        moe_layer_start_index=0,
        moe_layer_end_index=1,
        moe_layer_interval=2,
        tie_word_embeddings=False,
    ),
    "glm4_moe_lite, plain": Glm4MoeLiteConfig(**LATENT, q_lora_rank=None, norm_topk_prob=False),
    "gemma2, no soft caps": Gemma2Config(
        **SIZES, head_dim=8, attn_logit_softcapping=None, final_logit_softcapping=None, attention_bias=True
    ),
}
"""Further features of families, which a row of CONFIGS does not have."""


def make_model(config: Any, seed: int = 0) -> PreTrainedModel:
    """A model whose weights, norms and biases included, are random and large enough to matter."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    neutral = 0.0 if config.model_type.startswith(CENTRED) else 1.0
    with torch.no_grad():
        corrections = ((name, b) for name, b in model.named_buffers() if name.endswith("e_score_correction_bias"))
        for name, weight in (*model.named_parameters(), *corrections):
            weight.normal_(neutral, 0.2, generator=generator) if "norm" in name else weight.normal_(
                0.0, 0.15, generator=generator
            )
    return model


@pytest.fixture(scope="module", params=CONFIGS)
def model_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    model = make_model(CONFIGS[request.param])
    model.save_pretrained(folder, max_shard_size="40KB")  # several files
    return model, folder


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("qwen2")
    model = make_model(CONFIGS["qwen2"])
    model.save_pretrained(folder)
    return model, folder


@pytest.fixture(scope="module", params=["qwen2", "qwen3_5_text"])
def either(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """With attention only, and with recurrent layers."""
    folder = tmp_path_factory.mktemp(request.param)
    model = make_model(CONFIGS[request.param])
    model.save_pretrained(folder)
    return model, folder


def engine_of(folder: Path, max_num_seqs: int = 4, **options: Any) -> NativeEngine:
    defaults = {"max_length": 128, "dtype": torch.float32, "block_tokens": 16}
    return NativeEngine(folder, max_num_seqs=max_num_seqs, **(defaults | options))


def prompt_of(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, size=length).tolist()


def mixed_requests(count: int = 12) -> list[Request]:
    """Unequal prompts (one a single token) and lengths, and every kind of sampling."""
    kinds = [{}, {"temperature": 0.6, "top_p": 0.9}, {"temperature": 0.0}, {"top_k": 20, "top_p": 0.8, "min_p": 0.05}]
    return [
        Request(i, prompt_of(i, 1 + 5 * i), SamplingParams(3 + 5 * (i % 5), **kinds[i % 4]), seed=1000 + i)
        for i in range(count)
    ]


def run(engine: NativeEngine, requests: Sequence[Request], decode_chunk: int = 7) -> dict[int, Output]:
    engine.add(requests)
    outputs: dict[int, Output] = {}
    while engine.progress():
        outputs |= {o.id: o for o in engine.step(decode_chunk)}
    return outputs


@torch.no_grad()
def logits_of(model: Any, request: Request, output: Output) -> torch.Tensor:
    """transformers' logits [n, vocab] at each of the response's tokens."""
    ids = torch.tensor([[*request.prompt_ids, *output.token_ids]])
    return model(ids).logits[0, len(request.prompt_ids) - 1 : -1]


def largest_error(model: Any, requests: Sequence[Request], outputs: dict[int, Output]) -> tuple[float, float]:
    """Largest differences of gen_logprobs and of gen_logprobs_behaviour from transformers'."""
    plain, behaviour = [0.0], [0.0]
    for request in requests:
        output, params = outputs[request.id], request.params
        logits = logits_of(model, request, output)
        ids = torch.from_numpy(output.token_ids).long()[:, None]
        expected = (logits / (params.temperature or 1.0)).log_softmax(-1).gather(1, ids)[:, 0]
        plain.append(float((expected - torch.from_numpy(output.gen_logprobs)).abs().max()))
        if params.truncates:
            warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
            warpers += [TopKLogitsWarper(params.top_k)] if params.top_k else []
            warpers += [TopPLogitsWarper(params.top_p)] if params.top_p < 1 else []
            warpers += [MinPLogitsWarper(params.min_p)] if params.min_p else []
            expected = warpers(None, logits).log_softmax(-1).gather(1, ids)[:, 0]
            behaviour.append(float((expected - torch.from_numpy(output.gen_logprobs_behaviour)).abs().max()))
    return max(plain), max(behaviour)


def test_log_probs_match_transformers(model_folder: tuple[Any, Path]) -> None:
    model, folder = model_folder
    requests = mixed_requests()
    outputs = run(engine_of(folder), requests)
    assert max(largest_error(model, requests, outputs)) < 1e-5
    # Negative control: one weight of the reference a little off.
    name = {"phi3": "qkv_proj"}.get(model.config.model_type, "k_proj")
    name = "kv_b_proj" if hasattr(model.config, "kv_lora_rank") else name
    weight = model.get_parameter(f"model.layers.1.self_attn.{name}.weight")
    exact = weight[3, 5].item()
    with torch.no_grad():
        weight[3, 5] += 0.5
        assert min(largest_error(model, requests, outputs)) > 1e-3
        weight[3, 5] = exact


@torch.no_grad()
def test_log_probs_of_given_tokens_match_transformers(
    model_folder: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In passes of several rows of unequal lengths, before and after a run, whose cache and states stay right."""
    model, folder = model_folder
    monkeypatch.setattr("hpcrl.engines.gen.native.given_tokens.PASS_TOKENS", 160)
    monkeypatch.setattr("hpcrl.engines.gen.native.given_tokens.LOGITS", 7 * VOCAB)
    engine, requests = engine_of(folder), mixed_requests(6)
    rows = [(prompt_of(i, 1 + 9 * i), prompt_of(50 + i, 1 + 11 * (i % 3))) for i in range(8)]
    best = model(torch.tensor([rows[3][0]])).logits[0, -1].argmax()
    rows.append((rows[3][0], [int(best)]))

    def check() -> None:
        for (prompt, response), (logprobs, greedy) in zip(rows, engine.logprobs(rows), strict=True):
            logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
            expected = logits.log_softmax(-1).gather(1, torch.tensor(response)[:, None])[:, 0]
            np.testing.assert_allclose(logprobs, expected.numpy(), atol=1e-5)
            assert greedy == bool((logits.argmax(-1) == torch.tensor(response)).all())

    check()
    assert [row.greedy for row in engine.logprobs(rows[-2:])] == [False, True]
    assert max(largest_error(model, requests, run(engine, requests))) < 1e-5
    check()


def test_log_probs_that_cannot_be_computed_are_refused(qwen2: tuple[Any, Path]) -> None:
    engine = engine_of(qwen2[1], max_length=8)
    assert len(engine.logprobs([([1] * 5, [2] * 4)])[0].logprobs) == 4  # the last token is not an input
    for row, text in (([], [1]), "0 tokens of prompt"), (([1], []), "0 of response"), (([1] * 5, [2] * 5), "at most 9"):
        with pytest.raises(ValueError, match=f"row 1 has .*{text}"):
            engine.logprobs([([1], [2]), row])
    engine.add([Request(0, [1], SamplingParams(4), seed=0)])
    engine.step(1)
    with pytest.raises(ValueError, match="no running requests"):
        engine.logprobs([([1], [2])])
    engine.close()
    with pytest.raises(ValueError, match="need weights"):
        engine.logprobs([([1], [2])])


def test_prompts_with_cached_prefixes_have_the_log_probs_of_transformers(
    model_folder: tuple[Any, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts with prefixes from other prompts, longer than windows and query blocks, of unequal lengths."""
    monkeypatch.setattr("hpcrl.engines.gen.native.paged_attention.QUERY_BLOCK", 16)
    model, folder = model_folder
    engine, start = engine_of(folder), prompt_of(50, 40)
    run(engine, [Request(99, start, SamplingParams(1), seed=0)])
    requests = [
        Request(i, [*start[: 40 - 3 * i], *prompt_of(i, length)], SamplingParams(5), seed=i)
        for i, length in enumerate((1, 45, 20, 33))
    ]
    assert largest_error(model, requests, run(engine, requests))[0] < 1e-5


@pytest.mark.parametrize("feature", FEATURES)
def test_family_features_match_transformers(feature: str, tmp_path: Path) -> None:
    model = make_model(FEATURES[feature])
    model.save_pretrained(tmp_path)
    requests = mixed_requests()
    outputs = run(engine_of(tmp_path), requests)
    assert max(largest_error(model, requests, outputs)) < 1e-5


@pytest.mark.parametrize("family", CONFIGS)
def test_the_plan_counts_the_numbers_that_the_cache_holds(family: str, tmp_path: Path) -> None:
    """Of DeepSeek-V3: 20 + 4 numbers of a latent in each of 3 layers."""
    CONFIGS[family].save_pretrained(tmp_path)
    shape = read_shape(json.loads((tmp_path / "config.json").read_text()))
    held = block_bytes(read_architecture(tmp_path), 16, torch.float32)
    assert held == 16 * token_bytes(parse({"generator": {"dtype": "float32"}}), shape)
    if family == "deepseek_v3":
        assert held == 16 * 3 * (20 + 4) * 4


def test_short_rotary_factors_limit_the_length_to_the_original_one(tmp_path: Path) -> None:
    CONFIGS["phi3"].save_pretrained(tmp_path)
    engine_of(tmp_path, max_length=128, load=False)
    with pytest.raises(ValueError, match="max_length 129 exceeds the 128 positions"):
        engine_of(tmp_path, max_length=129, load=False)


class Operations(TorchDispatchMode):
    """Counts operations that compute or copy; each is one kernel or more on a GPU."""

    count = 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not operation.is_view
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize(("family", "most"), [("qwen2", 24), ("qwen3_moe", 44), ("qwen3_5_text", 52)])
def test_a_layer_needs_few_operations_to_decode(family: str, most: int, tmp_path: Path) -> None:
    """This keeps a GPU from waiting for the host; the operations of a loop over experts would grow with their
    number."""
    counts = {}
    for layers in (2, 4):
        kinds = {"layer_types": [FULL, *[RECURRENT] * (layers - 1)] if "3_5" in family else None}
        config = type(CONFIGS[family])(**CONFIGS[family].to_dict() | {"num_hidden_layers": layers} | kinds)
        folder = tmp_path / str(layers)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        engine = NativeEngine(folder, max_num_seqs=4, max_length=64, dtype=torch.float32)
        engine.add([Request(i, [5 + i] * 9, SamplingParams(40, ignore_eos=True), seed=i) for i in range(4)])
        engine.step(4)
        with Operations() as operations:
            engine.step(1)
        counts[layers] = operations.count
    assert 2 * 10 < counts[4] - counts[2] <= 2 * most, counts


def test_a_mixture_of_experts_never_reads_routes_on_the_host(tmp_path: Path) -> None:
    """Fake tensors have no values: reading one fails where a real run would wait for the GPU."""
    sizes = {"hidden_size": 32, "moe_intermediate_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["qwen3_moe"].to_dict() | sizes))
    architecture = read_architecture(tmp_path)
    with FakeTensorMode():
        weights = FusedWeights(architecture, torch.bfloat16, torch.device("cpu"))
        model = Transformer(architecture, weights, [torch.empty(0)])
        states = torch.empty(7, architecture.hidden_size, dtype=torch.bfloat16)
        assert model._mixture(weights.layers[0].mlp, states, {}).shape == states.shape


def test_greedy_tokens_match_transformers_generate(model_folder: tuple[Any, Path]) -> None:
    model, folder = model_folder
    requests = [Request(i, prompt_of(i, 4 + 9 * i), SamplingParams(20, temperature=0.0), seed=i) for i in range(4)]
    outputs = run(engine_of(folder), requests)
    for request in requests:
        ids = torch.tensor([list(request.prompt_ids)])
        expected = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20, pad_token_id=0
        )
        assert outputs[request.id].token_ids.tolist() == expected[0, ids.shape[1] :].tolist()


def test_weights_named_as_in_memory_and_as_on_disk_are_equal(model_folder: tuple[Any, Path]) -> None:
    """On disk a mixture has a tensor per expert, in memory one for all; a tied head may be there or not."""
    model, folder = model_folder
    requests = mixed_requests(5)
    loaded = run(engine_of(folder), requests)
    engine = engine_of(folder, load=False)
    named = {name: tensor for name, tensor in model.state_dict().items()}
    engine.load_weights(named.items(), version=0)
    given = run(engine, requests)
    assert all(np.array_equal(loaded[i].gen_logprobs, given[i].gen_logprobs) for i in loaded)
    if model.config.tie_word_embeddings:
        del named["model.embed_tokens.weight"]
        engine.load_weights(iter(named.items()), version=1)
    else:
        del named["lm_head.weight"]
        with pytest.raises(ValueError, match=r"1 of \d+ weights are missing, e.g. \['lm_head.weight'\]"):
            engine.load_weights(named.items(), version=1)


def test_weights_read_back_equal_the_loaded_ones(model_folder: tuple[Any, Path]) -> None:
    """Under the names in memory and on disk; those to which norms add 1 are left out."""
    model, folder = model_folder
    engine = engine_of(folder)
    centred = model.config.model_type.startswith(CENTRED)
    for named in (dict(model.state_dict()), dict(read_safetensors(folder))):
        shown = {name: tensor.clone() for name, tensor in engine.loaded_weights(named)}
        assert all(torch.equal(tensor, named[name]) for name, tensor in shown.items())
        missing = named.keys() - shown.keys()
        assert all("norm" in name for name in missing) and bool(missing) == centred


def test_an_update_in_flight_keeps_the_cache_and_uses_the_new_weights(model_folder: tuple[Any, Path]) -> None:
    """Reference: the old model's keys and values for its inputs, then the new model on that cache."""
    old, folder = model_folder
    new = make_model(old.config, seed=1)
    engine = engine_of(folder, max_num_seqs=2)
    requests = [Request(i, prompt_of(i, 6 + 5 * i), SamplingParams(14), seed=i) for i in range(2)]
    engine.add(requests)
    engine.step(5)
    engine.load_weights(new.state_dict().items(), version=7)
    outputs = {o.id: o for o in engine.step(20)}
    for request in requests:
        output = outputs[request.id]
        assert output.versions.tolist() == [0] * 5 + [7] * 9
        tokens, fed = [*request.prompt_ids, *output.token_ids.tolist()], len(request.prompt_ids) + 4
        with torch.no_grad():
            cache = DynamicCache(config=old.config)
            before = old(torch.tensor([tokens[:fed]]), past_key_values=cache, use_cache=True).logits[0]
            after = new(torch.tensor([tokens[fed:-1]]), past_key_values=cache, use_cache=True).logits[0]
        logits = torch.cat((before[len(request.prompt_ids) - 1 :], after))
        expected = logits.log_softmax(-1).gather(1, torch.tensor(output.token_ids).long()[:, None])[:, 0]
        torch.testing.assert_close(torch.from_numpy(output.gen_logprobs), expected, atol=1e-4, rtol=0)
        # Negative control: a fresh cache under the new weights gives other numbers.
        fresh = logits_of(new, request, output)[5:].log_softmax(-1)
        assert (
            fresh.gather(1, torch.tensor(output.token_ids[5:]).long()[:, None])[:, 0] - expected[5:]
        ).abs().max() > 0.01


def test_a_recomputed_cache_belongs_to_the_new_weights(model_folder: tuple[Any, Path]) -> None:
    """The next log-probs are transformers' under the new weights alone; the control above has those of a kept cache."""
    old, folder = model_folder
    new = make_model(old.config, seed=1)
    engine = engine_of(folder, max_num_seqs=4)
    requests = [Request(i, prompt_of(i, 1 + 5 * i), SamplingParams(9 + 5 * (i % 2)), seed=i) for i in range(5)]
    requests[3] = replace(requests[3], prompt_ids=requests[2].prompt_ids)
    engine.add(requests)
    outputs = {o.id: o for o in engine.step(10)}  # two have ended, slots were compacted, the fifth was admitted
    engine.load_weights(new.state_dict().items(), version=7)
    engine.recompute()
    outputs |= {o.id: o for o in engine.step(20)}
    updated = [request for request in requests if (outputs[request.id].versions == 7).sum() > 0]
    assert len(updated) == 3
    for request in updated:
        output = outputs[request.id]
        at = output.versions == 7
        expected = logits_of(new, request, output).log_softmax(-1)
        expected = expected.gather(1, torch.tensor(output.token_ids).long()[:, None])[:, 0]
        torch.testing.assert_close(torch.from_numpy(output.gen_logprobs)[at], expected[at], atol=1e-4, rtol=0)


def test_group_members_share_a_prefill_with_unchanged_results(either: tuple[Any, Path]) -> None:
    model, folder = either
    prompts = [prompt_of(0, 11), prompt_of(1, 30), prompt_of(2, 1)]
    requests = [Request(i, prompts[i % 3], SamplingParams(9 + i), seed=i) for i in range(9)]
    outputs = run(engine_of(folder, max_num_seqs=9), requests)
    assert max(largest_error(model, requests, outputs)) < 1e-4
    assert len({outputs[i].token_ids.tobytes() for i in range(9)}) == 9


def test_many_requests_through_few_slots_give_the_same_responses(either: tuple[Any, Path]) -> None:
    """Slots change hands, the cache grows past its first size, aborts and moves happen on the way."""
    model, folder = either
    rng = np.random.default_rng(5)
    engine = engine_of(folder, max_num_seqs=7, block_tokens=8)
    requests = [
        Request(i, prompt_of(i, int(rng.integers(1, 40))), SamplingParams(int(rng.integers(1, 60))), seed=i)
        for i in range(40)
    ]
    outputs: dict[int, Output] = {}
    waiting = list(requests)
    while waiting or engine.progress():
        engine.add([waiting.pop() for _ in range(min(len(waiting), int(rng.integers(0, 9))))])
        outputs |= {o.id: o for o in engine.step(int(rng.integers(1, 9)))}
        running = [i for i, count in engine.progress().items() if count > 20]
        outputs |= {o.id: o for o in engine.abort(running[:1])}
    assert outputs.keys() == set(range(40))
    assert max(largest_error(model, requests, outputs)) < 1e-4
    aborted = sum(o.finish_reason is FinishReason.ABORT for o in outputs.values())
    assert 3 < aborted < 30


def test_end_of_sequence_ids_end_responses(qwen2: tuple[Any, Path], tmp_path: Path) -> None:
    """generation_config.json decides; ignore_eos goes past them."""
    model, folder = qwen2
    request = Request(0, prompt_of(3, 8), SamplingParams(30), seed=4)
    free = run(engine_of(folder), [request])[0].token_ids
    second = next(k for k in range(2, 30) if free[k] not in free[:k])
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [VOCAB - 1, int(free[second])]}))
    engine = engine_of(tmp_path)
    stopped = run(engine, [request])[0]
    assert stopped.finish_reason is FinishReason.STOP and np.array_equal(stopped.token_ids, free[: second + 1])
    ignoring = replace(request, params=replace(request.params, ignore_eos=True))
    assert np.array_equal(run(engine, [ignoring])[0].token_ids, free)
    assert model.config.eos_token_id is None


def test_a_response_ends_where_a_stop_string_is_complete(qwen2: tuple[Any, Path]) -> None:
    _, folder = qwen2
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=make_tokenizer(VOCAB))
    engine = engine_of(folder, max_num_seqs=8, tokenizer=tokenizer)
    free = run(engine, [Request(i, prompt_of(i, 6), SamplingParams(40), seed=i) for i in range(8)])
    stops = {i: (tokenizer.decode(free[i].token_ids[10:13]).strip("\ufffd")[:3] or "never", "e") for i in range(8)}
    requests = [
        Request(i, prompt_of(i, 6), SamplingParams(40, stop=() if i == 7 else stops[i]), seed=i) for i in range(8)
    ]
    stopped = run(engine, requests)
    ended = 0
    for i in range(7):
        ids = free[i].token_ids
        hit = [n for n in range(1, 41) if any(s in tokenizer.decode(ids[:n]) for s in stops[i])]
        length = hit[0] if hit else 40
        assert np.array_equal(stopped[i].token_ids, ids[:length])
        assert (stopped[i].finish_reason is FinishReason.STOP) == bool(hit)
        ended += length < 40
    assert ended >= 5 and len(stopped[7].token_ids) == 40
    with pytest.raises(ValueError, match=r"request 3: stop strings .* tokenizer"):
        engine_of(folder).add([requests[3]])


def bits(outputs: dict[int, Output]) -> dict[int, tuple[bytes, bytes]]:
    return {i: (o.token_ids.tobytes(), o.gen_logprobs.tobytes()) for i, o in outputs.items()}


def test_deterministic_bits_do_not_depend_on_earlier_requests(either: tuple[Any, Path]) -> None:
    _, folder = either
    requests = mixed_requests()

    def calls(engine: NativeEngine) -> dict[int, tuple[bytes, bytes]]:
        engine.add(requests[:7])
        outputs = {o.id: o for o in engine.step(6)}
        outputs |= {o.id: o for o in engine.abort([2])}
        return bits(outputs | run(engine, requests[7:]))

    fresh, used = (engine_of(folder, max_num_seqs=5, deterministic=True) for _ in range(2))
    run(used, [Request(i, prompt_of(50 + i, 60), SamplingParams(60), seed=i) for i in range(8)])
    assert calls(fresh) == calls(used) == calls(used)


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("ernie4_5_moe", None),
        ("qwen3_next", None),
        ("qwen3_5_text", "mtp_num_hidden_layers"),
        ("deepseek_v3", "num_nextn_predict_layers"),
    ],
)
def test_layers_that_predict_further_tokens_are_left_out(family: str, key: str | None, tmp_path: Path) -> None:
    (model := make_model(CONFIGS[family])).save_pretrained(tmp_path)
    add_mtp_layers(tmp_path, key)
    requests = mixed_requests()[:2]
    outputs = run(engine_of(tmp_path, max_length=96), requests)
    assert largest_error(model, requests, outputs)[0] < 1e-5


@pytest.mark.parametrize("family", ["qwen2", "qwen3_5_text", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_deterministic_bits_do_not_depend_on_later_requests(family: str, tmp_path: Path) -> None:
    make_model(CONFIGS[family]).save_pretrained(folder := tmp_path / family)
    engine = engine_of(folder, max_num_seqs=6, deterministic=True)
    requests = [Request(i, prompt_of(i, 9), SamplingParams(12), seed=i) for i in range(6)]
    for count in (1, 3):
        alone = bits(run(engine, requests[:count]))
        engine.add(requests[:count])
        assert not engine.step(2)
        together = bits(run(engine, requests[count:], decode_chunk=5))
        assert together.keys() == set(range(6)) and {i: together[i] for i in alone} == alone


def test_the_cache_grows_only_as_needed(qwen2: tuple[Any, Path]) -> None:
    _, folder = qwen2
    engine = engine_of(folder, max_num_seqs=2, max_length=256, block_tokens=16)
    assert engine._cache.capacity == 0
    run(engine, [Request(0, prompt_of(0, 10), SamplingParams(10), seed=0)])
    assert engine._cache.capacity == 2
    run(engine, [Request(0, prompt_of(0, 10), SamplingParams(200), seed=0)])
    assert 14 <= engine._cache.capacity <= 21
    engine.sleep()
    assert engine._cache.capacity == 0


def test_bfloat16_log_probs_stay_close_to_float32(model_folder: tuple[Any, Path]) -> None:
    model, folder = model_folder
    requests = [Request(i, prompt_of(i, 10), SamplingParams(10), seed=i) for i in range(3)]
    outputs = run(engine_of(folder, dtype=torch.bfloat16), requests)
    assert 1e-5 < largest_error(model, requests, outputs)[0] < 0.5


@pytest.mark.gpu
def test_generation_on_a_gpu_matches_transformers(model_folder: tuple[Any, Path]) -> None:
    model, folder = model_folder
    requests = mixed_requests()
    outputs = run(engine_of(folder, device="cuda"), requests)
    assert max(largest_error(model, requests, outputs)) < 1e-3


def test_non_finite_weights_are_named(qwen2: tuple[Any, Path]) -> None:
    model, folder = qwen2
    engine = engine_of(folder)
    named = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    named["model.norm.weight"][0] = float("nan")
    engine.load_weights(named.items(), version=3)
    engine.add([Request(17, [1, 2], SamplingParams(4), seed=0)])
    with pytest.raises(FloatingPointError, match=r"request 17: .* not finite under weights version 3"):
        engine.step(1)


@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        (
            CONFIGS["qwen2"],
            {"layer_types": ["full_attention", "chunked_attention", "full_attention"]},
            "type 'chunked_attention'",
        ),
        (CONFIGS["llama"], {"rope_parameters": LINEAR | {"rope_type": "dynamic"}}, "rope type 'dynamic'"),
        (CONFIGS["llama"], {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "factor 0.5"),
        (CONFIGS["deepseek_v3"], {"head_dim": 8}, "head_dim=8 with qk_rope_head_dim=4"),
        (CONFIGS["deepseek_v2"], {"topk_group": 1}, "choice of 3 experts in topk_group=1 groups with 2"),
        (CONFIGS["gemma2"], {"hidden_activation": "gelu"}, "hidden_activation 'gelu'"),
        (CONFIGS["gemma3_text"], {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (CONFIGS["llama"], {"mlp_bias": True}, "mlp_bias"),
        (CONFIGS["qwen2"], {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (CONFIGS["qwen2"], {"model_type": "gpt2"}, "model_type 'gpt2'"),
    ],
)
def test_unsupported_features_are_refused(config: Any, changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict() | changes))
    with pytest.raises(ValueError, match=words):
        engine_of(tmp_path, load=False)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "llama", "rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["rope type 'dynamic'"]),
        ({"model_type": "llama", "rope_scaling": {"rope_type": "llama3"}, "hidden_act": "silu"}, []),
        ({"model_type": "qwen2", "rope_scaling": None, "sliding_window": 4096}, []),
        ({"model_type": "phi3", "partial_rotary_factor": 0.75}, []),
        ({"model_type": "llama", "partial_rotary_factor": 0.75}, ["partial_rotary_factor 0.75"]),
        (
            {"model_type": "phi3", "rope_scaling": {"type": "su", "long_factor": [2.0]},
             "original_max_position_embeddings": 999},
            ["rope type 'longrope' in sequences of 1000 tokens, beyond the original 999,"],
        ),
        ({"model_type": "qwen3_next", "partial_rotary_factor": 0.25, "layer_types": ["linear_attention"] * 3},
         ["a model without attention"]),
        ({"model_type": "qwen3_next", "layer_types": ["sliding_attention", "full_attention"]},
         ["a layer of type 'sliding_attention'"]),
        ({"model_type": "gemma2", "hidden_act": "gelu", "hidden_activation": None}, []),
        ({"model_type": "qwen3", "layer_types": [["x"], 3], "rope_scaling": "no"}, ["a layer of type ['x']"]),
        ({"model_type": "mistral", "quantization_config": {"bits": 4}}, ["quantization_config"]),
        (json.loads((ROOT / "conf/model/Qwen/Qwen2.5-VL-7B-Instruct/config.json").read_text()), []),
    ],
)  # fmt: skip
def test_features_are_read_from_a_published_config(config: dict[str, Any], words: list[str]) -> None:
    """Without the defaults of transformers, and with the keys of older versions."""
    assert list(unsupported(config, 1000)) == words


def test_bad_folders_and_sizes_are_refused(qwen2: tuple[Any, Path], tmp_path: Path) -> None:
    _, folder = qwen2
    with pytest.raises(ValueError, match=r"no config\.json"):
        engine_of(tmp_path)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ValueError, match=r"no .*safetensors"):
        engine_of(tmp_path)
    with pytest.raises(ValueError, match="max_length 512 exceeds the 256 positions"):
        engine_of(folder, max_length=512)
    with pytest.raises(ValueError, match="max_num_seqs is 0"):
        engine_of(folder, max_num_seqs=0)
    config = json.loads((folder / "config.json").read_text()) | {"hidden_size": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"'model.embed_tokens.weight' has shape \[320, 32\], the model has \[320, 64\]"
    ):
        engine_of(tmp_path)
