"""New weights from a real trainer to a real generator: in one process, through the trainer's gather, and between two
ranks; and the checksums of both."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hpcrl.cluster.layout import RoleLayout
from hpcrl.comm.transfer import TransferGroup
from hpcrl.engines.gen.native.engine import NativeEngine
from hpcrl.messaging.messages import UpdateWeights
from hpcrl.workers.generator import GeneratorRole
from hpcrl.workers.one_process import OneProcess
from hpcrl.workers.trainer import TrainerRole
from tests.dist.conftest import Threads
from tests.engines.worlds import make_model_folder
from tests.vlm import make_vlm
from tests.workers.conftest import LAYOUT, Stage

EPOCHS = itertools.count()
TRAINER = 2


class Pair:
    """The trainer on rank 2, and a generator in the same process or on rank 1."""

    def __init__(self, threads: Threads, stage: Stage, generator: int, settings: dict[str, Any]):
        epoch = next(EPOCHS)
        self._threads, self.generator = threads, generator
        layout = RoleLayout(MappingProxyType(LAYOUT | {"generator": (generator,), "env": ()}), 3)
        self.workers = {rank: stage.worker(rank, settings) for rank in {generator, TRAINER}}
        for worker in self.workers.values():
            worker.layout = layout
        trainer = self.workers[TRAINER]
        trainer.world.default_group("publishing", [TRAINER], epoch)
        self.trainer = trainer.roles["trainer"] = TrainerRole(trainer)
        self.role = self.workers[generator].roles["generator"] = GeneratorRole(self.workers[generator])
        self.engine: NativeEngine = self.role.engine
        ranks = sorted(self.workers)

        def build(rank: int) -> None:
            if rank in self.workers and len(ranks) > 1:
                group = self.workers[rank].world.group("weights", ranks, epoch)
                self.workers[rank]._publishing.open(TransferGroup(group, ranks), 0)

        threads.every(build)

    def update(self, version: int) -> None:
        def pull(rank: int) -> None:
            if rank in self.workers:
                self.workers[rank]._handlers[UpdateWeights](UpdateWeights(version, [0]), 1)

        self._threads.every(pull)

    def same(self) -> bool:
        """Whether the generator has the trainer's weights, in its own dtype."""
        given = {name: tensor.bfloat16() for name, tensor in self.trainer.engine.named_weights()}
        shown = {name: tensor.clone() for name, tensor in self.engine.loaded_weights(given)}
        return given.keys() == shown.keys() and all(torch.equal(shown[name], given[name]) for name in given)


SETTINGS = {"generator": {"dtype": "bfloat16"}, "check_weights": True}
WAYS = {
    "one process": (TRAINER, {}),
    "one rank": (TRAINER, {"trainer": {"param_dtype": "bfloat16"}}),  # whose parameters FSDP2 keeps in float32
    "two ranks": (1, {}),
}


@pytest.fixture(params=WAYS.values(), ids=WAYS)
def pair(threads: Threads, stage: Stage, request: pytest.FixtureRequest) -> Iterator[Pair]:
    generator, settings = request.param
    yield Pair(threads, stage, generator, SETTINGS | settings)
    dist.destroy_process_group()


