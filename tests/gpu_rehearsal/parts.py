"""What is rehearsed: parts of hpcrl that run on a device, and their numbers."""

from __future__ import annotations

import ctypes
import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from hpcrl.algorithms.factory import make_algorithm
from hpcrl.comm.weight_checksums import LoadedSums, add_sums, shard_checksums
from hpcrl.comm.weight_transfer import (
    SendSchedule,
    UpdateGroup,
    WeightReceiver,
    WeightSender,
    connect,
    receive_layout,
    send_layout,
)
from hpcrl.config import parse
from hpcrl.engines.expert_routes import RouteShape
from hpcrl.engines.gen.generation_engine import Request, SamplingParams
from hpcrl.engines.gen.native.engine import NativeEngine
from hpcrl.engines.hf_folder import read_safetensors
from hpcrl.engines.train.deepspeed.spec import DeepSpeedConfig
from hpcrl.engines.train.fsdp2.engine import SMALL_MODEL_BYTES, FSDP2Engine
from hpcrl.messaging.abortable import AbortableGroup
from hpcrl.rollout.batch import Batch
from hpcrl.spec.trajectory import FIELDS, declare
from hpcrl.spec.weight_layout import RequiredSlices, full_slice
from tests.engines.worlds import make_batch, make_model_folder, norms_of, run_ranks
from tests.gpu_rehearsal.device import SYNCHRONIZE, gpu, waits
from tests.gpu_rehearsal.ledger import Ledger
from tests.gpu_rehearsal.streams import Transfers

LENGTHS = (9, 12, 5, 14)
PLAN = [[0, 1], [2, 3]]
FEW, MORE = 2, 4
"""Layers of the models, whose tables are compared."""

Section = Callable[[str], AbstractContextManager[None]]
Coefficients = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """run(folder of a model, device, section) on each of `ranks` ranks: what it computes there, on the host."""

    run: Callable[[Path, str, Section], Coefficients]
    ranks: int = 1


@dataclass(frozen=True)
class Result:
    """Of a rank: its numbers on the device and on the CPU, and what was counted with FEW and with MORE layers."""

    found: Coefficients
    wanted: Coefficients
    counted: Mapping[int, Mapping[str, Counter[tuple[str, str]]]]


def rehearse(name: str, folder: Path) -> list[Result]:
    """The part on the device and on the CPU, by rank, in processes of its own."""
    changes = {"num_key_value_heads": 4}  # heads that share keys have another kernel for float32 on a GPU
    models = {n: make_model_folder("qwen2", folder / f"{n}", num_hidden_layers=n, **changes) for n in (FEW, MORE)}
    return run_ranks(PARTS[name].ranks, _rehearse, name, models)


def _rehearse(name: str, models: Mapping[int, Path]) -> Result:
    part, ledgers, found = PARTS[name], {n: Ledger() for n in models}, {}
    for layers, ledger in ledgers.items():
        with gpu(ledger):
            found[layers] = part.run(models[layers], "cuda", ledger.section)
    wanted = part.run(models[FEW], "cpu", lambda _: nullcontext())  # after which Megatron's process has none
    return Result(found[FEW], wanted, {n: ledger.sections for n, ledger in ledgers.items()})


def batch_to_train() -> Batch:
    batch = make_batch(LENGTHS)
    batch.advantages = torch.cos(torch.arange(batch.num_tokens))
    batch.ref_logprobs = -(torch.sin(torch.arange(batch.num_tokens)) ** 2)
    return batch


def trainer_config(**trainer: Any) -> Any:
    return parse(
        {
            "trainer": {"lr": 1e-2, "logits_chunk_tokens": 8, **trainer},
            "algorithm": {"kl_loss_coef": 0.1, "entropy_loss_coef": 0.01},
        }
    )


