"""Runs that are killed, signalled or find a damaged checkpoint end with the same result as undisturbed ones."""

from __future__ import annotations

import functools
import json
import math
import random
import re
import signal
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from transformers import AutoTokenizer

from hpcrl.checkpoint.failpoint import FAILPOINTS
from hpcrl.checkpoint.state import read_state
from hpcrl.config import parse
from hpcrl.data import PromptSource
from hpcrl.metrics.log import read_metrics
from hpcrl.rollout.store import RolloutReader
from hpcrl.rollout.types import Prompt
from hpcrl.system.exit_codes import ExitCode
from hpcrl.system.files import committed_step, step_name, steps_in
from hpcrl.workers.peaks import PHASES
from tests.e2e.program import Start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_STEPS = 6
TIMED = ("time/", "system/tps", "system/decode_tps", *(f"system/{phase}/" for phase in {*PHASES.values(), "reference"}))

# Groups are filtered and over-sampled, so that prompts end in several ways; evaluation comes between the steps.
WORDS = f"""
max_steps={NUM_STEPS} save_every=2 eval_every=3 eval.num_prompts=4
rollout.num_prompts=4 rollout.group_size=4 rollout.max_new_tokens=3 data.max_prompt_tokens=32 rollout.filter_std=true
rollout.extra_prompts=2 generator.max_num_seqs=8 generator.decode_chunk_tokens=2 algorithm.num_mini_batches=2
algorithm.kl_loss_coef=0.1 trainer.lr=1e-3 reward.default.name=exact_match reward.default.timeout_s=100
""".split()


VARIANTS = {
    "one_turn": ["deterministic=true"],
    "two_turns": [
        "deterministic=true",
        "env.played.name=scripted",
        "env.played.add_reward=true",
        "algorithm=reinforce",
        "algorithm.norm_mean_type=running",
        "algorithm.norm_std_type=running",
        "algorithm.kl_target=1e-4",
        "algorithm.kl_horizon=100",
        "algorithm.entropy_target=100",
    ],
    "disaggregated": ["deterministic=true", "env.default.name=scripted", "layout=disaggregated"],
    "default": [],
    "ahead": ["layout=disaggregated", "rollout.max_staleness=1", "rollout.on_new_weights=recompute"],
    "carried_over": ["rollout.max_staleness=1", "generator.decode_chunk_tokens=1"],
    "partial_overlap": [
        "layout.generator.colocate_with=null",
        "layout.generator.num_ranks=3",
        "layout.trainer.colocate_with=generator",
        "layout.trainer.num_ranks=1",
        "rollout.max_staleness=2",
        "rollout.on_new_weights=restart",
    ],
}


class Runs:
    """Runs of one configuration in a folder."""

    def __init__(self, folder: Path, words: list[str]):
        self.folder, self.words = folder, words

    def start(self, name: str, failpoint: str = "") -> Start:
        return Start(self.folder / name, self.words, {"HPCRL_FAILPOINT": failpoint} if failpoint else {})

    def finish(self, name: str) -> Path:
        """Start once more and run to the end; returns the run folder."""
        start = self.start(name)
        assert start.wait() == ExitCode.DONE, start.text
        return self.folder / name

    @functools.cached_property
    def undisturbed(self) -> dict[str, Any]:
        """What an undisturbed run leaves."""
        return remains(self.finish("undisturbed"))


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory, digit_model: Path, digit_data: Path) -> dict[str, Runs]:
    """Runs by variant. Of those outside deterministic mode an epoch ends within three steps."""
    few = tmp_path_factory.mktemp("few") / "digits.jsonl"
    few.write_text("".join(digit_data.read_text().splitlines(keepends=True)[:10]))
    made = {}
    for name, more in VARIANTS.items():
        train: Any = digit_data if "deterministic=true" in more else few
        if name == "two_turns":  # a domain with an environment and one without, in every batch
            train = f"[{{path:{digit_data},domain:played}},{{path:{digit_data},domain:plain}}]"
        inputs = [f"model.path={digit_model}", f"data.train={train}", f"data.val={digit_data}"]
        made[name] = Runs(tmp_path_factory.mktemp(name), [*inputs, *WORDS, *more])
    return made


