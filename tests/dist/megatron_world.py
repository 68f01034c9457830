"""The four ranks of test_megatron_rule1.py and its one-process reference. Run as a program with a folder to write to.

The world is a store and a rank table: 0 controller (hosts the store), 1 and 2 trainers, 3 reward. The trainers' default
process group is Megatron-Core's and holds only them. `link`, an explicit group over a prefix of the same store, joins
the controller, the first trainer and the reward rank. The processes are forked after Megatron-Core is imported, which
costs more than everything else here.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CONTROLLER, TRAINERS, REWARD = 0, (1, 2), 3
LINK = (CONTROLLER, TRAINERS[0], REWARD)  # global ranks in the order of their rank in the link
DEADLINE = timedelta(seconds=240)  # 8 s on an idle machine; a world of 64 ranks may start beside it
VOCAB, ROWS, LENGTH = 64, 4, 16
PERTURBED = "output_layer.weight"


def send(store: dist.Store, queue: str, message: dict[str, Any]) -> None:
    store.queue_push(queue, json.dumps(message).encode())


def receive(store: dist.Store, queue: str) -> dict[str, Any]:
    return json.loads(store.queue_pop(queue))


def connect(port: int) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=DEADLINE)


def join_link(store: dist.Store, rank: int) -> dist.ProcessGroupGloo:
    """Collective over LINK. Independent of any default group."""
    return dist.ProcessGroupGloo(dist.PrefixStore("link/0", store), LINK.index(rank), len(LINK), DEADLINE)


def make_batch() -> Tensor:
    return torch.randint(VOCAB, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(5))


@dataclass
class Trainer:
    """Megatron-Core's own model, data-parallel wrapper, schedule and Adam on this process's default group."""

    model: Any
    wrapped: Any
    optimizer: Any

    @classmethod
    def build(cls, tensor_parallel: int) -> Trainer:
        from megatron.core import parallel_state
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
        from megatron.core.transformer import TransformerConfig

        from hpcrl.engines.train.megatron import cpu

        cpu.install()
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
            model_parallel_cuda_manual_seed(1)
        torch.manual_seed(7)  # every rank draws the whole matrix and keeps its shard: TP1 and TP2 start equal
        config = TransformerConfig(
            num_layers=2,
            hidden_size=32,
            ffn_hidden_size=64,
            num_attention_heads=4,
            num_query_groups=2,
            tensor_model_parallel_size=tensor_parallel,
            use_cpu_initialization=True,
            normalization="RMSNorm",
            gated_linear_unit=True,
            activation_func=torch.nn.functional.silu,
            add_bias_linear=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            apply_rope_fusion=False,
            gradient_accumulation_fusion=False,
            persist_layer_norm=False,
            pipeline_dtype=torch.float32,
            finalize_model_grads_func=finalize_model_grads,
        )
        spec = get_gpt_layer_local_spec(normalization="RMSNorm")
        model = GPTModel(config, spec, VOCAB, LENGTH, position_embedding_type="rope")
        wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
        adam = OptimizerConfig(optimizer="adam", lr=1e-2, clip_grad=1.0, params_dtype=torch.float32)
        return cls(model, wrapped, get_megatron_optimizer(adam, [wrapped]))

    def step(self, tokens: Tensor) -> dict[str, Any]:
        """Loss, gradients before clipping, their norm, and the loss after one Adam step. Collective over the group."""
        self.optimizer.zero_grad()
        weights = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        loss = self._run(tokens, forward_only=False)
        gradients = {
            name: (p.main_grad.clone(), getattr(p, "partition_dim", None), getattr(p, "partition_stride", 1))
            for name, p in self.model.named_parameters()
        }
        updated, grad_norm, _ = self.optimizer.step()
        assert updated
        loss_after = self._run(tokens, forward_only=True)
        return {
            "loss": loss,
            "loss_after": loss_after,
            "grad_norm": float(grad_norm),
            "gradients": gradients,
            "weights": weights,
        }

    def _run(self, tokens: Tensor, forward_only: bool) -> float:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.wrapped.zero_grad_buffer()
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(tokens.chunk(2)),
            model=[self.wrapped],
            num_microbatches=2,
            seq_length=LENGTH,
            micro_batch_size=ROWS // 2,
            forward_only=forward_only,
        )
        return float(sum(losses) / len(losses))


def forward_step(batches: Any, model: Any) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor]]]:
    tokens = next(batches)
    inputs, labels = tokens[:, :-1], tokens[:, 1:]
    future = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), diagonal=1)
    losses = model(inputs, torch.arange(LENGTH).expand_as(inputs), future, labels=labels)
    return losses, lambda per_token: (per_token.mean(), per_token.mean().detach())


def run_trainer(rank: int, port: int, folder: Path) -> None:
    store = connect(port)
    trainer_rank = TRAINERS.index(rank)
    trainer = link = pending = None
    tokens = torch.zeros(ROWS, LENGTH + 1, dtype=torch.int64)
    verdict = torch.zeros(1)
    while (command := receive(store, f"inbox/{rank}")["do"]) != "leave":
        answer: dict[str, Any] = {"rank": rank, "did": command}
        if command == "build":
            group_store = dist.PrefixStore("trainer/0", store)
            dist.init_process_group("gloo", store=group_store, rank=trainer_rank, world_size=len(TRAINERS))
            trainer = Trainer.build(tensor_parallel=len(TRAINERS))
            answer["default_group_size"] = dist.get_world_size()
        elif command == "link":
            link = join_link(store, rank)
        elif command == "receive_batch":
            link.broadcast(tokens, root=LINK.index(CONTROLLER)).wait()
            pending = link.recv([verdict], LINK.index(REWARD), 0)  # stays open during the step
        elif command == "step":
            dist.broadcast(tokens, src=0)  # the other trainer is not in the link
            report = trainer.step(tokens)
            torch.save(report, folder / f"trainer_{trainer_rank}.pt")
            answer |= {"loss": report["loss"], "grad_norm": report["grad_norm"]}
        elif command == "publish":
            pending.wait()
            answer["verdict"] = float(verdict)
            link.broadcast(trainer.model.decoder.final_layernorm.weight.detach(), root=LINK.index(rank)).wait()
        send(store, "events", answer)


def run_reward(rank: int, port: int) -> None:
    store = connect(port)
    link = None
    tokens = torch.zeros(ROWS, LENGTH + 1, dtype=torch.int64)
    weight = torch.zeros(32)
    while (command := receive(store, f"inbox/{rank}")["do"]) != "leave":
        answer: dict[str, Any] = {"rank": rank, "did": command}
        if command == "link":
            link = join_link(store, rank)
        elif command == "receive_batch":
            link.broadcast(tokens, root=LINK.index(CONTROLLER)).wait()
            answer["sum"] = int(tokens.sum())
        elif command == "publish":
            link.send([tokens.sum().float().reshape(1)], LINK.index(TRAINERS[0]), 0).wait()
            link.broadcast(weight, root=LINK.index(TRAINERS[0])).wait()
            answer["weight"] = weight.tolist()
        send(store, "events", answer)


def run_controller(ports: Connection, everyone_left: Event, folder: Path) -> None:
    """Push each command to all its ranks, take part in its collective, gather the answers; then the next one."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=DEADLINE, wait_for_workers=False)
    ports.send(store.port)
    answers: list[dict[str, Any]] = []

    def order(command: str, ranks: tuple[int, ...], own_part: Callable[[], Any] | None = None) -> None:
        for rank in ranks:
            send(store, f"inbox/{rank}", {"do": command})
        if own_part is not None:
            own_part()
        answers.extend(receive(store, "events") for _ in ranks)

    links: list[dist.ProcessGroupGloo] = []
    weight = torch.zeros(32)
    order("build", TRAINERS)
    order("link", LINK[1:], lambda: links.append(join_link(store, CONTROLLER)))
    order("receive_batch", LINK[1:], lambda: links[0].broadcast(make_batch(), root=0).wait())
    order("step", TRAINERS)
    order("publish", LINK[1:], lambda: links[0].broadcast(weight, root=LINK.index(TRAINERS[0])).wait())
    answers.append({"rank": CONTROLLER, "did": "publish", "weight": weight.tolist()})
    for rank in (*TRAINERS, REWARD):
        send(store, f"inbox/{rank}", {"do": "leave"})
    (folder / "answers.json").write_text(json.dumps(answers))
    everyone_left.wait()  # the store must outlive its clients


