"""A user's program against hpcrl, for mypy: tests/test_typed.py reads the revealed types. It is never run.

A revealed type contains Any exactly if the line ends with `# Any: REASON`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, reveal_type

import torch
from torch import Tensor

import hpcrl
from hpcrl.algorithms.advantage_estimator import ReturnsAdvantage
from hpcrl.algorithms.functional import discounted_returns
from hpcrl.algorithms.interface import (
    AdvantageEstimator,
    Algorithm,
    AllSum,
    Objective,
    Outputs,
    RewardTable,
    model_tokens,
    required,
)
from hpcrl.config import (
    Config,
    ConfigError,
    EnvConfig,
    GeneratorConfig,
    LoadedConfig,
    PolicyLoss,
    RewardConfig,
    TrainerConfig,
    load,
    parse,
    read,
)
from hpcrl.controller.context import Run
from hpcrl.convert.conversions import ConvertOptions, to_hf, to_megatron
from hpcrl.engines.gen.generation_engine import GenEngine, Output, Request, SamplingParams
from hpcrl.engines.train.training_engine import TrainEngine
from hpcrl.envs.environment import Env, Observation
from hpcrl.envs.tool_formats.reading import Parsed, ToolCall, ToolFormat
from hpcrl.envs.tools.tool import Result, Tool, schema
from hpcrl.launch.executor import HpcrlExecutor, submit_all
from hpcrl.launch.prepare import prepare
from hpcrl.launch.start import start
from hpcrl.metrics.stats import Stat, Stats
from hpcrl.metrics.trackers.tracker import TrackedRun, Tracker
from hpcrl.rewards.reward import ModelTurn, PerResponse, Reward, RewardItem, Score, make_reward
from hpcrl.rollout.batch import Batch, Norms
from hpcrl.rollout.store import OutcomeRecord, RolloutReader
from hpcrl.spec.fields import Positive, Section, Share
from hpcrl.spec.kinds import (
    AlgorithmSpec,
    EnvSpec,
    GenEngineSpec,
    PipelineSpec,
    RewardSpec,
    RoleSpec,
    TrackerSpec,
    TrainEngineSpec,
)
from hpcrl.spec.options import read_options
from hpcrl.spec.tables import ALGORITHMS, ENVS, GEN_ENGINES, PIPELINES, REWARDS, ROLES, TRACKERS, TRAIN_ENGINES
from hpcrl.spec.trajectory import Field, Level, Origin, declare
from hpcrl.system.exit_codes import ExitCode

reveal_type(hpcrl.__version__)


def from_python(words: Sequence[str]) -> None:
    run = hpcrl.train(*words, experiment="demo", trainer={"lr": 1e-5}, reward="my_reward.py:score")
    reveal_type(run)
    reveal_type(hpcrl.Run("runs/demo").state)
    reveal_type(run.metrics.steps)  # Any: numpy's array of unknown shape
    reveal_type(run.metrics["critic/rewards/mean"])  # Any: numpy's array of unknown shape
    for sample in run.samples(step=3):
        reveal_type(sample.response)
        reveal_type(sample.reward)
        reveal_type(sample.messages)  # Any: messages in chat form are JSON
    reveal_type(run.checkpoints()[0].valid)
    reveal_type(run.hf)
    reveal_type(run.wait(timeout_s=3.0).stop())
    reveal_type(hpcrl.evaluate(run, "eval.samples=4", step=3))
    plan = hpcrl.plan("+experiment=demo", env={"default": "guess"})
    reveal_type(plan.memory_bytes)
    reveal_type(plan.kind)
    reveal_type(plan.config)  # Any: the values of keys
    generator = hpcrl.Generator(run, dtype="float32")
    responses: list[list[hpcrl.GeneratedResponse]] = generator.generate(["a", "b"], n=2)
    generator.generate([[{"role": "user", "content": "b"}]])
    reveal_type(responses[0][0].token_ids)
    try:
        hpcrl.train()
    except hpcrl.RunFailed as error:
        reveal_type(error.exit_code)
        reveal_type(error.problems)


class Rank(PolicyLoss):
    """Keys of an algorithm."""

    shrink: Share = 0.0


class RankAdvantage(ReturnsAdvantage[Rank]):
    def normalize(self, table: RewardTable) -> Tensor:
        reveal_type(table.rewards)
        reveal_type(table.domains)
        reveal_type(table.baselines)
        reveal_type(table.domain_ids())
        reveal_type(self.config)
        siblings = table.group_ids[:, None] == table.group_ids
        wins = torch.sign(table.rewards[:, None] - table.rewards) * siblings
        return wins.sum(1) / (siblings.sum(1) - 1).clamp(min=1)


class StepAdvantage(AdvantageEstimator):
    def assign(self, batch: Batch, table: RewardTable, all_sum: AllSum) -> Stats:
        index = model_tokens(batch)
        reveal_type(index)
        reveal_type(all_sum(batch.rewards))
        reveal_type(batch.lengths)
        reveal_type(batch.rewards)
        rewards = required(batch, "token_rewards", "advantages of steps")[index]
        returns = discounted_returns(rewards, batch.row_ids[index], 1.0)
        reveal_type(returns)
        batch.returns = batch.advantages = torch.zeros_like(batch.weights).index_copy(0, index, returns)
        return {"critic/returns/*": Stat(1.0, 1.0)}


class Vanilla(Objective):
    reads = frozenset({"advantages"})
    outputs = frozenset({"entropy"})

    def __init__(self, config: PolicyLoss, temperature: float):
        reveal_type(config.entropy_loss_coef)
        self.coefficient, self.temperature = config.entropy_loss_coef, temperature

    def loss(self, outputs: Outputs, batch: Batch, norms: Norms) -> tuple[Tensor, Stats]:
        reveal_type(outputs.logprobs)
        reveal_type(outputs.entropy)
        reveal_type(norms.tokens)
        reveal_type(self.coefficients)
        index = model_tokens(batch)
        total = -outputs.logprobs[index].sum()
        return total / (norms.tokens or 1.0), {"actor/total_loss": Stat(total.item(), 1.0)}


def algorithms(vanilla: Vanilla, credit: RankAdvantage, stats: Stats) -> None:
    algorithm = Algorithm(vanilla, credit)
    reveal_type(algorithm.reads)
    reveal_type(algorithm.adapt(stats))
    reveal_type(vanilla.prepare)
    reveal_type(vanilla.loss)
    reveal_type(credit.assign)
    reveal_type(credit.propagate)


class Options(Section):
    """Options of a reward."""

    most: Positive = 8


class Vowels(PerResponse):
    def __init__(self, config: RewardConfig):
        options = read_options(Options, config.options)
        reveal_type(options)
        reveal_type(options.most)
        self.most = options.most

    def score_one(self, item: RewardItem) -> Score:
        reveal_type(item.response)
        reveal_type(item.turns)
        reveal_type(item.token_ids)
        reveal_type(item.answer)  # Any: a value of the user's row
        reveal_type(item.extra)  # Any: the columns of the user's row
        found = sum(item.response.count(vowel) for vowel in "aeiou")
        return Score(min(found, self.most) / self.most, 1.0, metrics={"vowels": float(found)})


def concise(items: Sequence[RewardItem]) -> list[Score]:
    """A function as a reward."""
    return [Score(1.0, 1.0, turn_rewards=[0.0 for _ in item.earlier] + [1.0]) for item in items]


def rewards(config: RewardConfig, turn: ModelTurn, score: Score) -> None:
    reward: Reward = make_reward(config)
    reveal_type(reward.score)
    reveal_type(reward.start)
    reveal_type(reward.connect)
    reveal_type(reward.problem_of_row)  # Any: answer and columns of the user's row
    vowels = Vowels(config)
    reveal_type(vowels.score)
    reveal_type(turn.token_ids)
    reveal_type(score.token_rewards)
    reveal_type(score.metrics)


class Echo:
    """An environment, by its methods only."""

    def reset(self, seed: int) -> tuple[Observation, dict[str, Any]]:
        return "say something", {}

    def step(self, action: str) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        return action, 1.0, True, False, {"metrics": {"length": float(len(action))}}


def environments() -> None:
    env: Env = Echo()
    observation, _ = env.reset(0)
    reveal_type(observation)  # Any: messages in chat form are JSON
    reveal_type(env.step("hello")[1:4])


class Clock:
    """A tool, by its methods only."""

    schema = schema("clock", "The time.", zone={"type": "string"})

    def begin(self, seed: int) -> None:
        pass

    def call(self, arguments: dict[str, Any], timeout_s: float) -> Result:
        return Result(f"noon in {arguments['zone']}")


def tools(form: ToolFormat) -> None:
    tool: Tool = Clock()
    reveal_type(tool.begin)
    reveal_type(tool.call)  # Any: arguments are JSON
    reveal_type(tool.schema)  # Any: a JSON schema
    parsed: Parsed = form.parse("<tool_call>{}</tool_call>")
    reveal_type(parsed.calls)
    call = ToolCall("clock", {"zone": "UTC"})
    reveal_type(call.name)
    reveal_type(form.written_call("clock", {}))


class Printer:
    """A tracker, by its methods only."""

    def __init__(self, run: TrackedRun, section: Section | None = None):
        reveal_type(run.folder)
        reveal_type(run.config)  # Any: the configuration as plain data

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        print(step, dict(metrics))

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        print(name, len(rows))

    def image(self, name: str, path: Path) -> None:
        print(name, path)

    def close(self) -> str:
        return ""


def trackers(run: TrackedRun) -> None:
    tracker: Tracker = Printer(run)
    reveal_type(tracker.log)
    reveal_type(tracker.image)
    reveal_type(tracker.close())


ALGORITHM = AlgorithmSpec(
    about="Ranks of rewards.",
    section=Rank,
    make="my_lab.estimator:RankAdvantage",
    objective="my_lab.objective:Vanilla",
    compares_group=lambda section: True,
)
REWARD = RewardSpec(about="Vowels.", make="my_lab.rewards:Vowels", section=Options)
ENV = EnvSpec(about="Says back what it heard.", make="my_lab.envs:Echo")
TRACKER = TrackerSpec(about="Prints.", make="my_lab.trackers:Printer", rewinds=True)
PIPELINE = PipelineSpec(about="Another loop.", make="my_lab.loop:loop")
ROLE = RoleSpec(about="Watches.", make="my_lab.roles:Witness", peers=("trainer",))
TRAIN_ENGINE = TrainEngineSpec(about="Another trainer.", make="my_lab.engine:make", computes=frozenset({"entropy"}))
GEN_ENGINE = GenEngineSpec(about="Another generator.", make="my_lab.generator:make", families=("qwen2",))


def specifications() -> None:
    reveal_type(ALGORITHM.objective)
    reveal_type(REWARD.section)
    reveal_type(REWARD.missing_packages())
    reveal_type(REWARD.load())  # Any: what an import path names
    reveal_type(ENV.probe)
    reveal_type(TRACKER.rewinds)
    reveal_type(PIPELINE.learns_from_rewards)
    reveal_type(ROLE.peers)
    reveal_type(TRAIN_ENGINE.optimizers)
    reveal_type(GEN_ENGINE.families)
    reveal_type(ALGORITHMS["grpo"])
    reveal_type(REWARDS["math"])
    reveal_type(ENVS["tools"])
    reveal_type(TRACKERS["tensorboard"])
    reveal_type(PIPELINES["rlvr"])
    reveal_type(ROLES["trainer"])
    reveal_type(TRAIN_ENGINES["fsdp2"])
    reveal_type(GEN_ENGINES["native"])
    reveal_type(dict(REWARDS.items()))


def loop(run: Run) -> None:
    """A pipeline."""
    reveal_type(run.config)
    reveal_type(run.update_weights(run.first_step))
    for step in run.steps():
        reveal_type(step)
        batch = run.rollouts.next(step)
        reveal_type(batch)
        reveal_type(run.trainer.logprobs(batch, into="old_logprobs"))
        reveal_type(run.trainer.advantages(batch))
        reveal_type(run.trainer.update(batch))
        reveal_type(run.reference.logprobs(batch, into="ref_logprobs"))
        reveal_type(run.critic.values(batch))
        reveal_type(run.evaluate(step))
        run.rollouts.store(batch, run.trainer)
        run.log(step, run.update_weights(step))
        run.checkpoint.maybe_save(step)


def launching() -> None:
    try:
        config: Config = load(["+experiment=demo"])
    except ConfigError as error:
        reveal_type(error.problems)
        return
    reveal_type(load)
    reveal_type(parse({}))
    reading: LoadedConfig = read(["+experiment=demo"])
    reveal_type(reading.lines())
    reveal_type(config.max_steps)
    reveal_type(config.run_dir)
    reveal_type(config.rollout.group_size)
    reveal_type(config.trainer)
    reveal_type(config.trainer.lr)
    reveal_type(config.cluster.partition)
    trainer: TrainerConfig = config.trainer
    generator: GeneratorConfig = config.generator
    env: EnvConfig | None = config.env["default"]
    assert env is not None
    reveal_type(trainer.section(Options).most)
    reveal_type(generator.max_num_seqs)
    reveal_type(env.max_turns)
    reveal_type(prepare(["+experiment=demo"])[1])
    reveal_type(start(["+experiment=demo"]))
    reveal_type(ExitCode.BAD_INPUT)
    jobs = submit_all([["+experiment=demo"]])
    reveal_type(jobs)
    reveal_type(jobs[0].state)
    reveal_type(jobs[0].results())  # Any: a record read from JSON
    reveal_type(HpcrlExecutor("runs"))


def reading_rollouts() -> None:
    reader = RolloutReader("runs/demo")
    reveal_type(reader.steps())
    rollouts = reader.read(1)
    reveal_type(rollouts.batch)
    reveal_type(rollouts.batch.rewards)
    reveal_type(rollouts.texts)
    reveal_type(rollouts.metrics)
    reveal_type(rollouts.facts)  # Any: text or numbers that a run has stored
    reveal_type(rollouts.messages(0))  # Any: messages in chat form are JSON
    reveal_type(reader.sizes(1))
    reveal_type(reader.domains(1))
    endings: list[OutcomeRecord] = reader.outcomes()
    reveal_type(endings[0].outcome)
    reveal_type(endings[0].rewards)
    declare(Field("surprise", "float32", Level.TOKEN, Origin.TRAINING, "how odd a token is", optional=True))


def converting() -> None:
    done = to_hf(Path("runs/demo/checkpoints/step_000010"), Path("hf"), ConvertOptions(dtype=torch.bfloat16))
    reveal_type(done)
    reveal_type(done.written_bytes)
    reveal_type(to_megatron)


def engines(trainer: TrainEngine, generator: GenEngine, batch: Batch, objective: Objective, norms: Norms) -> None:
    reveal_type(trainer.logprobs(batch, [[0]], 1.0))
    reveal_type(trainer.train_step(batch, [[0]], objective, norms))
    reveal_type(trainer.named_weights)
    reveal_type(trainer.snapshot())
    generator.add([Request(1, [1, 2], SamplingParams(8), seed=0)])
    finished: list[Output] = generator.step(8)
    reveal_type(finished[0].token_ids)  # Any: numpy's array of unknown shape and type
    reveal_type(finished[0].finish_reason)
    reveal_type(generator.load_weights)