@pytest.fixture
def runs(variants: dict[str, Runs]) -> Runs:
    """Deterministic mode, colocated, rewards without an environment."""
    return variants["one_turn"]


def test_domains_with_and_without_an_environment_share_a_batch(variants: dict[str, Runs]) -> None:
    runs = variants["two_turns"]
    assert runs.undisturbed
    state = read_state(runs.folder / "undisturbed" / "checkpoints" / step_name(NUM_STEPS))["algorithm"]
    assert state["actor/entropy_coef"] == pytest.approx(0.005 * NUM_STEPS) and state["actor/kl_scale"] != 1
    assert {key for key in state if "count" in key} == {f"_reward_moments/count/{name}" for name in ("played", "plain")}
    domains, both = set(), 0
    reader = RolloutReader(runs.folder / "undisturbed")
    named = {record.uid: record.domain for record in reader.outcomes()}
    for step in reader.steps():
        rollouts = reader.read(step)
        batch = rollouts.batch.check()
        here = [named[uid] for uid in batch.group_ids.tolist()]
        domains |= set(here)
        both += len(set(here)) == 2
        turns = batch.turn_rewards.split(batch.cu_turns.diff().tolist())
        for row, domain in enumerate(here):
            roles = [message["role"] for message in rollouts.messages(row)]
            assert sum(turns[row].tolist()) == batch.rewards[row]
            if domain == "plain":
                assert roles == ["user", "assistant"] and len(turns[row]) == 1
            elif batch.turn_ids[batch.cu_seqlens[row + 1] - 1] == 1:
                assert roles == ["user", "assistant", "user", "assistant"] and turns[row][0] == 0
                assert rollouts.messages(row)[2]["content"] == "check it and answer again"
    assert domains == {"played", "plain"} and both > 0


def remains(run_dir: Path) -> dict[str, Any]:
    """Everything in a finished run folder except for times: name -> bytes, tensor, array or text."""
    reader, last = RolloutReader(run_dir), run_dir / "checkpoints" / step_name(NUM_STEPS)
    assert reader.steps() == list(range(1, NUM_STEPS + 1))
    rows = read_metrics(run_dir)
    assert [row["step"] for row in rows] == list(range(NUM_STEPS + 1))
    left: dict[str, Any] = {f"hf/{path.name}": path.read_bytes() for path in sorted((run_dir / "hf").iterdir())}
    for step in reader.steps():
        for path in sorted((run_dir / "rollouts" / step_name(step)).iterdir()):
            left[f"rollouts {step} {path.name}"] = path.read_bytes()
    left["outcomes"] = "\n".join(map(repr, reader.outcomes()))
    left["metrics"] = "\n".join(
        f"{row['step']} {name} {value}"
        for row in rows
        for name, value in sorted(row.items())
        if not name.startswith(TIMED)
    )
    state = read_state(last)
    for name in ("seconds", "save_seconds"):
        del state["counters"][name]
    left["state"] = json.dumps(state, indent=1)
    left |= {path.name: path.read_bytes() for path in sorted(last.glob("random_rank*.pt"))}
    return left | {f"tensor {name}": value for name, value in tensors(last).items()}


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint by their path in it, unsharded."""
    state: dict[str, Any] = {}
    _load_state_dict(
        state, storage_reader=FileSystemReader(checkpoint), planner=_EmptyStateDictLoadPlanner(), no_dist=True
    )
    found: dict[str, torch.Tensor] = {}

    def collect(value: Any, path: str) -> None:
        if isinstance(value, torch.Tensor):
            found[path] = value
        elif isinstance(value, dict):
            for key, entry in value.items():
                collect(entry, f"{path}/{key}")

    collect(state, "")
    assert any("exp_avg_sq" in name for name in found) and any("embed_tokens" in name for name in found)
    return found


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of entries that differ in any bit; texts with their first differing line."""
    names = sorted(one.keys() ^ other.keys())
    for name in one.keys() & other.keys():
        a, b = one[name], other[name]
        if isinstance(a, torch.Tensor):
            same = (
                a.dtype == b.dtype
                and a.shape == b.shape
                and bool((a.view(-1).view(torch.uint8) == b.view(-1).view(torch.uint8)).all())
            )
        else:
            same = a == b
        if not same and isinstance(a, str):
            pairs = zip(a.splitlines(), b.splitlines(), strict=False)
            name += ": " + next((f"{x} / {y}" for x, y in pairs if x != y), "one is longer")
        if not same:
            names.append(name)
    return sorted(names)


