"""Adapters beside frozen weights: FSDP2 against peft in one process, on one rank and on two; publishing, saving and
exporting; and equal log-probs in the generators."""

from __future__ import annotations

import copy
import functools
import json
import pickle
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from hpcrl.algorithms.interface import Outputs
from hpcrl.config import LoRAConfig, TrainerConfig, parse
from hpcrl.config.reading import ConfigError
from hpcrl.convert.__main__ import main as convert
from hpcrl.engines.gen.generation_engine import GenEngine, Output, Request, SamplingParams
from hpcrl.engines.gen.native.engine import NativeEngine
from hpcrl.engines.train.fsdp2 import engine as fsdp2
from hpcrl.engines.train.fsdp2.engine import FSDP2Engine
from hpcrl.engines.train.fsdp2.lora import Adapters, dropout_mask
from hpcrl.engines.train.fsdp2.model import empty_model
from hpcrl.engines.train.fsdp2.spec import FSDP2Config
from hpcrl.engines.train.fsdp2.weights import NamedWeights, local
from hpcrl.models.families import read_shape
from hpcrl.planner.adapters import adapters, check_targets
from hpcrl.planner.trainer import trainer_parts
from hpcrl.rollout.batch import Batch, batch_from_samples
from hpcrl.rollout.types import FinishReason, Sample
from hpcrl.spec.lora import adapted, layer_of
from hpcrl.spec.weight_layout import TensorShards, keepable
from hpcrl.workers.one_process import OneProcess
from tests.checkpoint.writing import write_files
from tests.contracts.test_train_engine import check_contract, check_weights
from tests.contracts.train.fsdp2 import gradients
from tests.engines.architectures import make_folder as make_tiny_folder
from tests.engines.test_fsdp2 import worst_difference
from tests.engines.worlds import Weighted, make_batch, make_model_folder, norms_of, run_ranks

pytestmark = pytest.mark.numerics

LENGTHS = (9, 21, 4, 14)
LORA = LoRAConfig(
    rank=4, alpha=6.0, rank_pattern={r"layers\.1\..*": 2}, alpha_pattern={r"model\.layers\.0\.self_attn.*": 9.0}
)


def engine(folder: Path, *, dtype: torch.dtype = torch.float32, seed: int = 0, **config: Any) -> FSDP2Engine:
    own = FSDP2Config(**{key: config.pop(key) for key in FSDP2Config.model_fields if key in config})
    settings = {"lr": 1e-2, "logits_chunk_tokens": 8, "lora": LORA} | config
    return FSDP2Engine(TrainerConfig(**settings), folder, own=own, dtype=dtype, total_steps=10, seed=seed)


def share(trainer: FSDP2Engine, whole: Batch) -> tuple[Batch, list[list[int]]]:
    """The rows of this rank, and their micro-batches."""
    batch = whole.select(list(range(trainer.data_parallel_rank, whole.num_sequences, trainer.data_parallel_size)))
    return batch, [[0], list(range(1, batch.num_sequences))]


def step(trainer: FSDP2Engine, whole: Batch) -> None:
    trainer.train_step(*share(trainer, whole), Weighted(), norms_of(whole))


