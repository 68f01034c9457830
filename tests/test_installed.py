"""Engines' arguments and models, which the launch reads without importing the engines."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from hpcrl.config import ConfigError, load, parse
from hpcrl.config.abilities import check_family
from hpcrl.engines.gen.vllm.spec import MODELS, VLLMConfig
from hpcrl.spec import installed
from hpcrl.spec.extras import version_of
from tests.conftest import ROOT

WORDS = ("+experiment=rlvr_7b", "+generator.vllm.options={nonsense: 1, max_num_batchd_tokens: 8, block_size: 32}")
needs_vllm = pytest.mark.skipif(not find_spec("vllm"), reason="vllm is not installed (extra: vllm)")


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    installed.fields.cache_clear()
    yield
    installed.fields.cache_clear()


@pytest.mark.slow
@needs_vllm
def test_unknown_vllm_arguments_are_refused_by_the_launch_without_importing_vllm() -> None:
    program = f"""
import sys
from hpcrl.launch.__main__ import main
code = main({["+cluster=slurm", *WORDS, "dry_run=true"]!r})
assert not {{"vllm", "torch", "transformers"}} & sys.modules.keys()
sys.exit(code)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if "options" in line]
    assert [line.partition(" is not among")[0] for line in lines] == [
        "generator.vllm.options: max_num_batchd_tokens",
        "generator.vllm.options: nonsense",
    ], done.stderr
    assert f"arguments of EngineArgs of vLLM {version_of('vllm')}; did you mean max_num_batched_tokens" in lines[0]


def test_arguments_of_an_engine_that_is_not_installed_are_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    in_image = load([*WORDS, "cluster.container=apptainer", "cluster.image=x.sif"])
    monkeypatch.setattr(installed, "find_spec", lambda name: None)
    for config in (in_image, load([*WORDS])):
        assert config.generator.section(VLLMConfig).options["nonsense"] == 1


@pytest.mark.slow
def test_unknown_sglang_arguments_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a folder like the real one's (tests/engines/test_sglang.py reads that)."""
    folder = tmp_path / "sglang" / "srt" / "arg_groups" / "fields"
    folder.mkdir(parents=True)
    (tmp_path / "sglang" / "__init__.py").write_text("raise RuntimeError('imported')")
    (folder / "some.py").write_text("class Some:\n    attention_backend: str = 'fa3'\n    page_size: int = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    options = "+generator.sglang.options={attention_backend: fa3, atention_backend: fa3}"
    with pytest.raises(ConfigError) as caught:
        load(["+experiment=rlvr_7b", "generator.engine=sglang", options])
    (line,) = [line for line in caught.value.problems if "options" in line]
    assert line.startswith("generator.sglang.options: atention_backend is not among the arguments of ServerArgs"), line
    assert "did you mean attention_backend" in line


@pytest.mark.slow
@needs_vllm
@pytest.mark.parametrize(
    ("architecture", "model_type", "more", "refused"),
    [
        ("Qwen2ForCausalLM", "qwen2", {}, False),
        ("HeliumForCausalLM", "helium", {}, False),  # transformers' own, with vLLM's attention
        ("CodeGenForCausalLM", "codegen", {}, True),  # transformers' own, which cannot use it
        ("NewForCausalLM", "new", {}, True),
        ("NewForCausalLM", "new", {"auto_map": {"AutoModelForCausalLM": "modeling_new.NewForCausalLM"}}, False),
    ],
)
def test_models_unknown_to_vllm_are_refused(
    architecture: str, model_type: str, more: dict[str, Any], refused: bool
) -> None:
    model = {"architectures": [architecture], "model_type": model_type, **more}
    config = parse({"generator": {"engine": "vllm"}})
    found = [problem.text for problem in check_family(config, model_type, ("model", "path"), model)]
    lacks = f"model.path: the vllm generator lacks a model for {architecture} (vLLM {version_of('vllm')})"
    way_out = "; generator.engine=sglang runs all models of its library"
    assert found == ([lacks + way_out] if refused else [])


def test_models_that_vllm_would_tie_are_refused() -> None:
    config = parse({"generator": {"engine": "vllm"}})
    for tied, refused in ((True, 0), (False, 1)):
        model = {"model_type": "lfm2", "tie_word_embeddings": tied}
        found = [problem.text for problem in check_family(config, "lfm2", ("model", "path"), model)]
        assert len(found) == refused
    assert "lacks tie_word_embeddings=false of model_type=lfm2, whose head is always the embedding there" in found[0]


@needs_vllm
@pytest.mark.slow
def test_names_read_from_vllms_source_match_vllm() -> None:
    import dataclasses

    from vllm import ModelRegistry
    from vllm.engine.arg_utils import EngineArgs

    names = {field.name for field in dataclasses.fields(EngineArgs)}
    assert installed.fields("vllm", "engine/arg_utils.py", "EngineArgs") == names
    models = installed.table_keys("vllm", "model_executor/models/registry.py", MODELS)
    assert "Qwen3MoeForCausalLM" in models and models <= set(ModelRegistry.get_supported_archs())
