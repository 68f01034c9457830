"""NCCL's communicators for new weights, by hand: how many, their buffers, and how long they take."""

from __future__ import annotations

from typing import Any

import pytest

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import Config, parse
from hpcrl.launch.resources import update_rows
from hpcrl.planner.memory import memory
from hpcrl.planner.traffic import WeightGroups, seconds_to_make, weight_groups
from tests.planner.test_memory import shape_of

MIB = 1 << 20
NODE = {"ranks_per_node": 8, "gpus_per_node": 8}


def apart(trainers: int, generators: int, tensor: int = 1, one_node: bool = False, gpus: int = 8) -> Config:
    """Trainers and generators on separate nodes, or all on one."""
    roles = [["trainer", "generator"]] if one_node else [["trainer"], ["generator"]]
    roles[0] += ["controller", "reward"]
    components: dict[str, Any] = {f"c{i}": NODE | {"roles": own} for i, own in enumerate(roles)}
    if not gpus:
        components = {}
    replicas = {"num_ranks": generators, "tensor_parallel": tensor, "colocate_with": None}
    layout = {"trainer": {"num_ranks": trainers}, "generator": replicas}
    engine = {"engine": "vllm" if tensor > 1 else "native", "dtype": "bfloat16"}
    return parse({"layout": layout, "cluster": {"components": components}, "generator": engine})


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        # 8 channels x 16 pieces of 128 KiB = 16 MiB between nodes; .35 s and .0144 s a rank
        (apart(8, 8), WeightGroups(8, 1, 8 * 16 * MIB, 16 * MIB, 8 * (0.35 + 9 * 0.0144))),  # 3.8 s
        (apart(8, 8, 8), WeightGroups(1, 1, 16 * MIB, 16 * MIB, 0.35 + 16 * 0.0144)),
        (apart(64, 64), WeightGroups(64, 1, 1024 * MIB, 16 * MIB, 64 * (0.35 + 65 * 0.0144))),  # 82 s
        (apart(64, 64, 8), WeightGroups(8, 1, 128 * MIB, 16 * MIB, 8 * (0.35 + 72 * 0.0144))),  # 11 s
        # On one node, 8 channels to each peer: 2 MiB on the sender's side, 10 MiB on the receiver's.
        (apart(1, 1, one_node=True), WeightGroups(1, 1, 16 * MIB, 80 * MIB, 0.35 + 2 * 0.0144)),
        (apart(4, 4, one_node=True), WeightGroups(4, 1, 4 * 16 * MIB, 4 * 80 * MIB, 4 * (0.35 + 5 * 0.0144))),
        # 10 trainers, of which two are on the node of both generators: 11 ranks get 4 channels to each.
        (
            apart(10, 2, one_node=True),
            WeightGroups(2, 1, 2 * 16 * MIB, (2 * 4 * 10 + 16) * MIB, 2 * (0.35 + 11 * 0.0144)),
        ),
    ],
    ids=["8+8", "8+8 of one replica", "64+64", "64+64 of replicas of 8", "1+1", "4+4", "10+2"],
)
def test_communicators_with_their_buffers_and_setup_times_by_hand(config: Config, expected: WeightGroups) -> None:
    found = weight_groups(config, RoleLayout.from_config(config))
    assert found == WeightGroups(
        expected.of_trainer,
        expected.of_generator,
        expected.trainer_bytes,
        expected.generator_bytes,
        pytest.approx(expected.seconds),
    )


@pytest.mark.parametrize(("ranks", "seconds"), [(8, 24.2), (64, 1551.6)])
def test_a_communicator_per_pair_would_take_longer(ranks: int, seconds: float) -> None:
    """One for each trainer and generator, one after another, at the same rate."""
    assert ranks * ranks * seconds_to_make(2) == pytest.approx(seconds, abs=0.1)


def test_the_plan_counts_communication_buffers_and_explains_them() -> None:
    shape = shape_of("Qwen2.5-0.5B")
    config = apart(8, 8)
    layout = RoleLayout.from_config(config)
    planned = {p.role: p.num_bytes for kind in memory(config, layout, shape) for p in kind.parts if "NCCL" in p.name}
    assert planned == {"trainer": 128 * MIB, "generator": 16 * MIB}
    assert [text for _, text in update_rows(config, layout, shape)][1] == (
        "over 8 NCCL communicator(s) a trainer rank, about 128 MiB of buffers, and 1 a generator rank, 16 MiB; made at "
        "the start, one after another, in about 3.8 s"
    )


def test_gloo_needs_no_communicator_buffers() -> None:
    shape, config = shape_of("Qwen2.5-0.5B"), apart(8, 8, gpus=0)
    layout = RoleLayout.from_config(config)
    assert not [p for kind in memory(config, layout, shape) for p in kind.parts if "NCCL" in p.name]
    assert len(list(update_rows(config, layout, shape))) == 1