def kill_somewhere(runs: Runs, name: str, rng: random.Random, after_step: int) -> str:
    """Start, and kill everything at a random moment after this attempt's first `after_step` steps (0: while it starts).
    Every second time only the launcher is killed, and everything else must end with it."""
    start = runs.start(name)
    if after_step:
        first: list[int] = []

        def far_enough() -> bool:
            if start.step >= 0 and not first:
                first.append(max(start.step - 1, 0))
            return bool(first) and start.step - first[0] >= after_step

        start.wait_until(far_enough)
        delay_s = rng.uniform(0, 0.8)
    else:
        delay_s = rng.uniform(0, 8)
    start.sleep(delay_s)
    ended = start.process.poll() is not None
    if rng.random() < 0.5:
        start.kill_launcher()
    else:
        start.kill(rng)
    return f"killed {delay_s:.2f} s after {'its start' if not after_step else f'{after_step} steps'}, ended {ended}"


def survive(runs: Runs, name: str, rng: random.Random, num_kills: int) -> None:
    """A run killed num_kills times ends like an undisturbed one."""
    told = [kill_somewhere(runs, name, rng, rng.randrange(4)) for _ in range(num_kills)]
    assert differences(remains(runs.finish(name)), runs.undisturbed) == [], told


@pytest.mark.parametrize(
    ("variant", "num_kills"), [pytest.param("one_turn", 4, marks=pytest.mark.soak), ("two_turns", 2)]
)
def test_kills_at_random_moments_change_nothing(variants: dict[str, Runs], variant: str, num_kills: int) -> None:
    survive(variants[variant], "killed", random.Random(variant), num_kills)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("lineage", range(10))
@pytest.mark.parametrize("variant", ["one_turn", "two_turns", "disaggregated"])
def test_fifty_kills_change_nothing(variants: dict[str, Runs], variant: str, lineage: int) -> None:
    survive(variants[variant], f"soaked_{lineage}", random.Random(f"{variant} {lineage}"), 5)


@pytest.mark.parametrize(
    "places", [("renamed", "pruned"), pytest.param(FAILPOINTS, marks=pytest.mark.soak)], ids=["committed", "all"]
)
def test_kills_during_a_save_change_nothing(runs: Runs, places: Sequence[str]) -> None:
    """One failpoint after another; failpoints after the rename leave a checkpoint, so the run makes progress."""
    before = -1
    for place in places:
        start = runs.start("saves", place)
        code = start.wait()
        after = committed_step(runs.folder / "saves")
        committed = place in FAILPOINTS[FAILPOINTS.index("renamed") :]
        assert code == ExitCode.RANK_KILLED and "SIGKILL" in start.text, start.text
        assert (after > before) == committed, f"{place}: from {before} to {after}"
        before = after
    damage_and_finish(runs, "saves")