def _trains(engine: Any, config: Any, name: str, section: Section) -> Coefficients:
    """Everything that a trainer's engine does."""
    batch, objective = batch_to_train(), make_algorithm(config).objective
    found: Coefficients = {}

    def step() -> Any:
        return engine.train_step(batch, PLAN, objective, norms_of(batch))

    found["first step"] = step()
    with section(f"{name}: step"):
        found["step"] = step()
    with section(f"{name}: log-probs"):
        found["log-probs"] = engine.logprobs(batch, PLAN, 0.7)
    found["entropies"] = engine.entropies(batch, PLAN, 0.7)
    engine.snapshot()
    with section(f"{name}: snapshot"):
        files = engine.snapshot()
    found["snapshot"] = [bytes(file.buffer) for file in files.values() if hasattr(file, "buffer")]
    with section(f"{name}: offload"):
        engine.offload()
    with section(f"{name}: onload"):
        engine.onload()
    found["step after"] = step()
    with section(f"{name}: whole weights"):
        named = list(engine.named_weights())
    found |= {key: tensor.cpu() for key, tensor in named}
    return found


def _fsdp2(param_dtype: str, by_layer: bool = False) -> Callable[[Path, str, Section], Coefficients]:
    """by_layer: as a model that is too large to be gathered as a whole."""

    def run(folder: Path, device: str, section: Section) -> Coefficients:
        config = trainer_config(param_dtype=param_dtype)
        with mock.patch("hpcrl.engines.train.fsdp2.engine.SMALL_MODEL_BYTES", 0 if by_layer else SMALL_MODEL_BYTES):
            engine = FSDP2Engine(config.trainer, folder, dtype=torch.float32, total_steps=9, device=device)
        assert (engine.sharded, engine.keep_gathered) == (param_dtype == "bfloat16", not by_layer)
        return _trains(engine, config, "fsdp2", section)

    return run


class _Instead:
    """A module with other attributes."""

    def __init__(self, module: Any, **others: Any):
        self._module = module
        vars(self).update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _megatron(folder: Path, device: str, section: Section) -> Coefficients:
    """With Megatron-Core's layers for machines without Transformer Engine, on the device."""
    from hpcrl.engines.train.megatron import engine, gpt_model, weights

    def on_device(*args: Any, **kwargs: Any) -> Any:
        core = transformer_config(*args, **kwargs)
        core.use_cpu_initialization = device == "cpu"
        return core

    transformer_config = gpt_model.transformer_config
    local = _Instead(torch, cuda=_Instead(torch.cuda, is_available=lambda: False))
    config = trainer_config(engine="megatron", param_dtype="float32")
    with (
        mock.patch.object(engine, "check_layers", lambda on_gpu: None),
        mock.patch.object(engine, "transformer_config", on_device),
        mock.patch.object(gpt_model, "torch", local),
        mock.patch.object(weights, "torch", local),
    ):
        return _trains(engine.MegatronEngine(config.trainer, folder, total_steps=9), config, "megatron", section)


