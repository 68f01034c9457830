"""Requirements of a reference with its own path on the configuration: refused before the start, counted in the plan."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import ConfigError, TinyModel, load
from hpcrl.engines.tiny import make_tiny_model
from hpcrl.launch.plan import describe
from hpcrl.launch.prepare import prepare
from hpcrl.models.families import shape_of
from hpcrl.planner.memory import check_sizes, memory
from hpcrl.planner.memory_parts import PHASES
from hpcrl.planner.trainer import reference_parts

KL = "algorithm.kl_loss_coef=0.1"
SFT = "pipeline=tests.e2e.anchored_sft:SPEC"
MODELS = ["model.path=policy", "reference.path=other"]
LORA = ["trainer.lora.rank=4", "trainer.lora.alpha=8"]
SIZES = {"num_heads": 2, "num_kv_heads": 1, "intermediate_size": 16}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (MODELS, "reference.path: not read here, grpo has no KL term (kl_loss_coef, kl_reward_coef)"),
        (["pipeline=sft", *MODELS], "reference.path: not read here, sft has no reference"),
        ([KL, *MODELS, "debug=rollout_only"], "reference.path: not read here, grpo has no reference"),
        (
            [KL, MODELS[1]],
            "reference.path: the run creates the policy (model.tiny), and no other model has its "
            "vocabulary; give model.path, too",
        ),
        (
            [KL, *MODELS, "algorithm.ref_update_steps=5"],
            "algorithm.ref_update_steps: 5, but the policy's weights do not fit the model of reference.path; use null "
            "for one of them",
        ),
        (
            [KL, *MODELS, *LORA, "algorithm.ref_update_steps=5"],
            "algorithm.ref_update_steps: 5, but the policy's weights do not fit the model of reference.path; use null "
            "for one of them",
        ),
        (
            [KL, "reference.cache=x"],
            "reference.cache: not read here, every step of the rlvr pipeline has new responses",
        ),
        ([KL, *MODELS, "reference.model=x"], "reference.model: unknown key"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_settings_are_refused_in_one_line(words: list[str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        RoleLayout.from_config(load(words))
    (line,) = caught.value.problems
    assert line.startswith(expected)


@pytest.mark.parametrize("words", [[KL], [SFT]], ids=["rl", "outside rl"])
def test_adapters_replace_only_a_reference_without_a_path(words: list[str]) -> None:
    def ranks(*more: str) -> tuple[int, ...]:
        config = load([*words, *more])
        assert config.uses_reference
        return RoleLayout.from_config(config).ranks["reference"]

    apart = ["layout.reference.colocate_with=null", "layout.reference.num_ranks=1"]
    assert ranks() == (1, 2) and ranks(*apart) == (3,)
    assert ranks(*LORA) == ()
    with pytest.raises(ConfigError, match=r"layout.reference.num_ranks: not read here, the run has no reference ranks"):
        ranks(*LORA, *apart)
    assert ranks(*LORA, *MODELS) == (1, 2) and ranks(*LORA, *MODELS, *apart) == (3,)
    assert load([*words, *LORA, *MODELS]).of_reference().lora is None


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "policy"
    make_tiny_model(TinyModel(hidden_size=16, num_layers=1, **SIZES), folder)
    return folder


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "other"
    make_tiny_model(TinyModel(architecture="llama", hidden_size=24, num_layers=3, **SIZES), folder)
    return folder


def test_the_plan_counts_and_shows_the_other_model(policy: Path, other: Path, tmp_path: Path) -> None:
    words = [SFT, f"model.path={policy}", "own.batch_size=3", "data.max_prompt_tokens=32", f"run_dir={tmp_path / 'a'}"]
    words += ["layout.reference.colocate_with=null", "layout.reference.num_ranks=2", "data.train=task:sort_digits"]
    config, layout, model, run, shown = prepare([*words, f"reference.path={other}"])
    shape, larger = shape_of(str(policy), ""), shape_of(str(other), "")
    (kind,) = [kind for kind in memory(config, layout, shape) if kind.roles == ("reference",)]
    parts = {part.name: part for part in kind.parts}
    assert kind.ranks == (3, 4) and parts["weights"].during == PHASES
    whole = 4 * larger.num_parameters
    assert whole / 2 <= parts["weights"].num_bytes < whole / 2 * 1.1
    alone = {part.name: part for part in reference_parts(load(words), shape, 2)}
    assert parts["activations"].num_bytes > alone["activations"].num_bytes
    more = load([*words, "own.batch_size=4"])  # the fuller rank has two rows, too
    assert {part.name: part for part in reference_parts(more, shape, 2)} == alone
    more = load([*words, "own.batch_size=5"])  # three
    rows = {part.name: part for part in reference_parts(more, shape, 2)}
    assert rows["activations"].num_bytes == 1.5 * alone["activations"].num_bytes
    text = describe(config, layout, model, run, shown)
    assert f"reference {other} (llama, {larger.num_parameters / 1e3:.3g}k parameters), frozen" in text


def test_a_model_folder_that_cannot_be_the_reference_is_named(policy: Path, other: Path, tmp_path: Path) -> None:
    words = [SFT, f"model.path={policy}", "data.train=task:sort_digits", f"run_dir={tmp_path / 'run'}"]
    words += ["data.max_prompt_tokens=32"]

    def problem(path: Path) -> str:
        with pytest.raises(ConfigError) as caught:
            prepare([*words, f"reference.path={path}"])
        (line,) = caught.value.problems
        return line.partition(" (override ")[0]

    def changed(name: str, change: Callable[[Path], object]) -> Path:
        folder = shutil.copytree(other, tmp_path / name)
        change(folder)
        return folder

    prepare([*words, f"reference.path={other}"])
    assert problem(tmp_path / "none").startswith(f"reference.path: no folder {tmp_path / 'none'}; give one")
    without = changed("without", lambda folder: (folder / "tokenizer.json").unlink())
    assert problem(without) == f"reference.path: no tokenizer in {without} (tokenizer.json)"
    damaged = changed("damaged", lambda folder: (folder / "tokenizer.json").write_text("[]"))
    assert problem(damaged).startswith(f"reference.path: the tokenizers of {damaged} and of {policy} (model.path) ca")
    short = tmp_path / "short"
    make_tiny_model(TinyModel(hidden_size=16, num_layers=1, max_position_embeddings=16, **SIZES), short)
    assert problem(short).endswith(f"= 32 tokens exceed max_position_embeddings of {short} = 16")


def test_every_policy_token_must_have_the_same_id_in_the_reference(policy: Path, other: Path, tmp_path: Path) -> None:
    words = [SFT, "data.train=task:sort_digits", f"run_dir={tmp_path / 'run'}", "data.max_prompt_tokens=32"]
    longer = shutil.copytree(other, tmp_path / "longer")
    content = json.loads((longer / "tokenizer.json").read_text())
    (last, number) = max(content["model"]["vocab"].items(), key=lambda item: item[1])
    content["added_tokens"].append({"id": 320, "content": "<extra>"})
    (longer / "tokenizer.json").write_text(json.dumps(content))
    prepare([*words, f"model.path={policy}", f"reference.path={longer}"])
    swapped = shutil.copytree(other, tmp_path / "swapped")
    content["model"]["vocab"][last] = number + 1000
    (swapped / "tokenizer.json").write_text(json.dumps(content))
    for wrong, its, text in (
        (swapped, policy, f"token {last!r} has the id {number + 1000}, not {number}"),
        (policy, longer, "token '<extra>' does not exist, not 320"),
    ):
        with pytest.raises(ConfigError) as caught:
            prepare([*words, f"model.path={its}", f"reference.path={wrong}"])
        (line,) = caught.value.problems
        assert line.partition(" (override ")[0] == (
            f"reference.path: {wrong} has another vocabulary than {its} (model.path): {text}; give a model with the "
            "policy's tokenizer"
        )


def test_the_references_split_and_vocabulary_rows_are_checked(policy: Path, other: Path, tmp_path: Path) -> None:
    few = tmp_path / "few"
    make_tiny_model(TinyModel(hidden_size=16, num_layers=1, vocab_size=300, **SIZES), few)
    words = [f"model.path={policy}", "trainer.fsdp2.tensor_parallel=2", f"reference.path={few}"]
    shape = shape_of(str(policy), "")
    for first, lines in ((KL, 1), (SFT, 0)):  # only a generator samples from all rows
        config = load([first, *words, "trainer.fsdp2.tensor_parallel=1"])
        found = [problem.text for problem in check_sizes(config, RoleLayout.from_config(config), shape)]
        text = (
            f"reference.path: {few} has a vocabulary of 300 rows, the policy's 320; give a model with at least as many"
        )
        assert found == [text] * lines
    config = load([KL, *words[:2], f"reference.path={other}"])
    found = [problem.text for problem in check_sizes(config, RoleLayout.from_config(config), shape)]
    assert len(found) == 2 and found[0] + " (reference.path)" == found[1], found


def test_a_folder_for_stored_log_probs_is_made_absolute_and_checked(tmp_path: Path, policy: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "answer": "b"}\n')
    words = ["pipeline=tests.e2e.anchored_sft:SPEC", f"model.path={policy}", f"data.train={rows}", "dry_run=true"]
    config, layout, model, run, shown = prepare([*words, "reference.cache=cache"])
    assert config.reference.cache == str(Path("cache").absolute())
    assert (
        f"log-probs of the reference, computed once before the first step, in {Path('cache').absolute()}"
        in describe(config, layout, model, run, shown)
    )
    with pytest.raises(ConfigError) as error:
        prepare([*words, f"reference.cache={rows}/cache"])
    assert str(error.value).startswith(f"reference.cache: {rows} is not a folder; give a folder for stored log-probs")