def damage_and_finish(runs: Runs, name: str) -> None:
    """With its newest checkpoint damaged the run resumes from the previous one and reports it."""
    root = runs.folder / name / "checkpoints"
    *_, older, newest = steps_in(root)
    file = next((root / step_name(newest)).glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    start = runs.start(name)
    assert start.wait() == ExitCode.DONE, start.text
    assert f"skipping {step_name(newest)}: {file.name} is not what was committed" in start.text
    assert f"resumed from {step_name(older)}" in start.text
    assert differences(remains(runs.folder / name), runs.undisturbed) == []


def test_training_continues_during_a_stuck_save_and_loses_nothing_when_it_dies(runs: Runs) -> None:
    """Until the next save is due: two are never under way."""
    start = runs.start("stuck")
    start.wait_until(lambda: start.step >= 2 and len(start.processes_of("hpcrl.checkpoint.writer")) == 2)
    ranks = set(start.ranks.values())
    writer = start.processes_of("hpcrl.checkpoint.writer")[0]
    writer.suspend()

    def due() -> int:  # the save after the blocked one; the previous one may already have been complete
        return max(0, committed_step(runs.folder / "stuck")) + 4

    start.wait_until(lambda: start.step >= min(due(), NUM_STEPS))
    start.sleep(1.0)
    assert start.step <= due()
    assert start.process.poll() is None and ranks == set(start.ranks.values())
    writer.kill()
    assert start.wait() == ExitCode.NOT_SAVED, start.text
    said = re.search(r"checkpoint of step (\d) not written to .* \(trainer, .*", start.text)
    assert said and f"was killed by SIGKILL (pid {writer.pid})" in said[0], start.text
    assert committed_step(runs.folder / "stuck") < int(said[1])
    assert differences(remains(runs.finish("stuck")), runs.undisturbed) == []


def test_a_signal_stops_at_a_step_boundary(runs: Runs) -> None:
    """The next start resumes from there; a signal before the first step ends the start at once."""
    stopped_at = 0
    for number, code in ((signal.SIGUSR1, ExitCode.REQUEUE), (signal.SIGTERM, ExitCode.TERMINATED)):
        start = runs.start("signalled")
        start.wait_until(lambda start=start, done=stopped_at: start.step > done)
        start.process.send_signal(number)
        assert start.wait() == code, start.text
        assert not start.processes()
        stopped_at = committed_step(runs.folder / "signalled")
        assert f"stopped by {number.name} after step {stopped_at}, everything is saved" in start.text
        assert [row["step"] for row in read_metrics(runs.folder / "signalled")] == list(range(stopped_at + 1))
    start = runs.start("signalled")
    start.wait_until(lambda: 1 in start.ranks)
    with start.held(1):  # without this rank no step begins
        start.process.send_signal(signal.SIGINT)
        start.wait_until(lambda: "SIGINT: stopping" in start.text)
    assert start.wait() == ExitCode.INTERRUPTED, start.text
    assert not start.processes() and "ended by SIGINT before a step boundary" in start.text
    assert differences(remains(runs.finish("signalled")), runs.undisturbed) == []


def test_a_second_launch_is_refused_while_one_runs(runs: Runs) -> None:
    start = runs.start("held")
    start.wait_until((runs.folder / "held" / "config.yaml").exists)
    second = runs.start("held")
    assert second.wait() == ExitCode.BAD_INPUT
    assert f"{runs.folder / 'held'} is held by pid {start.process.pid} on host" in second.text
    start.kill()


def test_the_comparison_notices_differences(runs: Runs) -> None:
    """One bit of a weight, one line of a prompt's outcome, a missing file."""
    undisturbed = runs.undisturbed
    name = next(name for name in undisturbed if "embed_tokens" in name and "exp_avg" not in name)
    weight = undisturbed[name].clone()
    weight.view(-1).view(torch.uint8)[7] ^= 1
    other = undisturbed | {
        name: weight,
        "outcomes": undisturbed["outcomes"].replace("attempt=0", "attempt=1", 1),
    }
    del other["rollouts 3 rank_00001.h5"]
    found = differences(undisturbed, other)
    assert [line.split(":")[0] for line in found] == sorted([name, "outcomes", "rollouts 3 rank_00001.h5"])
    assert differences(undisturbed, undisturbed | {}) == []


def test_an_undisturbed_run_trains_and_filters(runs: Runs, digit_model: Path) -> None:
    """Training changes the weights and prompts end in several ways; otherwise resuming would be easy."""
    undisturbed = runs.undisturbed
    assert {"TRAINED", "FILTERED"} <= set(re.findall("PromptOutcome.([A-Z_]+)", undisturbed["outcomes"]))
    assert undisturbed["hf/model.safetensors"] != (digit_model / "model.safetensors").read_bytes()
    assert len({line for line in undisturbed["metrics"].splitlines() if " actor/grad_norm " in line}) == NUM_STEPS


@pytest.mark.parametrize(
    ("variant", "max_staleness", "kills"),
    [
        pytest.param("default", 0, (1, 3, 2), marks=pytest.mark.soak),
        pytest.param("ahead", 1, (1, 3, 2), marks=pytest.mark.soak),
        pytest.param("carried_over", 1, (2,), marks=pytest.mark.soak),
        ("partial_overlap", 2, (2,)),
    ],
)
def test_every_prompt_ends_once_without_deterministic_mode(
    variants: dict[str, Runs], variant: str, max_staleness: int, kills: tuple[int, ...]
) -> None:
    check_kills(variants[variant], random.Random(7), kills, max_staleness)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("variant", "max_staleness"), [("default", 0), ("ahead", 1)])
