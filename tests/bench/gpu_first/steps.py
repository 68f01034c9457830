"""What the first half hour on a GPU runs, in the order in which it teaches most: one table."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Setting:
    """Where the steps run. tiny: models and sizes for a CPU, with which no rate means anything."""

    device: str
    tiny: bool
    num_gpus: int


Command = Callable[[Setting, Path, float], list[str]]
"""The words of a program, which may write into the folder of its step and has so many seconds."""


@dataclass(frozen=True)
class Step:
    """commands: by label, one after the other whatever becomes of them. Their figures are the rows that they print
    (tests.bench.gpu.common.Row), and their seconds unless the label is empty. limit_s: of all. modules: needed
    packages. fresh_caches: nothing is compiled yet at the first command."""

    teaches: str
    limit_s: float
    commands: Mapping[str, Command]
    num_gpus: int = 1
    modules: tuple[str, ...] = ()
    fresh_caches: bool = False


def check(*parts: str) -> Command:
    """Parts of gpu-check, after its limits of the hardware."""

    def words(setting: Setting, folder: Path, left_s: float) -> list[str]:
        only = ["--only", *dict.fromkeys(("device", *parts))]
        seconds = f"--seconds={max(left_s - TO_REPORT_S, 1):.0f}"
        program = [sys.executable, "-m", "tests.bench.gpu", seconds, f"--device={setting.device}"]
        return [*program, *(["--tiny"] if setting.tiny else []), *only]

    return words


def module(name: str, *runs: str) -> Command:
    """A module of this folder, about the device or about runs in the folder of the step."""
    program = [sys.executable, "-m", f"tests.bench.gpu_first.{name}"]
    return lambda setting, folder, _: [*program, *([str(folder / run) for run in runs] or [setting.device])]


SIZES = {"vocab_size": 151936, "hidden_size": 896, "num_layers": 24, "num_heads": 14, "intermediate_size": 4864}
"""Of Qwen2.5-0.5B, with 2 key heads as model.tiny. The weights are random: compute nodes reach no model hub."""
FULL = [*(f"model.tiny.{name}={size}" for name, size in SIZES.items()), "trainer.max_tokens_per_micro_batch=8192"]
FULL += ["rollout.num_prompts=32", "rollout.group_size=8"]
FULL += ["rollout.max_new_tokens=256", "trainer.param_dtype=bfloat16", "trainer.head_dtype=float32"]
FULL += ["generator.dtype=bfloat16", "generator.head_dtype=float32", "trainer.logits_chunk_tokens=1024"]
TINY = ["model.tiny.num_heads=2", "rollout.num_prompts=4", "rollout.group_size=4", "rollout.max_new_tokens=8"]
BOTH = ["layout=colocated", "layout.trainer.num_ranks=1", "layout.offload=always", "check_weights=true", "save_every=1"]
BOTH += ["reward.default.name=fake", "trainer.lr=1e-5"]  # random rewards: without them nothing would be learnt
VLLM, SAME = "generator.engine=vllm", ("deterministic=true", "max_steps=2")  # vLLM cannot be deterministic
TO_REPORT_S = 10.0
"""Before a step's end gpu-check has reported what its parts found."""


def launch(run: str, *words: str) -> Command:
    """A run as a user starts it, with the trainer and the generator on one GPU, in turns."""

    def command(setting: Setting, folder: Path, _: float) -> list[str]:
        sizes = [*TINY, *(["generator.vllm.kv_cache_gib=0.1"] if VLLM in words else [])] if setting.tiny else FULL
        where = [f"cluster.device={setting.device}", f'run_dir="{folder / run}"']
        return [sys.executable, "-m", "hpcrl.launch", *BOTH, *sizes, *words, *where]

    return command


STEPS = {
    "versions": Step("driver, CUDA, NCCL, nvcc, packages; a first kernel", 60, {"": module("versions")}),
    "two-gpus": Step(
        "NCCL between trainer and generator, a lost peer, vLLM on both GPUs",
        480,
        {"": check("two ranks", "lost peer", "vllm TP2")},
        num_gpus=2,
    ),
    "check": Step(
        "limits of the card, attention, native generator, FSDP2 beside the plan",
        240,
        {"": check("attention", "agreement native", "training")},
    ),
    "vllm": Step(
        "FSDP2 and vLLM on one GPU: start, new weights, log-probs; first with nothing compiled",
        360,
        {label: check("fsdp2 and vllm") for label in ("cold", "warm")},
        modules=("vllm",),
        fresh_caches=True,
    ),
    "run": Step(
        "0.5B with vLLM from end to end, then a resume: agent, forks, turns, weights, checkpoints",
        420,
        {
            "start": launch("run", VLLM, "max_steps=3"),
            "resume": launch("run", VLLM, "max_steps=4"),
            "": module("runs", "run"),
        },
        modules=("vllm",),
    ),
    "deterministic": Step(
        "whether two runs of 2 steps with the native generator have the same bits",
        180,
        {"first": launch("1", *SAME), "second": launch("2", *SAME), "": module("runs", "1", "2")},
    ),
    "waits": Step("where the host waits, by CUDA's warnings, beside waits.txt", 180, {"": module("waits")}),
    "decode": Step(
        "both generators beside the bandwidth of the card, sleep and wake",
        240,
        {"": check("decode native", "decode vllm")},
    ),
    "engines": Step(
        "a step of DeepSpeed (ZeRO-3) and of Megatron-Core beside a plain product",
        200,
        {"": check("training deepspeed", "training megatron")},
    ),
}
