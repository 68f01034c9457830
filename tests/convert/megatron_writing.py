"""Megatron-Core builds models from HF folders by the table of names, and writes checkpoints and logits of them.

A program: FOLDER has models/NAME (HF) and gets CASE (torch_dist) and logits/NAME.pt. Its four ranks are forked after
Megatron is imported, which costs more than everything else here.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NUM_RANKS = 4
PADDED = 128
"""Rows of the embedding of each case, over all ranks."""


@dataclass(frozen=True)
class Case:
    """A checkpoint: the model, how the ranks share it, and how its keys are made."""

    model: str
    tensor: int = 1
    stages: int = 1
    chunks: int = 1
    experts: int = 1
    metadata: str = ""


CASES = {
    "tp2": Case("qwen2", tensor=2),
    "tp2_tied": Case("qwen2_tied", tensor=2),
    "pp2": Case("qwen3", stages=2),
    "pp2_tied": Case("qwen2_tied", stages=2),
    "vpp2": Case("llama", stages=2, chunks=2),
    "indexed": Case("mistral", tensor=2, metadata="non_homogeneous_layers"),
    "single": Case("qwen3_moe", experts=2, metadata="singleton_local_shards"),
    "ep2": Case("qwen3_moe", experts=2),
    "tp2_pp2": Case("qwen2", tensor=2, stages=2),
    "tp2_ep2": Case("qwen3_moe", tensor=2, experts=2),
    "mixed": Case("qwen3_moe_mixed", tensor=2, stages=2),
    "latent": Case("deepseek_v3", tensor=2, experts=2),
}
BACK = ("qwen2", "qwen3_moe", "qwen3_moe_mixed")
"""Models that were converted to Megatron (back/NAME), to be loaded by it."""


def tokens() -> Tensor:
    return torch.arange(1, 23).view(2, 11) * 7 % 90


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    import megatron.core.dist_checkpointing
    import megatron.core.models.gpt  # noqa: F401  before the fork

    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_rank, args=(rank, folder)) for rank in range(NUM_RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in ranks))


def _rank(rank: int, folder: Path) -> None:
    try:
        torch.set_num_threads(1)
        init = f"file://{folder / 'store'}"
        patience = timedelta(seconds=200)
        dist.init_process_group("gloo", init_method=init, rank=rank, world_size=NUM_RANKS, timeout=patience)
        _patch()
        for name, case in CASES.items():
            _write(folder, name, case)
        _parallel(Case(""))
        models = sorted(path for path in (folder / "models").iterdir() if path.name != "deepseek_v3")
        for model in models[rank::NUM_RANKS]:
            _logits(model, folder / "logits" / f"{model.name}.pt")
        for name in BACK:
            _load(folder, name)
        dist.barrier()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def _patch() -> None:
    from megatron.core.transformer import multi_latent_attention

    from hpcrl.engines.train.megatron import cpu

    cpu.install()
    multi_latent_attention.TELinear = type("TELinear", (), {})  # it asks whether a layer is one


def _parallel(case: Case) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=case.tensor,
        pipeline_model_parallel_size=case.stages,
        virtual_pipeline_model_parallel_size=case.chunks if case.chunks > 1 else None,
        expert_model_parallel_size=case.experts,
        expert_tensor_parallel_size=1,
    )
    model_parallel_cuda_manual_seed(1)


class _NoAttention(torch.nn.Module):
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__()


def build(model: Path, case: Case, padded: int) -> list[Any]:
    """The chunks of this rank, with the weights of an HF folder."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    from hpcrl.convert.weight_files import WeightFiles
    from hpcrl.engines.train.megatron.names import shard, table

    config = json.loads((model / "config.json").read_text())
    latent, mixed = config["model_type"] == "deepseek_v3", "moe" in config["model_type"]
    settings: dict[str, Any] = {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": config["num_attention_heads"],
        "layernorm_epsilon": config["rms_norm_eps"],
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "add_qkv_bias": config["model_type"] == "qwen2",
        "qk_layernorm": latent or config["model_type"].startswith("qwen3"),
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "tensor_model_parallel_size": case.tensor,
        "pipeline_model_parallel_size": case.stages,
        "virtual_pipeline_model_parallel_size": case.chunks if case.chunks > 1 else None,
        "expert_model_parallel_size": case.experts,
        "expert_tensor_parallel_size": 1,
        "use_cpu_initialization": True,
        "pipeline_dtype": torch.float32,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
    }
    if latent:
        sizes = ("q_lora_rank", "kv_lora_rank", "v_head_dim")
        settings |= {name: config[name] for name in sizes}
        settings |= {"qk_head_dim": config["qk_nope_head_dim"], "qk_pos_emb_head_dim": config["qk_rope_head_dim"]}
        settings |= {"multi_latent_attention": True, "num_moe_experts": config["n_routed_experts"]}
        settings |= {
            "moe_shared_expert_intermediate_size": config["moe_intermediate_size"] * config["n_shared_experts"]
        }
        settings |= {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
        dense = range(config["first_k_dense_replace"])
    else:
        settings |= {"num_query_groups": config["num_key_value_heads"], "kv_channels": config["head_dim"]}
        dense = config.get("mlp_only_layers") or ()
    if mixed:
        settings |= {"num_moe_experts": config.get("num_experts") or config["num_local_experts"]}
    if mixed or latent:
        pattern = [int(layer not in dense) for layer in range(settings["num_layers"])]
        settings |= {"moe_layer_freq": 1 if all(pattern) else pattern}
        settings |= {"moe_ffn_hidden_size": config["moe_intermediate_size"], "moe_token_dispatcher_type": "allgather"}
        settings |= {"moe_router_topk": config["num_experts_per_tok"], "moe_router_load_balancing_type": "none"}
    made = (MLATransformerConfig if latent else TransformerConfig)(**settings)
    rope = (config.get("rope_parameters") or {}).get("rope_theta") or config.get("rope_theta", 10000)
    files = WeightFiles(model)
    tensors = {name: files.read(name, 0, place.shape[0]) for name, place in files.tensors.items()}
    names = table(config, "local", padded)
    tp, ep = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_expert_model_parallel_rank()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    chunks = []
    for number in range(case.chunks):
        vp = number if case.chunks > 1 else None
        first, last = stage == 0 and number == 0, stage == case.stages - 1 and number == case.chunks - 1
        spec = get_gpt_decoder_block_spec(made, use_transformer_engine=False, normalization="RMSNorm", vp_stage=vp)
        for layer in spec.layer_specs if latent else ():  # Megatron's own has no such heads; the weights are enough
            layer.submodules.self_attention.submodules.core_attention = _NoAttention
        chunk = GPTModel(
            made, spec, padded, 64, first, last, rotary_base=rope, vp_stage=vp, position_embedding_type="rope",
            share_embeddings_and_output_weights=names.tied,
        )  # fmt: skip
        offset = get_transformer_layer_offset(made, vp)
        count = (made.num_moe_experts or 0) // case.experts
        for name, tensor in chunk.state_dict().items():
            if tensor is None or name.endswith("_extra_state"):
                continue
            entry = names.find(name, offset, ep * count)
            share = (0, 1) if entry.expert is not None else (tp, case.tensor)
            with torch.no_grad():
                values = shard(entry, tensors, *share)
                assert values.shape == tensor.shape, name
                tensor.copy_(values)
        chunks.append(chunk)
    return chunks


def _sharded(chunks: list[Any], case: Case) -> dict[str, Any]:
    from megatron.core import parallel_state

    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    metadata = {"dp_cp_group": group} | ({case.metadata: True} if case.metadata else {})
    return {f"model{number}": chunk.sharded_state_dict(metadata=metadata) for number, chunk in enumerate(chunks)}


def _write(folder: Path, name: str, case: Case) -> None:
    from megatron.core import dist_checkpointing

    _parallel(case)
    chunks = build(folder / "models" / case.model, case, PADDED)
    if dist.get_rank() == 0:
        (folder / name).mkdir()
    dist.barrier()
    dist_checkpointing.save(_sharded(chunks, case), str(folder / name))


def _logits(model: Path, file: Path) -> None:
    (chunk,) = build(model, Case(""), PADDED)
    ids = tokens()
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)[None, None]
    with torch.no_grad():
        found = chunk(ids, positions, mask)
    torch.save(found, file)


def _load(folder: Path, name: str) -> None:
    """Megatron loads what was converted to its format; equal to what the HF model gives it."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.validation import StrictHandling

    case = Case(name, tensor=2, metadata="non_homogeneous_layers" if name.endswith("mixed") else "")
    _parallel(case)
    wanted = build(folder / "models" / name, case, PADDED)
    loaded = build(folder / "models" / name, case, PADDED)
    with torch.no_grad():
        for parameter in loaded[0].parameters():
            parameter.fill_(7.0)
    # Its modules ask for states of their own (_extra_state) beside the weights, which are empty.
    place = str(folder / "back" / name)
    state = dist_checkpointing.load(_sharded(loaded, case), place, strict=StrictHandling.LOG_UNEXPECTED)
    loaded[0].load_state_dict(state["model0"], strict=False)
    for (key, one), other in zip(wanted[0].named_parameters(), loaded[0].parameters(), strict=True):
        assert torch.equal(one, other), f"{name}: {key}"


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main(Path(sys.argv[1]))