def test_every_prompt_ends_once_after_twenty_kills(variants: dict[str, Runs], variant: str, max_staleness: int) -> None:
    rng = random.Random(11)
    words = [*variants[variant].words, "max_steps=60", "trainer.lr=1e-5"]  # else all is soon right, and filtered
    folder = variants[variant].folder / "soaked"
    folder.mkdir()
    check_kills(Runs(folder, words), rng, [rng.randrange(4) for _ in range(20)], max_staleness)


def check_kills(runs: Runs, rng: random.Random, after_steps: Sequence[int], max_staleness: int) -> None:
    """Accounting is exact after every kill and at the end, and trained samples respect max_staleness."""
    for after_step in after_steps:
        kill_somewhere(runs, "killed", rng, after_step)
        check_accounts(runs.folder / "killed")
    run_dir = runs.finish("killed")
    check_accounts(run_dir)
    rows = read_metrics(run_dir)
    assert [row["step"] for row in rows] == list(range(len(rows)))
    reader, lags = RolloutReader(run_dir), set()
    for step in reader.steps():
        batch = reader.batch(step)
        lags |= set((step - 1 - batch.versions[batch.loss_mask]).tolist())
    assert {0, min(max_staleness, 1)} <= lags <= set(range(max_staleness + 1))


def check_accounts(run_dir: Path, prompts_stay: bool = True) -> None:
    """On the committed lineage each prompt has one outcome or is open, and the ledger's counts are those. No more
    prompts are open than may be in progress, and none that the starvation rules would have admitted long ago.
    prompts_stay: no environment replaces them."""
    step = committed_step(run_dir)
    if step < 0:
        return
    state = read_state(run_dir / "checkpoints" / step_name(step))
    ledger, untold = state["cursor"]["ledger"], {end["uid"] for end in state["scheduler"]["ended_prompts"]}
    ended = RolloutReader(run_dir).outcomes()  # which refuses a prompt that ended twice
    open_uids = [uid for uid, *_ in ledger["open"]]
    assert sorted([*(record.uid for record in ended), *open_uids]) == list(range(ledger["next_uid"]))
    counts = Counter(record.outcome.value for record in ended)
    assert counts == Counter({kind: sum(c for _, k, _, c in ledger["counts"] if k == kind) for kind in counts})
    assert sum(count for *_, count in ledger["counts"]) == len(ended)
    rollout = parse(yaml.safe_load((run_dir / "config.yaml").read_text())).rollout
    on_their_way = set(open_uids) - untold  # outcomes since the last step are reported after the next
    assert len(on_their_way) <= (1 + rollout.max_staleness) * rollout.num_prompts + rollout.extra_prompts
    patience = (
        4 * rollout.max_attempts * (math.ceil(rollout.max_staleness) + 1) + math.ceil(rollout.max_staleness) + 1
    )  # steps
    begun = RolloutReader(run_dir).batch(step - patience).group_ids.max().item() if step > patience else -1
    assert min(on_their_way, default=math.inf) > begun, "an old epoch is still open"
    prompts = drawn(run_dir, ledger["next_uid"])
    for number in RolloutReader(run_dir).steps():
        batch = RolloutReader(run_dir).batch(number)
        assert len(np.unique(batch.group_ids.numpy())) == rollout.num_prompts
        for uid, start in zip(batch.group_ids.tolist(), batch.cu_seqlens.tolist(), strict=False):
            ids = prompts[uid].token_ids if prompts_stay else ()
            assert tuple(batch.token_ids[start : start + len(ids)].tolist()) == ids


def drawn(run_dir: Path, count: int) -> list[Prompt]:
    """The first prompts of the run's data, as an undisturbed run draws them: each row once in every epoch."""
    config = parse(yaml.safe_load((run_dir / "config.yaml").read_text()))
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    source = PromptSource(config.data, "train", tokenizer, config.seed, config.rollout.num_prompts)
    prompts = [source.next() for _ in range(count)]
    places = Counter((prompt.epoch, prompt.row) for prompt in prompts)
    assert set(places.values()) <= {1} and len(places) == count
    assert len({epoch for epoch, _ in places}) == -(-count // len(source))
    return prompts