def results(trainer: FSDP2Engine, whole: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs of this rank's rows and the whole gradients by name. Collective."""
    batch, plan = share(trainer, whole)
    return trainer.logprobs(batch, plan, 1.0), gradients(trainer, batch, plan, Weighted(), norms_of(whole))


def in_hpcrl(name: str) -> str:
    """The name of a parameter of peft's model. peft wraps experts for gate_up_proj first, then for down_proj."""
    name = name.removeprefix("base_model.model.").replace(".default", "")
    name = name.replace("experts.base_layer.lora_", "experts.lora.gate_up_proj.lora_")
    return name.replace("experts.lora_", "experts.lora.down_proj.lora_")


def peft_results(base: Path, adapter: Path | None, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs [T] and gradients of Weighted, by peft and transformers' eager attention, one sequence at a time."""
    peft = pytest.importorskip("peft")
    model: Any = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager", dtype=torch.float32)
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, adapter, is_trainable=True)
    pieces = []
    for tokens in batch.token_ids.split(batch.lengths.tolist()):
        log_p = model(tokens[None]).logits[0, :-1].log_softmax(-1)
        pieces.append(torch.cat([log_p.new_zeros(1), log_p.gather(1, tokens[1:, None])[:, 0]]))
    logprobs = torch.cat(pieces) * batch.loss_mask
    Weighted().loss(Outputs(logprobs, None), batch, norms_of(batch))[0].backward()
    named = ((in_hpcrl(n), p) for n, p in model.named_parameters())
    return logprobs.detach(), {name: p.grad for name, p in named if p.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "lora"),
    [
        ("qwen2", {}),
        ("gemma2", {"target_modules": ["v_proj", "down_proj"]}),
        ("qwen3_moe", {}),  # adapters only in the attention
        ("qwen3_moe", {"parts": ["decoder", "experts"]}),
    ],
)
def test_gradients_match_peft(family: str, lora: dict[str, Any], tmp_path: Path, world_of_one: None) -> None:
    folder, batch = make_model_folder(family, tmp_path / "model"), make_batch(LENGTHS)
    trainer = engine(folder, lora=LORA.model_copy(update=lora))
    before, _ = results(trainer, batch)
    want, _ = peft_results(folder, None, batch)
    assert (before - want).abs().max() < 2e-5  # adapters begin as zero
    step(trainer, batch)
    trainer.export_hf(tmp_path / "out")
    want, theirs = peft_results(folder, tmp_path / "out" / "adapter", batch)
    got, mine = results(trainer, batch)
    assert (got - want).abs().max() < 2e-5 and (got - before).abs().max() > 1e-2
    assert worst_difference(mine, theirs) < 1e-5
    shape = read_shape(json.loads((folder / "config.json").read_text()))
    planned = {p.name: p.shape for p in adapters(trainer.config.lora, shape)}
    with_experts = "experts" in trainer.config.lora.parts
    of_generators = {p.name: p.shape for p in shape.parameters} if with_experts else planned
    assert {held.name: held.shape for held in trainer.weight_layout()} == of_generators
    changing = {held.name for held in trainer.weight_layout() if not held.frozen}
    assert changing == ({adapted(name) for name in planned} if with_experts else planned.keys())
    assert len(mine) == len(planned) > 0 and not any("mlp.gate." in name for name in mine)
    assert any("experts" in name for name in mine) == with_experts
    plan = [list(range(len(LENGTHS)))]
    assert torch.equal(trainer.reference_logprobs(batch, plan, 1.0), engine(folder).logprobs(batch, plan, 1.0))
    merged, _ = peft_results(tmp_path / "out", None, batch)
    assert (merged - want).abs().max() < 2e-5
    state = load_file(tmp_path / "out" / "adapter" / "adapter_model.safetensors")
    state[next(name for name in state if name.endswith("lora_B.weight"))][0] += 0.1  # the comparison can fail
    save_file(state, tmp_path / "out" / "adapter" / "adapter_model.safetensors")
    other, theirs = peft_results(folder, tmp_path / "out" / "adapter", batch)
    assert (other - want).abs().max() > 1e-4 and worst_difference(mine, theirs) > 1e-4


class _Mask(torch.nn.Module):
    """peft's dropout with this package's draws."""

    def __init__(self, number: int, share: float):
        super().__init__()
        self.number, self.share, self.step, self.row = number, share, 0, 0

    def forward(self, x: Tensor) -> Tensor:
        return x * dropout_mask(x[0], self.share, (3, self.step, self.row, 0, self.number))