def _moves(self: Any, tensors: Collection[Tensor], moved: Any) -> None:
    """In place of DeepSpeed's HostOffload._move, since there is no memory of the device: copies elsewhere, waited for
    once. What still refers to the old memory finds NaN."""
    from hpcrl.engines.train.deepspeed.state_memory import move

    def elsewhere(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        copy = storage.clone()
        ctypes.memset(storage.data_ptr(), 255, storage.nbytes())
        return copy

    waits(SYNCHRONIZE)
    move(tensors, elsewhere)


def _deepspeed(stage: int, param_dtype: str) -> Callable[[Path, str, Section], Coefficients]:
    def run(folder: Path, device: str, section: Section) -> Coefficients:
        from deepspeed.accelerator import set_accelerator
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
        from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

        from hpcrl.engines.train.deepspeed.engine import ZeroEngine  # before what it spares deepspeed

        set_accelerator(CUDA_Accelerator() if device == "cuda" else CPU_Accelerator())
        config = trainer_config(param_dtype=param_dtype)
        zero = DeepSpeedConfig(zero_stage=stage)
        engine = ZeroEngine(config.trainer, folder, zero=zero, dtype=torch.float32, total_steps=9, device=device)
        with mock.patch("hpcrl.engines.train.deepspeed.state_memory.HostOffload._move", _moves):
            return _trains(engine, config, f"deepspeed {stage}", section)

    return run


REQUESTS = (
    SamplingParams(12, temperature=0.8, ignore_eos=True),
    SamplingParams(12, top_p=0.9, top_k=20, min_p=0.01, ignore_eos=True),
    SamplingParams(12, temperature=0.0, ignore_eos=True),
    SamplingParams(12, ignore_eos=True),
)


def _outputs(engine: NativeEngine) -> Coefficients:
    found: Coefficients = {}
    for output in engine.step(20):
        arrays = (output.token_ids, output.gen_logprobs, output.versions, output.gen_logprobs_behaviour)
        found |= {f"{output.id} {i}": torch.from_numpy(a) for i, a in enumerate(arrays) if a is not None}
    return found


@mock.patch("hpcrl.engines.gen.sampling.adds_in_order", lambda device: False)  # the CPU's numbers would be others
def _native(folder: Path, device: str, section: Section) -> Coefficients:
    """Responses that share a prefix, which are interrupted, aborted, and computed again under new weights."""
    sizes: dict[str, Any] = {"max_num_seqs": 8, "max_length": 48, "block_tokens": 8, "dtype": torch.bfloat16}
    engine = NativeEngine(folder, **sizes, float32_head=True, prefix_staleness=1, device=device)
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12, 13, *[20 + i] * (3 * i + 1)] for i in range(len(REQUESTS))]
    requests = [Request(i, prompts[i], params, seed=i) for i, params in enumerate(REQUESTS)]
    engine.add(requests)
    with section("native: admission and a token"):
        engine.step(1)
    engine.step(1)
    with section("native: 4 tokens"):
        engine.step(4)
    with section("native: recompute"):
        engine.recompute()
    found = _outputs(engine)
    engine.sleep()
    engine.wake()
    loaded = [(name, tensor) for name, tensor in read_safetensors(folder)]
    with section("native: load weights"):
        engine.load_weights(((name, tensor.to(device)) for name, tensor in loaded), version=2)
    engine.add([replace(request, id=10 + request.id) for request in requests])
    return found | _outputs(engine)


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_key_value_heads": 4}


@mock.patch("hpcrl.engines.gen.sampling.adds_in_order", lambda device: False)
def _experts(folder: Path, device: str, section: Section) -> Coefficients:
    """The generator records the experts that it chooses, and the trainer chooses them again."""
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    folder = make_model_folder("qwen3_moe", folder / "experts", num_hidden_layers=layers, **EXPERTS)
    shape = RouteShape(layers, EXPERTS["num_experts_per_tok"], EXPERTS["num_experts"])
    batch = batch_to_train()
    declare(shape.field)
    sizes: dict[str, Any] = {"max_num_seqs": 4, "max_length": 32, "dtype": torch.float32}
    generator = NativeEngine(folder, **sizes, device=device, routes=shape)
    prompts = [row.tolist() for row in batch.token_ids.split(list(LENGTHS))]
    generator.add([Request(i, prompt, REQUESTS[i], seed=i) for i, prompt in enumerate(prompts)])
    generator.step(1)
    with section("experts: 4 tokens"):
        generator.step(4)
    outputs = generator.step(20)
    found: Coefficients = {f"routes {output.id}": torch.from_numpy(output.columns["routes"]) for output in outputs}
    routes = torch.cat([found[f"routes {i}"] for i in range(len(prompts))])
    batch.routes = routes[: batch.num_tokens]  # any choices
    config = trainer_config(param_dtype="float32")
    about: dict[str, Any] = {"dtype": torch.float32, "total_steps": 9, "device": device, "replay": True}
    engine = FSDP2Engine(config.trainer, folder, **about)
    objective = make_algorithm(config).objective
    found["first step"] = engine.train_step(batch, PLAN, objective, norms_of(batch))
    with section("experts: step"):
        found["step"] = engine.train_step(batch, PLAN, objective, norms_of(batch))
    with section("experts: log-probs"):
        found["log-probs"] = engine.logprobs(batch, PLAN, 0.7)
    FIELDS.pop("routes")
    return found | {name: tensor.cpu() for name, tensor in engine.named_weights()}


