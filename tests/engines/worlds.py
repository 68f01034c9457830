"""Small models, batches and process groups for the tests of training engines."""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from hpcrl.algorithms.interface import Objective, Outputs
from hpcrl.metrics.stats import Stats, stat
from hpcrl.rollout.batch import Batch, Norms, batch_from_samples
from hpcrl.rollout.types import FinishReason, Sample
from hpcrl.spec.image_rows import image_rows
from hpcrl.spec.media import IMAGES
from hpcrl.spec.tables import TRAIN_ENGINES
from hpcrl.spec.trajectory import FIELDS, Level

FAMILIES = ("qwen2", "qwen3", "qwen3_moe", "llama", "gemma2")
VOCAB = 100
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 12,
}
"""Sizes of a small DeepSeek-V3."""
SHARED: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "layer_types": ["linear_attention", "full_attention"],
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-3,  # mixers' outputs are small, and their norm would amplify rounding
}
"""A layer with a gated delta rule before a layer with gated attention."""
V2: dict[str, Any] = {"topk_method": "group_limited_greedy", "num_experts_per_tok": 3}
EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "qwen2_moe": SHARED,
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24},
    "glm4_moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 12,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24, "sliding_window": 6},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 12, "moe_layer_start_index": 0},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "qwen3_next": SHARED | DELTA,
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": SHARED | DELTA,
    "deepseek_v3": LATENT,
    "deepseek_v2": LATENT | V2,
    "glm4_moe_lite": {k: v for k, v in LATENT.items() if k != "first_k_dense_replace"},
}
"""Sizes of small mixtures of experts."""