def test_dropout_is_pefts_and_depends_on_seed_step_and_micro_batch(tmp_path: Path, world_of_one: None) -> None:
    """Gradients are those of peft with the same draws; log-probs have no dropout; a resumed run draws the same."""
    peft = pytest.importorskip("peft")
    folder, batch = make_model_folder("qwen2", tmp_path / "model"), make_batch(LENGTHS)
    lora = LORA.model_copy(update={"dropout": 0.3})
    own: dict[str, Any] = {"lora": lora, "packing": "off", "seed": 3}
    trainer, plain = engine(folder, **own), engine(folder, **own | {"lora": LORA})
    for each in (trainer, plain):
        step(each, batch)
    assert not torch.equal(dict(trainer.named_weights())[SOME], dict(plain.named_weights())[SOME])
    trainer.export_hf(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "adapter" / "adapter_config.json").read_text())["lora_dropout"] == 0.3
    want, _ = peft_results(tmp_path / "out", None, batch)
    got, mine = results(trainer, batch)
    assert (got - want).abs().max() < 2e-5
    model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(model, tmp_path / "out" / "adapter", is_trainable=True)
    layers = [module for module in model.modules() if hasattr(module, "lora_dropout")]
    masks = [_Mask(number, 0.3) for number in range(len(layers))]
    for layer, mask in zip(layers, masks, strict=True):
        layer.lora_dropout["default"] = mask
    pieces = []
    for row, tokens in enumerate(batch.token_ids.split(batch.lengths.tolist())):
        for mask in masks:
            mask.step, mask.row = 1, row
        log_p = model(tokens[None]).logits[0, :-1].log_softmax(-1)
        pieces.append(torch.cat([log_p.new_zeros(1), log_p.gather(1, tokens[1:, None])[:, 0]]))
    Weighted().loss(Outputs(torch.cat(pieces) * batch.loss_mask, None), batch, norms_of(batch))[0].backward()
    named = ((in_hpcrl(n), p) for n, p in model.named_parameters())
    assert worst_difference(mine, {name: p.grad for name, p in named if p.grad is not None}) < 1e-5
    state = tmp_path / "state"
    state.mkdir()
    write_files(state, trainer.snapshot())
    resumed, recomputing = engine(folder, **own), engine(folder, **own, activation_checkpointing=True)
    for each in (resumed, recomputing):
        assert each.load(state) == []
        assert worst_difference(results(each, batch)[1], mine) < 1e-6
    assert worst_difference(mine, results(engine(folder, **own | {"seed": 4}), batch)[1]) > 1e-3


SOME = "model.layers.0.self_attn.q_proj.lora_B.weight"


def test_patterns_must_match_adapters(tmp_path: Path, world_of_one: None) -> None:
    folder = make_model_folder("qwen2", tmp_path / "model")
    shape = read_shape(json.loads((folder / "config.json").read_text()))
    for key, lora in {
        "rank_pattern": {"rank_pattern": {"q_proj": 2, "k_prj": 3}},
        "alpha_pattern": {"alpha_pattern": {"up_proj": 2.0, "k_prj": 3}, "target_modules": ["up_proj"]},
    }.items():
        expected = (
            f"trainer.lora.{key}: k_prj: no layer with an adapter is named so; their names are as model.layers.1."
        )
        [problem] = check_targets(parse({"trainer": {"lora": {"rank": 4, **lora}}}), shape)
        assert problem.text.startswith(expected)
        with pytest.raises(ValueError, match=re.escape(expected)):
            engine(folder, lora={"rank": 4, **lora})
    for lora, expected in (
        ({"rank_pattern": {"q_proj[": 2}}, "expected a regular expression (unterminated character set at position 6)"),
        ({"rank_pattern": {"q_proj": 0}}, "trainer.lora.rank_pattern.q_proj: "),
        ({"dropout": 1.0}, "trainer.lora.dropout: "),
        ({"dropout": 0.1, "parts": ["experts"]}, "trainer.lora.dropout: experts' adapters change their matrices"),
        ({"use_rslora": True}, "trainer.lora.use_rslora: unknown key"),
        ({"use_dora": True}, "trainer.lora.use_dora: unknown key"),
    ):
        with pytest.raises(ConfigError) as caught:
            parse({"trainer": {"lora": {"rank": 4, **lora}}})
        assert any(expected in line for line in caught.value.problems), caught.value.problems


def test_every_generator_takes_matrices_merged_with_adapters_of_experts() -> None:
    for name in ("native", "vllm", "sglang"):
        config = parse({"trainer": {"lora": {"rank": 4, "parts": ["experts"]}}, "generator": {"engine": name}})
        assert config.merges_adapters and config.published_lora is None and config.reference_is_base
    with pytest.raises(ConfigError, match="the sglang generator does not support adapters"):
        parse({"trainer": {"lora": {"rank": 4}}, "generator": {"engine": "sglang"}})
    with pytest.raises(ConfigError, match=r"trainer\.lora\.parts: the megatron trainer has no adapters"):
        parse({"trainer": {"engine": "megatron", "lora": {"rank": 4, "parts": ["experts"]}}})