def test_the_generator_has_the_trainers_weights_in_its_own_dtype(pair: Pair) -> None:
    asked: list[torch.dtype] = []
    load = pair.engine.load_weights

    def loading(named: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        load(((name, asked.append(tensor.dtype) or tensor) for name, tensor in named), version)

    pair.engine.load_weights = loading  # type: ignore[method-assign]
    pair.update(3)
    assert pair.engine.version == 3
    assert set(asked) == {torch.bfloat16 if pair.role.trainer is None else torch.float32}  # the parameters themselves
    assert pair.same()
    with torch.no_grad():
        for shard in pair.trainer.engine.shards:
            shard += 1
    assert not pair.same()
    pair.update(4)
    assert pair.engine.version == 4 and pair.same()


@pytest.mark.parametrize(
    ("matrix", "name"),
    [("qkv", "self_attn.k_proj.weight"), ("out", "self_attn.o_proj.weight"), ("mlp_norm", "post_attention_layernorm")],
)
def test_a_corrupted_byte_of_a_fused_matrix_is_named(pair: Pair, matrix: str, name: str) -> None:
    load = pair.engine.load_weights

    def corrupting(named: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        load(named, version)
        values = getattr(pair.engine._weights.layers[0], matrix)
        values = values[:, 16:24] if matrix == "qkv" else values  # q has 16 columns, k and v 8 each
        values.view(torch.int16)[..., -1] ^= 1

    pair.engine.load_weights = corrupting  # type: ignore[method-assign]
    told = (
        rf"check_weights: model.layers.0.{name}.* of weights 7 on generator rank {pair.generator} is not what .* 1 of"
    )
    with pytest.raises(RuntimeError, match=told):
        pair.update(7)


def test_an_engine_without_readable_weights_is_checked_while_loading(pair: Pair) -> None:
    class Closed:
        def __init__(self, engine: NativeEngine):
            self._engine, self.names = engine, list[str]()

        def load_weights(self, named: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
            self._engine.load_weights(((self.names.append(name), (name, t))[1] for name, t in named), version)

    closed = pair.role.engine = Closed(pair.engine)
    if pair.role.trainer is not None:
        pair.role.trainer = OneProcess(closed, pair.trainer.engine, shared=False)
    pair.update(1)
    assert len(closed.names) > 5 and pair.same()
    given = pair.trainer.engine.local_shards

    def other() -> Iterator[torch.Tensor]:  # at the second call, which is for the checksums
        for number, tensor in enumerate(given()):
            yield tensor + (number == 2) * len(calls)
        calls.append(1)

    calls: list[int] = [] if pair.generator != TRAINER else [1]
    pair.trainer.engine.local_shards = other
    with pytest.raises(RuntimeError, match=r"check_weights: .* of weights 2"):
        pair.update(2)


LORA_WAYS = {
    "one process": (TRAINER, {}),
    "one rank": (TRAINER, {"fsdp2": {"cpu_offload": True}}),  # which FSDP2 gathers
    "two ranks": (1, {}),
}


@pytest.mark.parametrize("way", LORA_WAYS)
def test_only_adapters_are_sent(way: str, threads: Threads, stage: Stage) -> None:
    generator, trainer = LORA_WAYS[way]
    settings = SETTINGS | {"trainer": {"lora": {"rank": 2, "target_modules": ["k_proj", "down_proj"]}} | trainer}
    pair = Pair(threads, stage, generator, settings)
    try:
        asked: list[str] = []
        load = pair.engine.load_weights

        def loading(named: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
            load(((asked.append(name) or name, tensor) for name, tensor in named), version)

        pair.engine.load_weights = loading  # type: ignore[method-assign]
        for version in (0, 1):
            asked.clear()
            pair.update(version)
            names = {name.partition(".lora_")[0].rpartition(".")[2] for name in asked}
            assert names == {"k_proj", "down_proj"} and len(asked) == 4 * pair.engine._arch.num_layers
            assert pair.engine.version == version and pair.same()
            with torch.no_grad():
                for name in pair.trainer.engine.weights.names:
                    pair.trainer.engine.weights[name].add_(1)
            assert not pair.same()

        def corrupting(named: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
            load(named, version)
            pair.engine._weights.layers[0].adapters["qkv"][0].second.view(torch.int16)[-1] ^= 1

        pair.engine.load_weights = corrupting  # type: ignore[method-assign]
        with pytest.raises(
            RuntimeError, match=r"check_weights: model.layers.0.self_attn.k_proj.lora_B.weight of .* 1 of"
        ):
            pair.update(2)
    finally:
        dist.destroy_process_group()


MERGED_WAYS = {
    "one rank": (TRAINER, {}),
    "gathered": (TRAINER, {"fsdp2": {"cpu_offload": True}}),
    "two ranks": (1, {"param_dtype": "bfloat16"}),
}


@pytest.mark.parametrize("way", MERGED_WAYS)
def test_matrices_with_adapters_of_experts_are_sent_merged(way: str, threads: Threads, tmp_path: Path) -> None:
    """The first update of each start has all weights; later ones leave out blocks without adapters."""
    generator, trainer = MERGED_WAYS[way]
    settings = SETTINGS | {"trainer": {"lora": {"rank": 2, "parts": ["experts"]}} | trainer}
    stage = Stage(threads, make_model_folder("qwen3_moe", tmp_path / "model"))
    for start in range(2):  # the second one begins with other adapters, as after a resume
        pair = Pair(threads, stage, generator, settings)
        try:
            _check_merged(pair, start)
        finally:
            dist.destroy_process_group()


def _check_merged(pair: Pair, start: int) -> None:
    assert pair.role.trainer is None and pair.engine._lora is None
    weights, sent, load = pair.trainer.engine.weights, list[str](), pair.engine.load_weights

    def loading(named: Iterable[tuple[str, torch.Tensor]], *others: Any) -> None:
        load(((sent.append(name) or name, tensor) for name, tensor in named), *others)

    pair.engine.load_weights = loading  # type: ignore[method-assign]
    changed = [name for name in weights.published if ".mlp." in name]
    for version in range(start, 3):
        with torch.no_grad():
            for name in weights.names:
                weights[name].add_(0.5 * version)
        assert version == start or not pair.same()
        sent.clear()
        pair.update(version)
        assert sent == (changed if version > start else weights.published) and pair.same()
    some = "model.layers.1.mlp.experts.down_proj"
    base = dict(pair.trainer.engine._gathered([some], {}))[some].bfloat16()
    ((_, shown),) = pair.engine.loaded_weights([some])
    assert not torch.equal(shown, base)

    def corrupting(named: Iterable[tuple[str, torch.Tensor]], *others: Any) -> None:
        load(named, *others)
        pair.engine._weights.layers[1].mlp.down.view(torch.int16)[-1, -1, -1] ^= 1

    pair.engine.load_weights = corrupting  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match=rf"check_weights: {some} of .* 1 of"):
        pair.update(4)


FREEZE = {"trainer": {"freeze": ["vision", "merger"]}, "model": {"tiny": {"architecture": "qwen2_5_vl"}}}
FREEZE_WAYS = {
    "one process": (TRAINER, {}),
    "one rank": (TRAINER, {"trainer": {"fsdp2": {"cpu_offload": True}}}),  # which FSDP2 gathers
    "shared weights": (TRAINER, {"generator": {"dtype": "float32"}}),
    "two ranks": (1, {}),
    "in turns": (TRAINER, {"layout": {"offload": "always"}}),
}


@pytest.mark.parametrize("way", FREEZE_WAYS)
def test_frozen_weights_are_sent_only_once(way: str, threads: Threads, tmp_path: Path) -> None:
    generator, changes = FREEZE_WAYS[way]
    settings = SETTINGS | FREEZE | changes
    settings["trainer"] = FREEZE["trainer"] | settings["trainer"]
    stage = Stage(threads, make_vlm("qwen2_5_vl", tmp_path / "model"))
    for start in range(2):  # the second one has other weights than the folder, as after a resume
        pair = Pair(threads, stage, generator, settings)
        try:
            if start:
                _add_one(pair, frozen=True)
            _check_frozen(pair, way)
        finally:
            dist.destroy_process_group()


def _add_one(pair: Pair, frozen: bool) -> None:
    weights = pair.trainer.engine.weights
    with torch.no_grad():
        for name in weights.names:
            if name.startswith("model.visual.") == frozen:
                weights[name].add_(1)


def _check_frozen(pair: Pair, way: str) -> None:
    sent: list[str] = []
    load = pair.engine.load_weights

    def loading(named: Iterable[tuple[str, torch.Tensor]], *others: Any) -> None:
        load(((sent.append(name) or name, tensor) for name, tensor in named), *others)

    pair.engine.load_weights = loading  # type: ignore[method-assign]
    names = pair.trainer.engine.weights.names
    trained = [name for name in names if not name.startswith("model.visual.")]
    assert len(trained) < len(names)
    alone = pair.role.trainer
    assert (alone is not None and alone._shared) == (way == "shared weights")
    compared = Pair.same if way != "shared weights" else lambda pair: True  # in float32, the parameters themselves
    pair.update(0)
    assert sent == names and compared(pair)
    features = pair.engine._images._known  # type: ignore[union-attr]
    features[b"image"] = torch.zeros(1)
    sent.clear()
    _add_one(pair, frozen=False)
    if way == "in turns":
        pair.engine.sleep()
        with pytest.raises(ValueError, match="some weights are not in the update, and the generator has none"):
            load(pair.trainer.engine.named_weights(), 1, ["lm_head.weight"])
        pair.update(1)
        assert sent == names and pair.engine.version == 1 and compared(pair)
        return
    pair.update(1)
    assert sent == trained and pair.engine.version == 1 and compared(pair)
    assert features, "the tower is the same"
    if way == "two ranks":
        (channel,) = pair.workers[TRAINER]._publishing._channels.values()
        numbers = sum(pair.trainer.engine.weights[name].numel() for name in trained)
        pieces = [piece for step in channel.without_frozen.steps for piece in step]
        assert sum(piece.num_bytes for piece in pieces) == 2 * numbers
    if way != "shared weights":
        _add_one(pair, frozen=True)
        with pytest.raises(RuntimeError, match=r"check_weights: model\.visual\..* of weights 2 on generator rank"):
            pair.update(2)
