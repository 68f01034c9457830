"""The agentic pipeline with a game, as a whole run: killed, resumed, and with episodes to look at."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from hpcrl.config.imitation import ImitationConfig
from hpcrl.metrics.log import read_metrics
from hpcrl.rollout.expert_turns import expert_seed
from hpcrl.rollout.store import RolloutReader
from hpcrl.system.exit_codes import ExitCode
from tests.e2e.program import Start
from tests.e2e.test_resume import check_accounts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WORDS = ["+experiment=agentic_tiny", "deterministic=true", "rollout.max_new_tokens=8"]
BY_STEPS = [  # in half of the episodes
    "data.train=[env:default, env:steps]",
    "+env.steps={name: frozen_lake, max_turns: 4, episode: steps, history: 1}",
    "+env.steps.options={size: 3, tag: '', prompt: '{observation}', invalid: '{observation}'}",
    "algorithm=gigpo",
    "imitation.expert_turns=0.3",
]
KEPT = ("val/", "env/", "critic/", "actor/", "loss/", "imitation/")


def numbers(run_dir: Path) -> list[dict[str, float | None]]:
    return [{name: x for name, x in row.items() if name.startswith(KEPT)} for row in read_metrics(run_dir)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, walker_model: Path) -> Path:
    """A run of five steps with episodes by trajectory and by steps."""
    run_dir = tmp_path_factory.mktemp("agentic") / "whole"
    start = Start(run_dir, [*WORDS, *BY_STEPS, f"model.path={walker_model}"])
    assert start.wait(200.0) == ExitCode.DONE, start.text
    return run_dir


def test_episodes_are_trained_and_reported_and_a_kill_changes_nothing(
    tmp_path: Path, walker_model: Path, whole: Path
) -> None:
    words, killed = [*WORDS, *BY_STEPS, f"model.path={walker_model}"], tmp_path / "killed"
    start = Start(killed, words)
    start.wait_until(lambda: start.step > 2)
    start.kill()
    start = Start(killed, words)
    assert start.wait(200.0) == ExitCode.DONE, start.text
    assert numbers(killed) == numbers(whole)

    first, *_, last = read_metrics(whole)
    for prefix in ("val/env/default", "env/default"):
        row = first if prefix.startswith("val") else last
        assert {f"{prefix}/{name}" for name in ("success", "return", "turns", "action_is_valid")} <= {
            name.removesuffix("/mean") for name in row
        }
    assert last["mismatch/diff/mean"] < 1e-5, "the trainer sees the prompts that the generator saw"
    shapes = Counter()
    for step in range(1, 6):
        read = RolloutReader(whole).read(step)
        dialogues = [read.messages(row) for row in range(32)]
        starts = {json.dumps(messages[0]) for messages in dialogues}
        assert 1 < len(starts) <= 8, "the members of a group start alike"
        for row, messages in enumerate(dialogues):
            turns = sum(message["role"] == "assistant" for message in messages)
            segments = int((read.batch.select([row]).position_ids == 0).sum())
            assert segments in (1, turns), "a sequence for the episode or for each turn"
            shapes[turns > 1, segments > 1] += 1
    assert shapes[True, True] and shapes[True, False], "episodes of several turns, by steps and by trajectory"

    share = [row["imitation/expert_turns"] for row in read_metrics(whole)[1:]]
    assert 0.1 < sum(share) / 5 < 0.5 and last["loss/ce"] > 0
    batch, section = RolloutReader(killed).batch(5), ImitationConfig(expert_turns=0.3)
    expert = batch.loss_mask & (batch.versions < 0)
    assert batch.advantages is not None and batch.ce_weights is not None
    assert not batch.advantages[expert].any() and batch.ce_weights.tolist() == expert.float().tolist()
    for tokens, is_played in ((expert, True), (batch.loss_mask & ~expert, False)):
        samples = batch.sample_ids[batch.row_ids[tokens]].tolist()
        turns = {*zip(samples, batch.turn_ids[tokens].tolist(), strict=True)}
        assert turns and all((expert_seed(section, 0, *turn) is not None) == is_played for turn in turns)

    for step in (0, 5):
        folder = whole / "episodes" / f"step_{step:06d}" / "default"
        assert {path.stem for path in folder.iterdir()} == {"first", "best", "worst"}
        assert all((folder / f"{name}.html").is_file() for name in ("first", "best", "worst"))
        assert all(Image.open(film).n_frames > 1 for film in folder.glob("*.gif"))
        told = (folder / "best.txt").read_text().split("\n\n[")
        assert told[-1].startswith("user]"), "what the last action led to is shown, too"
        for path in folder.iterdir():
            assert path.read_bytes() == (killed / path.relative_to(whole)).read_bytes()


def test_turn_level_advantages_of_gigpo_are_trained_on(whole: Path) -> None:
    check_turns(whole, 5)


@pytest.mark.soak
def test_turn_level_advantages_of_reinforce_are_trained_on(tmp_path: Path, walker_model: Path) -> None:
    words = [
        *WORDS,
        f"model.path={walker_model}",
        "algorithm=turn_reinforce",
        "max_steps=2",
        "eval_every=0",
        "trackers=[]",
    ]
    start = Start(tmp_path / "run", [*words, "layout=single"])
    assert start.wait(200.0) == ExitCode.DONE, start.text
    check_turns(tmp_path / "run", 2)


def check_turns(run_dir: Path, step: int) -> None:
    """In the last step, the advantages of a turn's tokens are equal, and turns of an episode differ."""
    *_, last = read_metrics(run_dir)
    assert last["critic/advantages/max"] > 0 > last["critic/advantages/min"] and last["actor/grad_norm"] > 0
    read = RolloutReader(run_dir).read(step)
    batch, several = read.batch, 0
    for row in range(batch.num_sequences):
        tokens = slice(*batch.cu_seqlens[row : row + 2].tolist())
        turns, advantages = batch.turn_ids[tokens], batch.advantages[tokens]
        values = [
            set(advantages[(turns == turn) & batch.loss_mask[tokens]].tolist()) for turn in range(turns.max() + 1)
        ]
        assert all(len(each) <= 1 for each in values), "all tokens of a turn have its advantage"
        several += len(set().union(*values)) > 1
    assert several, "in some episode the turns differ"