SOME_MIXTURES = ("glm4_moe", "qwen3_next", "deepseek_v3", "gpt_oss")
MIXTURES = ("qwen2_moe", "qwen3_moe", "deepseek_v2", "mixtral", "minimax_m2", "granitemoehybrid", "lfm2_moe")


@pytest.mark.parametrize("parts", [["experts"], ["experts", "decoder"]], ids="+".join)
@pytest.mark.parametrize(
    "family",
    [
        *(pytest.param(family, marks=pytest.mark.slow) for family in SOME_MIXTURES),
        *(pytest.param(family, marks=pytest.mark.soak) for family in (*MIXTURES, "nemotron_h", "llama4")),
    ],
)
def test_peft_loads_adapters_of_mixtures(
    family: str, parts: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """peft has the logits of this model, and each adapter counts: of dense layers with the names of experts, and of
    experts."""
    peft = pytest.importorskip("peft")
    folder = make_tiny_folder(family, tmp_path / "model")
    base: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    theirs: Any = copy.deepcopy(base)
    first = names_of(base, parts)[0]
    layer = re.escape(first[: first.index(".", len("model.layers."))])
    lora = LoRAConfig(rank=3, alpha=7.0, parts=parts, rank_pattern={f"{layer}.*": 2}, alpha_pattern={f"{layer}.*": 5.0})
    adapters = Adapters(lora)
    ours = adapters.add(base, torch.float32, 0)
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in ours.named_parameters():
            if name.endswith("lora_B.weight"):
                parameter.normal_(std=0.3)
    weights = {name: parameter.detach() for name, parameter in ours.named_parameters()}
    adapters.write(weights, ours, folder, tmp_path / "adapter")
    if family == "nemotron_h" and "decoder" in parts:  # peft refuses out_proj in it
        assert not (tmp_path / "adapter").exists() and "so the export has only the merged weights" in caplog.text
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # for missing or unknown names
        warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern keys")  # of parameters, but they match
        theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter")
    theirs.eval()
    ours.eval()
    tokens = torch.arange(3, 27)[None]
    with torch.no_grad():
        got, want = ours(tokens, use_cache=False).logits, theirs(tokens, use_cache=False).logits
        with adapters.off():
            without = ours(tokens, use_cache=False).logits
    assert (got - want).abs().max() < 1e-4 * want.abs().max() and (got - without).abs().max() > 1e-2
    merged: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    merged.load_state_dict(adapters.merged(weights, ours), strict=False)
    with torch.no_grad():
        assert (merged(tokens, use_cache=False).logits - want).abs().max() < 1e-4 * want.abs().max()


@pytest.mark.parametrize("family", ["qwen2", "qwen2_moe", "deepseek_v3", "gpt_oss", "glm4_moe", "mixtral", "gemma2"])
def test_the_plan_has_the_adapters_of_the_trainer(family: str, tmp_path: Path) -> None:
    """Also of latents and of the shared experts' gate, and of no biases of experts."""
    folder = make_model_folder(family, tmp_path / "model")
    shape = read_shape(json.loads((folder / "config.json").read_text()))
    planned = [layer_of(parameter.name) for parameter in adapters(LORA, shape)]
    assert set(planned) == set(Adapters(LORA).targets(empty_model(folder, torch.float32))[0])


def names_of(hf: Any, parts: list[str]) -> list[str]:
    """Names of the layers and stacked parameters that adapters of these parts may adapt."""
    stacked = [name for name, p in hf.named_parameters() if ".experts." in name and p.ndim == 3]
    linear = [f"model.{name}" for name, module in hf.model.named_modules() if isinstance(module, torch.nn.Linear)]
    return [*(linear if "decoder" in parts else []), *(stacked if "experts" in parts else [])]


@pytest.mark.slow
def test_the_training_contract_holds_with_adapters(tmp_path: Path, world_of_one: None) -> None:
    check_contract(lambda folder: engine(folder, lr=0.02), make_model_folder("qwen2", tmp_path / "model"), tmp_path)


def test_frozen_weights_can_be_bfloat16_with_float32_adapters(tmp_path: Path, world_of_one: None) -> None:
    folder, batch = make_model_folder("qwen3", tmp_path / "model"), make_batch(LENGTHS)
    trainer = engine(folder, param_dtype="bfloat16")
    assert not trainer.sharded
    kept = {name: p.dtype for name, p in trainer.model.named_parameters()}
    assert {kept[name] for name in kept if "lora" in name} == {torch.float32}
    assert {kept[name] for name in kept if "lora" not in name} == {torch.bfloat16}
    whole = engine(folder, param_dtype="bfloat16", lora={"rank": 0})
    plan = [list(range(len(LENGTHS)))]
    # FSDP2 rounds float32 weights to bfloat16 for the computation.
    torch.testing.assert_close(trainer.logprobs(batch, plan, 1.0), whole.logprobs(batch, plan, 1.0), rtol=0, atol=0.02)
    frozen = {n: p.detach().clone() for n, p in trainer.model.named_parameters() if "lora" not in n}
    step(trainer, batch)
    assert all(torch.equal(p, frozen[n]) for n, p in trainer.model.named_parameters() if n in frozen)
    assert {t.dtype for _, t in trainer.named_weights()} == {torch.float32}


@pytest.mark.slow
def test_a_checkpoint_contains_only_adapters_and_names_their_base_model(
    tmp_path: Path, world_of_one: None, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, batch = make_model_folder("qwen3", tmp_path / "model"), make_batch(LENGTHS)
    trainer = engine(folder)
    step(trainer, batch)
    state = tmp_path / "state"
    state.mkdir()
    write_files(state, trainer.snapshot())
    saved = pickle.loads((state / ".metadata").read_bytes()).state_dict_metadata
    assert len(saved) == 4 * len(trainer.weights.names) and all("lora" in name for name in saved)
    assert convert(["--checkpoint", f"{state}", "--model", f"{folder}", "--output", f"{tmp_path / 'hf'}"]) == 2
    assert "has only adapters (trainer.lora); use the exported model" in capsys.readouterr().err
    other = engine(folder, seed=1)
    assert other.load(state) == []
    for each in (trainer, other):
        step(each, batch)
    assert all(torch.equal(a, b) for (_, a), (_, b) in zip(trainer.named_weights(), other.named_weights(), strict=True))
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.self_attn.k_proj.weight"][0, 0] += 1e-3
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    for changed in (engine(folder), engine(folder, lora={"rank": 0})):
        with pytest.raises(
            ValueError, match=r"has adapters of .*/model with the weights [0-9a-f]{16}, and this run tr"
        ):
            changed.load(state)


def test_targets_must_be_linear_layers_of_the_decoder(tmp_path: Path, world_of_one: None) -> None:
    folder = make_model_folder("qwen3_moe", tmp_path / "model")
    for name in ("qkv_proj", "lm_head", "gate"):
        with pytest.raises(
            ValueError, match=rf"target_modules: {name}: the model has none, whose linear layers are q_pr"
        ):
            engine(folder, lora={"rank": 2, "target_modules": ["q_proj", name]})


# ---- generators


def generated(generator: GenEngine, update: Callable[[], None]) -> Batch:
    """Three responses of 8 tokens, with an update after the fourth."""
    params = SamplingParams(8, ignore_eos=True)
    prompts = {i: list(range(3 + i, 9 + 2 * i)) for i in range(3)}
    generator.add([Request(i, prompt, params, i) for i, prompt in prompts.items()])
    assert generator.step(4) == []
    update()
    found: dict[int, Output] = {output.id: output for output in generator.step(8)}
    samples = []
    for i, prompt in prompts.items():
        before = np.zeros(len(prompt), np.float32)
        versions = np.concatenate([before - 1, found[i].versions]).astype(np.int32)
        samples.append(
            Sample(
                i << 24,
                FinishReason.LENGTH,
                token_ids=np.concatenate([prompt, found[i].token_ids]).astype(np.int32),
                loss_mask=versions >= 0,
                gen_logprobs=np.concatenate([before, found[i].gen_logprobs]).astype(np.float32),
                versions=versions,
                turn_ids=np.where(versions >= 0, 0, -1).astype(np.int32),
            )
        )
    return batch_from_samples(samples, [0, 1, 2])


def check_generator(trainer: FSDP2Engine, generator: GenEngine, load: Callable[[int], None]) -> None:
    """After every update its log-probs equal the trainer's, also for running responses; they equal the frozen weights'
    log-probs only while the adapters are zero."""

    def update(version: int) -> None:
        if version:
            step(trainer, make_batch(LENGTHS))
            load(version)
            generator.recompute()

    load(0)
    for version in (0, 1, 2):
        batch, plan = generated(generator, functools.partial(update, version)), [[0, 1, 2]]
        mine = batch.versions == version
        assert mine.sum() == (3 * 4 if version else 3 * 8)
        got = batch.gen_logprobs[mine]
        assert (got - trainer.logprobs(batch, plan, 1.0)[mine]).abs().max() < 2e-5
        assert ((got - trainer.reference_logprobs(batch, plan, 1.0)[mine]).abs().max() > 1e-2) == (version > 0)
        generator.sleep()
        generator.wake()
        load(version)


def native(folder: Path, lora: LoRAConfig | None = LORA) -> NativeEngine:
    return NativeEngine(
        folder, max_num_seqs=4, max_length=32, dtype=torch.float32, block_tokens=8, lora=lora, load=False
    )


MIXED = {"layer_types": ["full_attention", "linear_attention"]}
OWN_KEYS: dict[str, dict[str, Any]] = {"phi3": {"pad_token_id": 0}, "qwen3_next": MIXED, "qwen3_5_text": MIXED}


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True], ids=["apart", "in one process"])
@pytest.mark.parametrize(
    "family",
    [
        *("qwen2", "qwen3_moe", "gemma2", "phi3", "qwen2_moe", "glm4_moe", "gpt_oss", "deepseek_v3", "hunyuan_v1_moe"),
        *("qwen3_next", "qwen3_5_text"),
    ],
)
def test_the_native_generator_has_the_log_probs_of_the_trainer(
    family: str, shared: bool, tmp_path: Path, world_of_one: None
) -> None:
    folder = make_model_folder(family, tmp_path / "model", **OWN_KEYS.get(family, {}))
    trainer, generator = engine(folder), native(folder)
    if shared:
        link = OneProcess(generator, trainer, shared=True)
        places = {p.data_ptr() for p in trainer.model.parameters()}
        check_generator(trainer, generator, lambda version: link.load(link.weights(), version))
        assert places == {p.data_ptr() for p in trainer.model.parameters()}
        adapter = generator._weights.layers[1].adapters["out"][0]
        assert {adapter.first.data_ptr(), adapter.second.data_ptr()} < places
    else:
        check_generator(trainer, generator, lambda version: generator.load_weights(trainer.named_weights(), version))
    named = dict(trainer.named_weights())
    shown = {name: tensor.clone() for name, tensor in generator.loaded_weights(named)}
    generator.load_weights(named.items(), 3)
    assert named.keys() == shown.keys()
    assert all(torch.equal(tensor, named[name]) for name, tensor in generator.loaded_weights(named))
    del named[next(iter(named))]
    with pytest.raises(ValueError, match=rf"1 of {len(shown)} weights are missing, e.g. .*lora_A"):
        generator.load_weights(named.items(), 4)


