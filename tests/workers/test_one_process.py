"""A trainer and a generator of one process: the same weights in the same memory, versions as ever."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import TrainerConfig, parse
from hpcrl.engines.gen.generation_engine import Output, Request, SamplingParams
from hpcrl.engines.gen.native.engine import NativeEngine
from hpcrl.engines.train.fsdp2.engine import FSDP2Engine
from hpcrl.planner.generator import in_one_process, shares_weights
from hpcrl.workers.one_process import OneProcess
from tests.checkpoint.writing import write_files
from tests.engines.worlds import Weighted, make_batch, make_model_folder, norms_of, process_group

pytestmark = pytest.mark.numerics
NATIVE = ("qwen2", "qwen3", "qwen3_moe", "llama")


@pytest.fixture(autouse=True, scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with process_group(0, 1, str(tmp_path_factory.mktemp("world") / "store")):
        yield


class Pair:
    def __init__(self, family: str, folder: Path, shared: bool = True, dtype: str = "float32"):
        self.folder = make_model_folder(family, folder / family, tie_word_embeddings=family != "llama")
        number_type = getattr(torch, dtype)
        self.trainer = FSDP2Engine(
            TrainerConfig(lr=1e-2, param_dtype=dtype), self.folder, dtype=number_type, total_steps=10
        )
        self.generator = self.new_generator(number_type)
        self.link = OneProcess(self.generator, self.trainer, shared)
        self.batch = make_batch([12, 9, 17])

    def new_generator(self, dtype: torch.dtype) -> NativeEngine:
        return NativeEngine(self.folder, max_num_seqs=4, max_length=32, dtype=dtype, block_tokens=8, load=False)

    def load(self, version: int) -> None:
        self.link.load(self.link.weights(), version)

    def train(self) -> None:
        self.trainer.train_step(self.batch, [[0, 1, 2]], Weighted(), norms_of(self.batch))

    def answers(self, generator: NativeEngine, temperature: float = 1.0) -> dict[int, Output]:
        params = SamplingParams(8, temperature, ignore_eos=True)
        generator.add([Request(i, list(range(3 + i, 9 + 2 * i)), params, i) for i in range(3)])
        found: dict[int, Output] = {}
        while generator.progress():
            found |= {output.id: output for output in generator.step(4)}
        return found

    def addresses(self) -> set[int]:
        return {p.untyped_storage().data_ptr() for p in self.trainer.model.parameters()}

    def held_twice(self) -> float:
        """Share of the generator's numbers that are not in the trainer's memory."""
        weights = self.generator._weights
        assert weights is not None
        own = [weights.embedding, weights.head, weights.norm]
        for layer in weights.layers:
            parts = [(part, name) for part in (layer, layer.mlp) for name in part.__slots__]
            own += [tensor for part, name in parts if isinstance(tensor := getattr(part, name), torch.Tensor)]
        sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in own}
        return sum(size for at, size in sizes.items() if at not in self.addresses()) / sum(sizes.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", NATIVE)
def test_a_shared_model_trains_and_generates_like_two_separate_ones(family: str, dtype: str, tmp_path: Path) -> None:
    shared, apart = Pair(family, tmp_path / "a", dtype=dtype), Pair(family, tmp_path / "b", shared=False, dtype=dtype)
    for version in (0, 1):
        for pair in (shared, apart):
            pair.load(version)
        assert shared.held_twice() < 0.01 and apart.held_twice() == 1.0
        mine, theirs = shared.answers(shared.generator), apart.answers(apart.generator)
        for i, output in mine.items():
            assert set(output.versions) == {version}
            if dtype == "float32":
                assert output.token_ids.tolist() == theirs[i].token_ids.tolist()
                torch.testing.assert_close(output.gen_logprobs, theirs[i].gen_logprobs, rtol=0, atol=1e-5)
        batch = shared.batch
        logprobs = [pair.trainer.logprobs(batch, [[0, 1, 2]], 1.0) for pair in (shared, apart)]
        assert torch.equal(*logprobs)  # bits: the trainer's tensors have the same layout as before
        for pair in (shared, apart):
            pair.train()
        assert (shared.trainer.logprobs(batch, [[0, 1, 2]], 1.0) - logprobs[0]).abs().max() > 1e-3


def test_tokens_never_get_the_version_of_different_weights(tmp_path: Path) -> None:
    pair = Pair("qwen3", tmp_path)
    pair.load(0)
    params = SamplingParams(8, ignore_eos=True)
    pair.generator.add([Request(0, [1, 2, 3], params, 0)])
    pair.generator.step(3)
    pair.link.check()
    pair.train()
    with pytest.raises(RuntimeError, match=r"changed at optimizer step 1 and were published at 0: tokens decoded now"):
        pair.link.check()
    pair.load(1)
    pair.link.check()
    [output] = pair.generator.step(8)
    assert output.versions.tolist() == [0] * 3 + [1] * 5
    pair.train()
    pair.link.check()  # nothing runs


def test_sleep_keeps_the_trainers_parameters(tmp_path: Path) -> None:
    pair = Pair("qwen2", tmp_path)
    pair.load(0)
    before, places = pair.answers(pair.generator), pair.addresses()
    pair.generator.sleep()
    assert pair.generator.version == -1
    pair.train()
    pair.generator.wake()
    pair.load(1)
    after = pair.answers(pair.generator)
    assert pair.addresses() == places and pair.held_twice() < 0.01
    assert any((before[i].gen_logprobs != after[i].gen_logprobs).any() for i in before)
    fresh = pair.new_generator(torch.float32)
    fresh.load_weights(pair.trainer.named_weights(), 1)
    for i, output in pair.answers(fresh).items():
        torch.testing.assert_close(output.gen_logprobs, after[i].gen_logprobs, rtol=0, atol=1e-5)


def test_a_checkpoint_fills_the_shared_tensors(tmp_path: Path) -> None:
    pair, other = Pair("qwen3_moe", tmp_path / "a"), Pair("qwen3_moe", tmp_path / "b")
    pair.train()
    (tmp_path / "state").mkdir()
    write_files(tmp_path / "state", pair.trainer.snapshot(copy=False))
    other.trainer.load(tmp_path / "state")
    for each in (pair, other):
        each.load(1)
    mine, theirs = pair.answers(pair.generator), other.answers(other.generator)
    assert all((mine[i].gen_logprobs == theirs[i].gen_logprobs).all() for i in mine)


@pytest.mark.parametrize(
    ("changes", "together", "shared"),
    [
        ({}, True, True),
        ({"rollout": {"max_staleness": 1}}, True, False),
        ({"generator": {"dtype": "bfloat16"}}, True, False),
        ({"trainer": {"param_dtype": "bfloat16"}}, False, False),
        ({"trainer": {"fsdp2": {"cpu_offload": True}}}, False, False),
        ({"trainer": {"lora": {"rank": 2, "parts": ["experts"]}}}, False, False),
        ({"debug": "fake"}, False, False),
    ],
    ids=str,
)
def test_when_weights_are_shared(changes: dict[str, Any], together: bool, shared: bool) -> None:
    layout = RoleLayout(MappingProxyType({"controller": (0,), "trainer": (0,), "generator": (0,)}), 1)
    config = parse(changes)
    assert (in_one_process(config, layout), shares_weights(config, layout)) == (together, shared)
    apart = RoleLayout(MappingProxyType({"controller": (0,), "trainer": (1,), "generator": (1, 2)}), 3)
    assert not in_one_process(config, apart)