def test_a_critic_learns_the_returns_of_turns(tmp_path: Path, walker_model: Path) -> None:
    """In the first step all values are 0, so a turn ends with x_k + turn_gamma turn_lambd R_(k+1)."""
    words = [*WORDS, f"model.path={walker_model}", "algorithm=turn_ppo", "algorithm.turn_gamma=0.5"]
    start = Start(tmp_path / "run", [*words, "max_steps=1", "eval_every=0", "trackers=[]", "layout=single"])
    assert start.wait(200.0) == ExitCode.DONE, start.text
    [*_, last] = read_metrics(tmp_path / "run")
    assert last["critic/grad_norm"] > 0 and last["actor/grad_norm"] > 0
    batch, longest = RolloutReader(tmp_path / "run").read(1).batch, 0
    for row in range(batch.num_sequences):
        tokens = slice(*batch.cu_seqlens[row : row + 2].tolist())
        turns = batch.turn_ids[tokens].where(batch.loss_mask[tokens], -1)
        following = 0.0
        for turn, reward in reversed(list(enumerate(batch.turn_rewards[slice(*batch.cu_turns[row : row + 2])]))):
            following = reward.item() + 0.5 * 0.95 * following
            assert batch.returns[tokens][turns == turn][-1].item() == pytest.approx(following, abs=1e-6)
        longest = max(longest, int(turns.max()) + 1)
    assert longest > 1


@pytest.mark.parametrize(
    "more", [pytest.param([], id="trajectories", marks=pytest.mark.soak), pytest.param(BY_STEPS, id="steps and GiGPO")]
)
def test_episodes_continue_during_training_and_a_kill_loses_none(
    tmp_path: Path, walker_model: Path, more: list[str]
) -> None:
    """On separate ranks, with weights that arrive within episodes."""
    words = ["+experiment=agentic_tiny", *more, f"model.path={walker_model}", "rollout.max_new_tokens=8"]
    words += ["layout=disaggregated", "layout.trainer.num_ranks=1", "layout.generator.num_ranks=1", "save_every=1"]
    words += ["rollout.max_staleness=1", "algorithm.correction=truncate", "max_steps=8", "eval_every=8"]
    run_dir = tmp_path / "run"
    start = Start(run_dir, words)
    start.wait_until(lambda: start.step > 3)
    start.kill()
    check_accounts(run_dir, prompts_stay=False)
    start = Start(run_dir, words)
    assert start.wait(200.0) == ExitCode.DONE, start.text
    check_accounts(run_dir, prompts_stay=False)
    _, *rows = read_metrics(run_dir)
    assert [row["step"] for row in rows] == [*range(1, 9)]
    assert max(row["scheduler/staleness/max"] or 0.0 for row in rows) == 1
    failed = [row[name] for row in rows for name in ("env/default/failed", "env/steps/failed") if name in row]
    assert failed and not any(failed) and all(row["actor/grad_norm"] is not None for row in rows)


