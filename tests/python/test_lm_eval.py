"""The model `hpcrl` of lm-evaluation-harness against the harness's own `hf`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hpcrl.config import TinyModel
from hpcrl.engines.tiny import make_tiny_model
from hpcrl.python import lm_eval as command
from tests.conftest import ROOT

TASKS = ROOT / "tests" / "fixtures" / "lm_eval"
TEXTS = (
    "The answer is \\boxed{42}. So the final answer is 42.",
    "sort: 3 1 2",
    " leading and trailing  ",
    "Grüße, 世界",
    "",
)


def test_without_the_harness_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert command.main() == 2
    assert capsys.readouterr().err == "lm_eval is not installed: python -m pip install lm_eval\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed; make test-outside")
    path = tmp_path_factory.mktemp("model") / "tiny"
    make_tiny_model(TinyModel(max_position_embeddings=128), path)
    model, generator = AutoModelForCausalLM.from_pretrained(path), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.15)
    model.save_pretrained(path)  # its greedy responses do not repeat one token
    return path


@pytest.fixture(scope="module")
def both(folder: Path) -> tuple[Any, Any]:
    """hf's model and hpcrl's."""
    from lm_eval.models.huggingface import HFLM

    from hpcrl.python.lm_eval_model import HpcrlLM

    return HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=1), HpcrlLM(str(folder))


def instances(kind: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, each, i) for i, each in enumerate(arguments)]


@pytest.mark.outside
def test_log_likelihoods_are_those_of_hf(both: tuple[Any, Any]) -> None:
    """Also of contexts that are empty, or too long with their continuation."""
    contexts, continuations = (*TEXTS, "word " * 200), (" yes", "no", " 42 is the answer", "\n")
    requests = instances("loglikelihood", [(c, t) for c in contexts for t in continuations])
    theirs, mine = (model.loglikelihood(requests, disable_tqdm=True) for model in both)
    for (value, greedy), (expected, its) in zip(mine, theirs, strict=True):
        assert value == pytest.approx(expected, abs=1e-4) and greedy == its
    likely = both[1].generate_until(instances("generate_until", [("sort:", {"until": [], "max_gen_toks": 3})]))
    again = [model.loglikelihood(instances("loglikelihood", [("sort:", likely[0])])) for model in both]
    assert again[0][0][1] == again[1][0][1]

    texts = instances("loglikelihood_rolling", [(text,) for text in (*TEXTS[:-1], "one two three " * 90)])
    theirs, mine = (model.loglikelihood_rolling(texts, disable_tqdm=True) for model in both)
    assert mine == pytest.approx(theirs, abs=1e-3, rel=1e-6)


@pytest.mark.outside
def test_greedy_responses_are_those_of_hf(both: tuple[Any, Any]) -> None:
    whole = both[1].generate_until(instances("generate_until", [("sort: 3 1 2", {"until": [], "max_gen_toks": 24})]))
    stop = whole[0][len(whole[0]) // 2 :][:2]
    asked = [
        ("sort: 3 1 2", {"until": [], "max_gen_toks": 24}),
        ("sort: 3 1 2", {"until": ["absent", stop], "max_gen_toks": 24, "do_sample": False}),
        ("add: 12 + 7", {"until": ["\n\n", "a"], "max_gen_toks": 16, "temperature": 0.0}),
        ("word " * 200, {"until": "zzz", "max_gen_toks": 8}),
    ]
    chat = both[1].apply_chat_template([{"role": "user", "content": "sort: 3 1 2"}])
    assert chat == both[0].apply_chat_template([{"role": "user", "content": "sort: 3 1 2"}])
    requests = instances("generate_until", [*asked, (chat, {"until": [], "max_gen_toks": 12})])
    theirs, mine = (model.generate_until(requests, disable_tqdm=True) for model in both)
    assert mine == theirs and mine[:2] == [whole[0], whole[0].split(stop)[0]] and len(mine[1]) < len(mine[0])


@pytest.mark.outside
def test_samples_of_a_repeated_context_differ_and_unknown_arguments_are_refused(
    both: tuple[Any, Any], folder: Path
) -> None:
    from hpcrl.python.lm_eval_model import HpcrlLM

    keys = {"until": [], "max_gen_toks": 12, "do_sample": True, "temperature": 1.0, "top_k": 50}
    requests = instances("generate_until", [("sort:", keys)] * 4)
    texts = both[1].generate_until(requests, disable_tqdm=True)
    assert len({*texts}) == 4 and texts == both[1].generate_until(requests, disable_tqdm=True)
    for wrong, text in {"num_beams": "num_beams=4", "repetition_penalty": "repetition_penalty=4"}.items():
        with pytest.raises(ValueError, match=text):
            both[1].generate_until(instances("generate_until", [("x", {"until": [], wrong: 4})]))
    with pytest.raises(ValueError, match="max_gen_toks is 500"):
        both[1].generate_until(instances("generate_until", [("x", {"until": [], "max_gen_toks": 500})]))
    with pytest.raises(ValueError, match="--model_args peft"):
        HpcrlLM(str(folder), peft="x")


@pytest.mark.outside
def test_the_command_evaluates_tasks_with_the_scores_of_hf(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lm_eval.tasks import TaskManager

    changed = partialmethod(TaskManager.__init__, include_defaults=False)  # reading the harness's own tasks takes 10 s
    monkeypatch.setattr(TaskManager, "__init__", changed)
    monkeypatch.chdir(ROOT)  # the tasks have paths
    for key in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(key, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    scores, responses = {}, {}
    for model, arguments in {"hpcrl": f"path={folder}", "hf": f"pretrained={folder},dtype=float32"}.items():
        words = ["--model", model, "--model_args", arguments, "--device", "cpu", "--tasks", "sums,parity"]
        words += ["--include_path", str(TASKS), "--log_samples", "--output_path", str(tmp_path / model)]
        monkeypatch.setattr(sys, "argv", ["lm_eval", *words])
        assert command.main() == 0
        (file,) = (tmp_path / model).rglob("results_*.json")
        scores[model] = json.loads(file.read_text())["results"]
        files = sorted((tmp_path / model).rglob("samples_sums_*"))
        responses[model] = [json.loads(line)["resps"] for file in files for line in file.open()]
    assert scores["hpcrl"] == scores["hf"] and {*scores["hf"]} == {"sums", "parity"}
    monkeypatch.setattr(sys, "argv", ["lm_eval", "--model", "hpcrl", "--model_args", f"path={tmp_path}", *words[6:]])
    assert command.main() == 2 and f"no tokenizer in {tmp_path}" in capsys.readouterr().err.splitlines()[-1]
    assert responses["hpcrl"] == responses["hf"] and len(responses["hf"]) == 8  # 4 rows, 2 filters