EXPERTS = LoRAConfig(
    rank=4,
    alpha=6.0,
    parts=["decoder", "experts"],
    rank_pattern={r"layers\.1\..*gate_up_proj": 2},
    alpha_pattern={"down_proj": 9.0},
)


def check_merged(trainer: FSDP2Engine, generator: Any, folder: Path) -> None:
    """check_generator() for a generator without adapters, which keeps frozen weights; and what it gets is bit for bit
    the export."""
    kept = keepable(trainer.weight_layout())
    assert {*trainer.weights.adapters_of}.isdisjoint(kept) and any("norm" in name for name in kept)
    counts: list[int] = []

    def load(version: int) -> None:
        without = kept if generator.version >= 0 else frozenset[str]()
        named = list(trainer.named_weights(without=without))
        counts.append(len(named))
        generator.load_weights(named, version, without)

    check_generator(trainer, generator, load)
    names = trainer.weights.published
    assert {*counts} == {len(names), len(names) - len(kept)} and counts[0] == len(names)
    trainer.export_hf(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    exported, sent = model.state_dict(), dict(trainer.named_weights())
    assert all(torch.equal(sent[name], exported[name]) for name in names)
    some = "model.layers.1.mlp.experts.down_proj"
    assert not torch.equal(sent[some], trainer.weights[some])


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        *("qwen3_moe", "gpt_oss"),
        *(pytest.param(family, marks=pytest.mark.soak) for family in ("deepseek_v3", "glm4_moe", "qwen2_moe")),
    ],
)
def test_the_native_generator_gets_matrices_merged_with_adapters_of_experts(
    family: str, tmp_path: Path, world_of_one: None
) -> None:
    folder = make_model_folder(family, tmp_path / "model")
    trainer, generator = engine(folder, lora=EXPERTS), native(folder, lora=None)
    check_merged(trainer, generator, tmp_path / "out")
    named = dict(trainer.named_weights())
    shown = dict(generator.loaded_weights(named))
    assert all(torch.equal(tensor, named[name]) for name, tensor in shown.items()) and len(shown) > len(named) / 2