def run_reference(folder: Path) -> None:
    """The same step by one process without tensor parallelism, and once more from weights with one number changed."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.save(Trainer.build(tensor_parallel=1).step(make_batch()), folder / "reference.pt")
    perturbed = Trainer.build(tensor_parallel=1)
    with torch.no_grad():
        perturbed.model.get_parameter(PERTURBED)[0, 0] += 0.01
    torch.save(perturbed.step(make_batch()), folder / "perturbed.pt")


def main(folder: Path) -> int:
    """0 when every process ended well in time; otherwise names those that did not."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message=".*Transformer Engine and Apex.*")
    importlib.import_module("megatron.core.models.gpt")
    importlib.import_module("megatron.core.optimizer")
    deadline = time.monotonic() + DEADLINE.total_seconds()
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    everyone_left = context.Event()
    processes: dict[str, BaseProcess] = {}

    def start(name: str, target: Callable[..., None], *args: Any) -> None:
        processes[name] = context.Process(target=target, args=args, daemon=True)
        processes[name].start()

    start("controller", run_controller, sender, everyone_left, folder)
    port = receiver.recv()
    for rank in TRAINERS:
        start(f"trainer {rank}", run_trainer, rank, port, folder)
    start("reward", run_reward, REWARD, port)
    start("reference", run_reference, folder)
    for name in [*list(processes)[1:], "controller"]:
        if name == "controller":
            everyone_left.set()
        processes[name].join(max(0.0, deadline - time.monotonic()))
        if processes[name].exitcode != 0:
            print(f"{name} ended with {processes[name].exitcode}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