def make_model_folder(family: str, folder: Path, **changes: Any) -> Path:
    """A random two-layer model in HF layout. Weights are large, so that attention matters for every log-prob."""
    torch.manual_seed(1)
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
    }
    if "kv_lora_rank" in EXPERTS.get(family, {}):  # with a width of its own for every part of a head
        del settings["head_dim"]
    settings |= EXPERTS.get(family, {})
    if family == "gemma2":  # soft caps and a window small enough to have an effect
        settings |= {"sliding_window": 6, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
    config = AutoConfig.for_model(family, **settings | changes)
    model = AutoModelForCausalLM.from_config(config)
    for name, tensor in (*model.named_buffers(), *model.named_parameters()):
        if name.endswith(("e_score_correction_bias", "_proj_bias", "_proj.bias")):  # new ones are zero
            torch.nn.init.normal_(tensor, std=0.3)
        elif name.endswith("A_log"):  # new states are forgotten within a token
            torch.nn.init.normal_(tensor, -2.0, 1.0)
    model.save_pretrained(folder)
    return folder


def make_batch(lengths: Sequence[int], num_prompt_tokens: int = 3, seed: int = 0) -> Batch:
    """Random sequences; all but the first num_prompt_tokens are model tokens. Every third prompt is the same."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(0, VOCAB, (3, num_prompt_tokens)).astype(np.int32)
    samples = []
    for number, length in enumerate(lengths):
        zeros = np.zeros(length, np.float32)
        mask = np.arange(length) >= num_prompt_tokens
        ids = rng.integers(0, VOCAB, length).astype(np.int32)
        ids[:num_prompt_tokens] = prompts[number % 3, :length]
        samples.append(
            Sample(
                number << 24,
                FinishReason.STOP,
                token_ids=ids,
                loss_mask=mask,
                gen_logprobs=zeros,
                versions=zeros.astype(int),
                turn_ids=zeros.astype(int),
            )
        )
        if IMAGES.name in FIELDS:  # an earlier model takes images
            samples[-1].put(IMAGES.name, image_rows([]))
    return batch_from_samples(samples, list(range(len(lengths)))).check()


def by_steps(batch: Batch, counts: Sequence[int]) -> Batch:
    """The sequences of a batch as segments of fewer rows; each row takes the given number of sequences, in order."""
    ends = np.cumsum(counts).tolist()
    firsts = batch.select([end - count for end, count in zip(ends, counts, strict=True)])
    columns = {
        name: column if FIELDS[name].level is Level.TOKEN else getattr(firsts, name)
        for name, column in batch.columns.items()
    }
    states = torch.zeros(batch.num_tokens, dtype=torch.int32)
    states[batch.cu_seqlens[:-1]] = 1
    return Batch(batch.cu_seqlens[[0, *ends]], columns | {"states": states}).check()


def norms_of(batch: Batch) -> Norms:
    return Norms(float(batch.loss_mask.sum()), float(batch.num_sequences))


class Weighted(Objective):
    """A loss whose gradient differs from token to token, so that a mix-up of tokens shows."""

    def __init__(self, temperature: float = 1.0, entropy: bool = False):
        self.temperature, self.outputs = temperature, frozenset({"entropy"} if entropy else ())

    def loss(self, outputs: Outputs, batch: Batch, norms: Norms) -> tuple[Tensor, Stats]:
        weights = torch.cos(batch.token_ids.float() + batch.position_ids) + 0.5
        loss = -(outputs.logprobs * weights)[batch.loss_mask].sum() / norms.tokens
        if outputs.entropy is not None:
            loss = loss - 0.3 * (outputs.entropy * weights)[batch.loss_mask].sum() / norms.tokens
        return loss, {"actor/logprob": stat(outputs.logprobs, batch.loss_mask)}


def worst_difference(got: dict[str, Tensor], want: dict[str, Tensor]) -> float:
    """Largest over parameters of the largest difference relative to that parameter's largest gradient."""
    assert got.keys() == want.keys()
    return max(float((got[name] - want[name]).abs().max() / want[name].abs().max()) for name in want)


def transformers_results(folder: Path, batch: Batch, temperature: float) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs [T] and gradients of Weighted, one sequence at a time through transformers' eager attention."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    logprobs, entropies = [], []
    rotary = copy.deepcopy(model.base_model.rotary_emb)
    for tokens in batch.token_ids.split(batch.segment_lengths.tolist()):
        model.base_model.rotary_emb = copy.deepcopy(rotary)  # dynamic NTK rotates by the longest sequence so far
        log_p = (model(tokens[None]).logits[0, :-1] / temperature).log_softmax(-1)
        first = log_p.new_zeros(1)
        logprobs.append(torch.cat([first, log_p.gather(1, tokens[1:, None])[:, 0]]))
        entropies.append(torch.cat([first, -(log_p.exp() * log_p).sum(-1)]))
    found = torch.cat(logprobs) * batch.loss_mask
    outputs = Outputs(found, torch.cat(entropies) * batch.loss_mask)
    Weighted().loss(outputs, batch, norms_of(batch))[0].backward()
    return found.detach(), {name: p.grad for name, p in model.named_parameters()}


@contextlib.contextmanager
def process_group(rank: int, size: int, rendezvous: str) -> Iterator[None]:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=240)  # a loaded machine starts ranks one after the other
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size, timeout=timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _rank_main(
    rank: int, size: int, rendezvous: str, environ: dict[str, str], work: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.environ.clear()
    os.environ.update(environ)  # the server keeps its environment from its start
    with process_group(rank, size, rendezvous):
        torch.save(work(*args), f"{rendezvous}.{rank}")
    # As hpcrl.run ends a rank: a worker thread of gloo that drops a tensor while the interpreter finalizes ends the
    # process with SIGABRT (pytorch/pytorch#179291).
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def run_ranks(size: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """work(*args) on `size` new processes with a gloo group; their results by rank. `work` is a module's function.

    Without GPUs they are forked from a server that has already imported the engines, which would take most of the time.
    """
    method = "spawn" if os.environ.get("CUDA_VISIBLE_DEVICES") != "" else "forkserver"
    multiprocessing.set_forkserver_preload([f"hpcrl.engines.train.{name}.engine" for name in TRAIN_ENGINES])
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"{folder}/world"
        about = size, rendezvous, dict(os.environ), work, args
        mp.start_processes(_rank_main, about, nprocs=size, start_method=method)
        return [torch.load(f"{rendezvous}.{rank}", weights_only=False) for rank in range(size)]