def _weights(folder: Path, device: str, section: Section) -> Coefficients:
    """From two trainer ranks to the generator of the second one."""
    rank, ranks, replica = dist.get_rank(), (0, 1), (1,)
    config = trainer_config(param_dtype="bfloat16")
    engine = FSDP2Engine(config.trainer, folder, dtype=torch.float32, total_steps=9, device=device)
    store = dist.PrefixStore(f"weights {folder.name} {device}", dist.distributed_c10d._get_default_store())
    gloo: Any = dist.ProcessGroupGloo
    group = gloo(store, rank, len(ranks), timedelta(seconds=60))
    if device == "cuda":
        group = AbortableGroup(Transfers(group), "weights", ranks, 60.0, set)
    connect(group, ranks, rank, ranks, replica)
    layout = [held.of(ranks) for held in engine.weight_layout()]
    if rank == 0:  # as to a replica that holds no weights itself
        send_layout(group, ranks, layout, replica)
    else:
        assert receive_layout(group, ranks, 0) == layout
    needs = {1: [RequiredSlices("bfloat16", (full_slice(held.shape),)) for held in layout]}
    channel = UpdateGroup(group, ranks, layout, needs)
    schedule, receiving = SendSchedule(rank, {0: channel}), WeightReceiver(rank, channel) if rank in replica else None
    sums = shard_checksums(rank, layout, [*needs.values()], engine.local_shards())
    if receiving is None:
        with section("weights: sent"):
            sending = WeightSender(schedule, [0], engine.local_shards(), 60.0)
            sending.finish()
        with section("weights: checked"):
            add_sums(channel, rank, ranks, sums)
        return {"errors": [*sending.errors]}
    sizes: dict[str, Any] = {"max_num_seqs": 2, "max_length": 16, "dtype": torch.bfloat16}
    generator = NativeEngine(folder, **sizes, device=device, load=False)
    loaded = LoadedSums(layout, needs[1])
    with section("weights: received"):
        sending = WeightSender(schedule, [0], engine.local_shards(), 60.0)
        generator.load_weights(receiving.tensors(sending), version=1)
    with section("weights: checked"):
        for _ in loaded.noting(generator.loaded_weights([held.name for held in layout])):
            pass
        assert loaded.differing(add_sums(channel, rank, ranks, sums)) == []
    return {name: tensor.cpu() for name, tensor in generator.loaded_weights([held.name for held in layout])}


PARTS: dict[str, Part] = {
    "fsdp2 plain": Part(_fsdp2("float32")),
    "fsdp2 sharded": Part(_fsdp2("bfloat16"), ranks=2),
    "fsdp2 by layer": Part(_fsdp2("bfloat16", by_layer=True), ranks=2),
    "experts": Part(_experts),
    "deepspeed 2": Part(_deepspeed(2, "bfloat16")),
    "deepspeed 3": Part(_deepspeed(3, "float32")),
    "megatron": Part(_megatron),
    "native": Part(_native),
    "weights": Part(_weights, ranks=2),
}


def same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, Tensor):
        return found.dtype == wanted.dtype and torch.equal(found, wanted)
    return bool(found == wanted)


def differing(result: Result) -> list[str]:
    assert result.found.keys() == result.wanted.keys()
    return [key for key, wanted in result.wanted.items() if not same(result.found[key], wanted)]