def test_the_agentic_pipeline_requires_an_environment(tmp_path: Path) -> None:
    start = Start(tmp_path / "run", [*WORDS, "env.default=null", "data.train=task:sort_digits", "data.val=null"])
    assert start.wait() == ExitCode.BAD_INPUT
    assert "env: the agentic pipeline plays in environments, and none is given; give env.default.name" in start.text
    assert not (tmp_path / "run").exists()


def test_the_small_variant_of_the_worlds_experiment_runs(tmp_path: Path) -> None:
    """A room, a shop, a repair in a sandbox, sums with Python as a tool, and TextWorld in place of ALFWorld."""
    textworld = pytest.importorskip("textworld")
    game = textworld.GameOptions()
    game.seeds, game.nb_rooms, game.nb_objects, game.quest_length, game.path = 1, 2, 4, 1, str(tmp_path / "game.z8")
    textworld.make(game)
    games, domains = ("push", "shop", "fix", "home"), ("push", "shop", "fix", "home", "sums")
    data = "[{path: task:add, domain: sums}, " + ", ".join(f"{{path: env:{name}}}" for name in games) + "]"
    shares = ", ".join(f"{name}: 0.2" for name in domains)
    words = ["+experiment=agentic_worlds_tiny", "max_steps=1", "eval_every=1", f"data.train={data}", f"data.val={data}"]
    words += [f"data.domain_interleave_probs={{{shares}}}", "rollout.num_prompts=5", "eval.num_prompts=5"]
    words += ["+env.home={name: textworld, max_turns: 2}", f"+env.home.options={{games: [{game.path}], tag: ''}}"]
    start = Start(tmp_path / "run", words)
    assert start.wait(200.0) == ExitCode.DONE, start.text
    *_, last = read_metrics(tmp_path / "run")
    for domain in domains:
        turns = last[f"env/{domain}/turns"]
        assert turns is not None and turns >= 1
        assert last[f"env/{domain}/failed"] == last[f"val/env/{domain}/failed"] == 0
        assert (tmp_path / "run" / "episodes" / "step_000001" / domain / "best.txt").is_file()
    assert all(last[f"env/{game}/success"] == last[f"val/env/{game}/success"] == 0 for game in games)
    assert last["env/sums/tool_calls"] == 0 and last["val/env/sums/no_answer"] == 1, "a metric of the domain's reward"
    told = RolloutReader(tmp_path / "run").read(1)
    prompts = [told.messages(row)[0]["content"] for row in range(10)]
    assert sum(prompt.startswith("add: ") for prompt in prompts) == 2


def test_the_demonstrations_first_steps_run(tmp_path: Path) -> None:
    """The warm-up until actions have the right form, and one step after it."""
    both = ["layout=single", "save_every=0", "eval.num_prompts=16"]
    warm = ["max_steps=80", "eval_every=80", "sft.batch_size=16", "trainer.lr_warmup_steps=10"]
    start = Start(tmp_path / "warm", ["+experiment=demo_agentic_sft", *both, *warm])
    assert start.wait(200.0) == ExitCode.DONE, start.text
    assert (read_metrics(tmp_path / "warm")[-1]["val/env/frozen_lake/action_is_valid"] or 0.0) > 0.5

    step = ["max_steps=1", "eval_every=1", "rollout.num_prompts=8", "rollout.group_size=4", "rollout.filter_std=false"]
    words = ["+experiment=demo_agentic", f"model.path={tmp_path / 'warm' / 'hf'}", *both, *step]
    start = Start(tmp_path / "run", words)
    assert start.wait(200.0) == ExitCode.DONE, start.text
    assert all([*(tmp_path / "run" / "episodes" / f"step_{number:06d}").glob("*/*.gif")] for number in (0, 1))
    first = (tmp_path / "run" / "episodes" / "step_000000" / "frozen_lake" / "first.txt").read_text()
    assert re.search(r"^P\d,\d G\d,\d$", first, re.MULTILINE)
    assert (tmp_path / "run" / "plot.png").is_file()