# ---- several ranks


def _on_two_ranks(folder: Path, scratch: Path) -> dict[str, tuple[list[int], Tensor, Tensor, dict[str, Tensor]]]:
    whole, found = make_batch(LENGTHS), {}
    check_contract(lambda path: engine(path, lr=0.02), folder, scratch / "contract")
    for name, settings in {
        "gathered": {},
        "by layer": {"activation_checkpointing": True, "cpu_offload": True},
        "contexts": {"context_parallel": 2},
        "copies": {"replicas": 2},
        "matrices": {"tensor_parallel": 2},
    }.items():
        fsdp2.SMALL_MODEL_BYTES = 0 if name == "by layer" else 4 << 30
        trainer = engine(folder, **settings)
        assert trainer.sharded and trainer.keep_gathered == (name != "by layer")
        assert len(trainer.load(scratch / "state")) == 1  # of one rank
        batch, plan = share(trainer, whole)
        frozen, ids = trainer.reference_logprobs(batch, plan, 1.0), batch.sample_ids.tolist()
        logprobs, mine = results(trainer, whole)
        found[name] = ids, frozen, logprobs, mine
    return found


def _merged_on_two_ranks(folder: Path, scratch: Path) -> dict[str, dict[str, Tensor]]:
    whole, found = make_batch(LENGTHS), {}
    for name, settings in {"gathered": {}, "by layer": {"cpu_offload": True}, "copies": {"replicas": 2}}.items():
        fsdp2.SMALL_MODEL_BYTES = 0 if name == "by layer" else 4 << 30
        trainer = engine(folder, lora=EXPERTS, eps=1e-4, **settings)
        step(trainer, whole)
        check_weights(trainer)
        found[name] = dict(trainer.named_weights())
    return found


