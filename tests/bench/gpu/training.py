"""A training step at the widths of Qwen2.5-7B with few layers: its rate with every engine; with FSDP2 its peak memory
beside the plan, giving memory back, and new weights for a generator on the same device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hpcrl.config import parse
from hpcrl.engines.gen.native.engine import NativeEngine
from hpcrl.engines.train.fsdp2.engine import FSDP2Engine
from hpcrl.engines.train.training_engine import TrainEngine
from hpcrl.models.shape import ModelShape
from hpcrl.planner.trainer import trainer_parts
from hpcrl.rollout.batch import Batch
from hpcrl.spec.tables import TRAIN_ENGINES
from tests.bench.gpu.agreement import trainer_of, updated
from tests.bench.gpu.common import GB, Check, Row, median
from tests.engines.worlds import Weighted, make_batch, norms_of

PEAKS = {"B200": 2250.0, "H200": 989.0, "H100": 989.0, "GH200": 989.0, "A100": 312.0, "L40S": 362.0}
"""Published rates of dense bf16 products, TFLOP/s."""
PLAN_MARGIN = 1.1


def measure(check: Check) -> Iterator[Row]:
    """All rows of FSDP2."""
    (rows, length), shape = _sizes(check), check.model(few_layers=True)[1]
    work = _work(rows, length)
    with check.alone():
        trainer = trainer_of(check, "float32", torch.float32, max_tokens_per_micro_batch=rows * length // 2)
        yield from _rates(check, "training", shape, work[0], length, _seconds(check, trainer, work))
        yield from _peak(check, shape, rows, length)
        yield from _gave_back(check, trainer, work)
        yield _update(check, trainer)


def deepspeed(check: Check) -> Iterator[Row]:
    """The same step with ZeRO-3."""
    yield from _of_engine(check, "deepspeed")


def megatron(check: Check) -> Iterator[Row]:
    """The same step with Megatron-Core, on a GPU with Transformer Engine's layers."""
    yield from _of_engine(check, "megatron")


def _of_engine(check: Check, name: str) -> Iterator[Row]:
    """Rates of an engine in bf16 with an optimizer in fp32."""
    (rows, length), shape = _sizes(check), check.model(few_layers=True)[1]
    trainer = {"engine": name, "param_dtype": "bfloat16", "max_tokens_per_micro_batch": rows * length // 2}
    config = parse({"trainer": trainer | {"logits_chunk_tokens": 1024}, "cluster": {"device": check.device}})
    work = _work(rows, length)
    with check.alone():
        engine = TRAIN_ENGINES[name].load()(config, check.folder(), 10, True)
        yield from _rates(check, f"training {name}", shape, work[0], length, _seconds(check, engine, work))


def _work(rows: int, length: int) -> Any:
    """The arguments of a step on two micro-batches of equal sequences."""
    batch = make_batch([length] * rows, num_prompt_tokens=1)
    halves = [list(range(rows // 2)), list(range(rows // 2, rows))]
    return batch, halves, Weighted(), norms_of(batch)


def _seconds(check: Check, engine: TrainEngine, work: Any) -> float:
    """Of a step, after one that warms up."""
    engine.train_step(*work)
    if check.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    return median([check.seconds(lambda: engine.train_step(*work)) for _ in range(3)])


def _sizes(check: Check) -> tuple[int, int]:
    """Sequences, and tokens of each."""
    return check.pick(8, 4), check.pick(2048, 16)


def _rates(check: Check, part: str, shape: ModelShape, batch: Batch, length: int, seconds: float) -> Iterator[Row]:
    """Operations of forward and backward without what is computed twice, over time."""
    matrices = sum(p.size for p in shape.parameters if len(p.shape) > 1 and "embed_tokens" not in p.name)
    matrices += shape.vocab_size * shape.hidden_size * shape.tied
    # Causal attention: q k and p v, of half the pairs, twice more in the backward pass.
    per_token = 6 * matrices + 6 * shape.num_layers * length * shape.query_size
    rate = per_token * batch.num_tokens / seconds / 1e12
    yield Row(part, "step", batch.num_tokens / seconds, "tokens/s")
    yield Row(part, "rate, of a product's", rate, "TFLOP/s", check.facts.get("product"))
    name = torch.cuda.get_device_name() if check.on_gpu else ""
    peak = next((peak for card, peak in PEAKS.items() if card in name), None)
    if peak is not None:
        yield Row(part, "MFU", rate / peak, "", note=f"of {peak:g} TFLOP/s")


def _peak(check: Check, shape: ModelShape, rows: int, length: int) -> Iterator[Row]:
    """Bytes that the allocator had handed out at once, beside the plan's."""
    planned = _planned(shape, rows, length)
    if not check.on_gpu:
        yield Row("training", "planned peak", planned / 2**30, "GiB", note="compared on a GPU")
        return
    peak = torch.cuda.max_memory_allocated()
    verdict = "ok" if peak < PLAN_MARGIN * planned else "bad"
    yield Row("training", "peak, of the plan's", peak / 2**30, "GiB", planned / 2**30, verdict)


def _planned(shape: ModelShape, rows: int, length: int) -> int:
    """Bytes of the plan in the phase that needs most, for this trainer and batch."""
    trainer = {"param_dtype": "bfloat16", "head_dtype": "float32", "logits_chunk_tokens": 1024}
    trainer["max_tokens_per_micro_batch"] = rows * length // 2
    config = parse(
        {
            "trainer": trainer,
            "rollout": {"num_prompts": rows // 2, "group_size": 2, "max_new_tokens": length // 2},
            "data": {"max_prompt_tokens": length - length // 2},
            "cluster": {"device": "cuda"},
        }
    )
    parts = [part for part in trainer_parts(config, shape, 1) if not part.on_host]
    return max(sum(part.num_bytes for part in parts if phase in part.during) for phase in ("train", "update"))


def _gave_back(check: Check, trainer: FSDP2Engine, work: Any) -> Iterator[Row]:
    """The trainer's state to the host and back, the first time into memory that is made and registered, then a step."""
    before = check.used()
    for what in ("first offload", "offload"):
        seconds = check.seconds(trainer.offload)
        moved = before - check.used()
        yield Row("training", what, moved / seconds / GB, "GB/s", note=f"{moved / 2**30:.1f} GiB in {seconds:.2f} s")
        back_s = check.seconds(trainer.onload)
    yield Row("training", "onload", moved / back_s / GB, "GB/s")
    stats = trainer.train_step(*work)
    yield Row("training", "step after it", verdict="ok" if "actor/grad_norm" in stats else "bad")


def _update(check: Check, trainer: FSDP2Engine) -> Row:
    """The trainer's weights into a native generator, as with layout=single."""
    generator = NativeEngine(
        check.folder(), max_num_seqs=4, max_length=64, dtype=torch.bfloat16, device=check.device, load=False
    )
    return updated(check, "training", trainer, generator)