@pytest.mark.slow
def test_two_ranks_publish_the_merged_weights_of_one(tmp_path: Path, world_of_one: None) -> None:
    """Three experts, of which one rank has two; shards and whole weights are equal bit for bit."""
    folder, whole = make_model_folder("qwen3_moe", tmp_path / "model", num_experts=3), make_batch(LENGTHS)
    trainer = engine(folder, lora=EXPERTS, eps=1e-4)
    step(trainer, whole)
    check_weights(trainer)
    want = dict(trainer.named_weights())
    for found in run_ranks(2, _merged_on_two_ranks, folder, tmp_path):
        for name, named in found.items():
            assert named.keys() == want.keys(), name
            assert max(float((named[key] - want[key]).abs().max()) for key in want) < 5e-6, name


def _with_split_matrices(folder: Path, scratch: Path) -> tuple[Any, ...]:
    trainer, whole = engine(folder, eps=1e-4, tensor_parallel=2), make_batch(LENGTHS)
    trainer.load(scratch)
    found = _next_step(trainer, whole)
    check_weights(trainer)
    config = parse({"trainer": {"lora": LORA.model_dump(), "fsdp2": {"tensor_parallel": 2}}})
    shape = read_shape(json.loads((folder / "config.json").read_text()))
    planned = {part.name: part.num_bytes for part in trainer_parts(config, shape, 2)}
    held = [local(parameter).numel() for parameter in trainer.shards]
    assert planned["weights"] == 4 * sum(held)
    trainer.export_hf(scratch / "out")
    return found


def _next_step(trainer: FSDP2Engine, whole: Batch) -> tuple[Any, ...]:
    """The base, log-probs of policy and reference, gradients, and the adapters after a step. Collective."""
    logprobs, found = results(trainer, whole)
    trainer.discard_gradients()
    reference = trainer.reference_logprobs(*share(trainer, whole), 1.0)
    step(trainer, whole)
    weights = {name: tensor.clone() for name, tensor in trainer.named_weights()}
    return trainer._base, logprobs, reference, found, weights


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_moe", pytest.param("phi3", marks=pytest.mark.soak)])
def test_tensor_parallel_ranks_take_the_step_of_one(family: str, tmp_path: Path, world_of_one: None) -> None:
    """B is split by rows, or A by columns; of Phi-3's fused matrices, ranks exchange rows of B."""
    folder, whole = make_model_folder(family, tmp_path / "model", pad_token_id=0), make_batch(LENGTHS)
    trainer, state = engine(folder, eps=1e-4), tmp_path / "state"
    step(trainer, whole)
    state.mkdir()
    write_files(state, trainer.snapshot())
    base, *want, theirs, weights = _next_step(trainer, whole)
    trainer.export_hf(tmp_path / "out")
    for found in run_ranks(2, _with_split_matrices, folder, state):
        assert found[0] == base
        assert all((one - other).abs().max() < 2e-5 for one, other in zip(found[1:3], want, strict=True))
        assert worst_difference(found[3], theirs) < 1e-5
        assert all((found[4][name] - tensor).abs().max() < 5e-6 for name, tensor in weights.items())
    exported, merged = (load_file(path / "out" / "model.safetensors") for path in (tmp_path, state))
    assert all((exported[name] - tensor).abs().max() < 2e-5 for name, tensor in merged.items())


@pytest.mark.slow
def test_two_ranks_match_peft_in_one_process(tmp_path: Path, world_of_one: None) -> None:
    folder, whole = make_model_folder("qwen3", tmp_path / "model"), make_batch(LENGTHS)
    (tmp_path / "contract").mkdir()
    (tmp_path / "state").mkdir()
    trainer = engine(folder)
    step(trainer, whole)
    write_files(tmp_path / "state", trainer.snapshot())
    trainer.export_hf(tmp_path / "out")
    want, theirs = peft_results(folder, tmp_path / "out" / "adapter", whole)
    frozen, _ = peft_results(folder, None, whole)
    for found in run_ranks(2, _on_two_ranks, folder, tmp_path):
        for ids, *logprobs, mine in found.values():
            for got, all_rows in zip(logprobs, (frozen, want), strict=True):
                rows = dict(zip(whole.sample_ids.tolist(), all_rows.split(whole.lengths.tolist()), strict=True))
                assert (got - torch.cat([rows[i] for i in ids])).abs().max() < 2e-5
            assert worst_difference(mine, theirs) < 1e-5


def test_no_rank_computes_an_earlier_fingerprint_that_did_not_exist() -> None:
    """Earlier versions took buffers for split by rows, and failed if a rank had no row: here rank 2 of 3."""
    model: Any = torch.nn.Module()
    model.register_buffer("bias", torch.zeros(4))

    def split(name: str, dtype: str, shape: Any, dim: int | None) -> TensorShards:
        return TensorShards.rows(name, dtype, shape, 3)

    mesh: Any = SimpleNamespace(size=3, shards_of=split)
    adapters: Any = SimpleNamespace(config=SimpleNamespace(are_merged=False))
    assert NamedWeights(model, mesh, {}, adapters).fingerprint(earlier=True) == ""
