"""Choice of the reward of a row by its domain, including the rewards of built-in sources."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from difflib import get_close_matches

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import Config, RewardConfig
from hpcrl.config.generating import GenerateConfig
from hpcrl.config.teacher_checks import lacks_teacher
from hpcrl.data.places import open_table
from hpcrl.data.rows import ANSWER_KEYS, RawContext, RowSet, parse_row, sources, start_domains
from hpcrl.data.tasks import Split, built_in_reward, is_generated
from hpcrl.rewards.grading.extract import after_marker, last_boxed
from hpcrl.rewards.reward import Reward, make_reward
from hpcrl.rewards.serving.protocol import Begin, Ready, pack, take_answers
from hpcrl.rewards.spec import UNSCORED
from hpcrl.spec.benchmarks import BENCHMARK, BENCHMARKS, benchmark_name
from hpcrl.spec.tables import REWARDS

DEFAULT = "default"
NEAR = 0.75  # minimum similarity of names that the plan reports
CHECK_TIMEOUT_S = 60.0


class Router:
    """Domain -> RewardConfig: its own section, else `default`; without sections, the source's built-in reward; in a
    pipeline that needs no reward, else `none`."""

    def __init__(self, config: Config):
        if config.debug == "fake":
            self._sections = _drawn(config)
        else:  # a benchmark's reward goes before reward.default
            self._sections = (
                benchmark_rewards(config) | dict(config.reward) if config.reward else built_in_rewards(config)
            )
            if not config.pipeline_spec.needs_reward:
                self._sections.setdefault(DEFAULT, RewardConfig(name=UNSCORED))

    def restricted(self, domain: str | None, elsewhere: Collection[str]) -> Router:
        """The router of a rank that scores one domain, or, with None, all domains not scored elsewhere."""
        kept = copy(self)
        if domain is None:
            there = {*elsewhere} - {DEFAULT}
            kept._sections = {name: section for name, section in self._sections.items() if name not in there}
        else:
            kept._sections = {domain: self.of(domain)}
        return kept

    @property
    def sections(self) -> dict[str, RewardConfig]:
        """Every reward that may be used, by the name of its section."""
        return dict(self._sections)

    def of(self, domain: str) -> RewardConfig:
        """The reward of a domain. ValueError names the existing sections."""
        found = self._sections.get(domain, self._sections.get(DEFAULT))
        if found is None:
            there = ", ".join(self._sections) or "none"
            raise ValueError(f"domain {domain!r} has no reward: set {_keys(domain)} (there are: {there})")
        return found


def _keys(domain: str) -> str:
    """The keys that set a domain's reward."""
    return " or ".join(dict.fromkeys((f"reward.{domain}.name", "reward.default.name")))


def _drawn(config: Config) -> dict[str, RewardConfig]:
    """Random rewards for every domain, since responses of fake engines are meaningless."""
    fake = config.fake
    return {DEFAULT: RewardConfig(name="fake", options={"pass_rate": fake.pass_rate, "latency_s": fake.reward_s})}


def benchmark_rewards(config: Config) -> dict[str, RewardConfig]:
    """Domain -> the reward of a benchmark (`benchmark:NAME`)."""
    splits: tuple[Split, ...] = ("train", "val")
    found: dict[str, RewardConfig] = {}
    for source in (source for split in splits for source in sources(config.data, split)):
        with contextlib.suppress(ValueError):  # read_splits reports an unknown name
            if name := benchmark_name(source.path):
                reward = BENCHMARKS[name].reward if name in BENCHMARKS else "reasoning_gym"
                found[source.domain or name] = RewardConfig.model_validate({"name": reward})
    return found


def built_in_rewards(config: Config) -> dict[str, RewardConfig]:
    """Default rewards: each task's and benchmark's own, and maths for a file's domain if its first gold answer has
    "####" or a box."""
    found = benchmark_rewards(config)
    for split in ("train", "val"):
        for source in sources(config.data, split):
            if source.path.startswith(BENCHMARK):
                continue
            if is_generated(source.path):
                domain, name = built_in_reward(source.path)
                if name is not None:
                    found.setdefault(source.domain or domain, RewardConfig.model_validate({"name": name}))
                continue
            try:
                table = open_table(source, config.seed, split)
                row = parse_row(table.row(0), RawContext.of(table, 0, config.data, source.domain))
            except ValueError:  # read_splits reports it
                continue
            answer = row.answer
            if isinstance(answer, str) and (after_marker(answer, "####"), last_boxed(answer)) != (None, None):
                found.setdefault(row.domain, RewardConfig(name="math"))
    return found


def validate_rewards(config: Config, rows: Mapping[Split, RowSet]) -> list[str]:
    """Problems of rewards and of the readable `rows`, one line each. A separate process imports user code."""
    problems = []
    for name, section in config.reward.items():
        if not REWARDS[section.name].imports_code:
            problem = _check_options(section)
        elif section.function:
            problem = _check_function(section)
        else:
            problem = None  # hpcrl.config reports it
        if not problem and config.decoupling_eps is not None:
            problem = _check_parts(section)
        if problem:
            problems.append(f"reward.{name}: {problem}")
    if config.learns_from_rewards or not config.pipeline_spec.trains:
        problems += _check_domains(config, Router(config), rows)
    return problems


def _check_parts(section: RewardConfig) -> str | None:
    """Why a reward's parts cannot be normalised separately, as the algorithm requires."""
    try:
        REWARDS[section.name].part_weights(section.options)
    except ValueError as error:
        return str(error)
    return None


def _check_domains(config: Config, router: Router, rows: Mapping[Split, RowSet]) -> list[str]:
    """Reports domains without a reward, rows without the answer that their reward needs, and rewards without a row."""
    problems, unused = _check_names(config, rows), _unused(config, rows)
    for split, domain, found in _scored(config, rows):
        try:
            scored_by = router.of(domain)
        except ValueError as error:
            near = get_close_matches(domain, router.sections, n=1)
            if unused.isdisjoint(near):  # else the section is misnamed, which _check_names reports
                hint = f"; or did you mean the domain {near[0]}?" if near else ""
                count, where = found.rows_of(domain)
                problems.append(f"{where}: {error}; data.{split} has {_rows(count)} of this domain{hint}")
            continue
        name = scored_by.name
        key = config.section(GenerateConfig).reads_scores if config.writes_responses else ""
        if name == UNSCORED and key:
            count, where = found.rows_of(domain)
            problems.append(
                f"{where}: domain {domain} has no reward, and {key} compares scores; set {_keys(domain)}, or leave it "
                f"out; data.{split} has {_rows(count)} of this domain"
            )
        if domain in found.unanswered and REWARDS[name].compares_answer:
            count, where = found.unanswered[domain]
            looked = config.data.answer_key or ", ".join(ANSWER_KEYS)
            problems.append(
                f"{where}: no answer (looked for {looked}; data.answer_key), which the reward {name} compares "
                f"with; {count} rows of domain {domain} in data.{split} have none"
            )
        problems += _check_rows(scored_by, domain, split, found)
    return list(dict.fromkeys([*problems, *_check_learned(config, router, rows)]))


def _check_learned(config: Config, router: Router, rows: Mapping[Split, RowSet]) -> Iterator[str]:
    """Reports the domains to train on whose rewards are all 0 (the reward `none`), if they learn from nothing else."""
    if not (config.generates and config.learns and "train" in rows):
        return
    own, learned = config.pipeline_spec.objective, "the policy loss"
    if config.pairs_per_group:
        learned = f"the {config.pipeline} pipeline"
    elif own or not config.algorithm_spec.make.startswith("hpcrl."):  # may need no reward
        return
    domains = []
    for domain in (domain for split, domain, _ in _scored(config, rows) if split == "train"):
        weights, section = config.loss_of(domain), router.sections.get(domain, router.sections.get(DEFAULT))
        learns_otherwise = not own and (weights.ce or weights.divergence or not weights.policy)
        unscored = section is not None and section.name == UNSCORED and config.env_of(domain) is None
        if unscored and not learns_otherwise:
            domains.append(domain)
    if domains:
        _, where = rows["train"].rows_of(domains[0])
        whose = f"domain {domains[0]}" if len(domains) == 1 else f"the domains {', '.join(domains)}"
        yield (
            f"{where}: the rewards of {whose} are all 0 (reward none), so {learned} learns nothing there; set "
            f"{_keys(domains[0])}, or use pipeline=distill with a teacher"
        )


def reward_notes(config: Config, rows: Mapping[Split, RowSet]) -> list[str]:
    """Notes on domains that get reward.default although their name is close to a section's: perhaps misspelt."""
    notes = []
    for split, domain, found in _scored(config, rows):
        named = [] if domain in config.reward else [name for name in config.reward if name != DEFAULT]
        if DEFAULT in config.reward and (near := get_close_matches(domain, named, n=1, cutoff=NEAR)):
            count, where = found.rows_of(domain)
            notes.append(
                f"{where}: domain {domain} gets reward.default; its name is close to reward.{near[0]}; "
                f"data.{split} has {_rows(count)} of it"
            )
    return notes


def _scored(config: Config, rows: Mapping[Split, RowSet]) -> Iterator[tuple[Split, str, RowSet]]:
    """(split, domain, its rows) of all domains that need a reward. Excludes domains that an environment rewards, or
    whose environment is missing, which hpcrl.envs.factory reports."""
    for split, found in rows.items():
        for domain in found.domain_names:
            env = config.env_of(domain)
            if env.add_reward if env is not None else domain not in start_domains(config.data, split):
                yield split, domain, found


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def _check_names(config: Config, rows: Mapping[Split, RowSet]) -> list[str]:
    """Reports sections of domains without a row, unless some rows could not be read."""
    problems = []
    for domains in _all_domains(config, rows):
        otherwise = "reward.default is that of all domains without their own"
        trains = config.pipeline_spec.trains  # else the sections may be those of a run with more domains
        wrong = [name for name in config.reward if name in _unused(config, rows)] if trains else []
        problems += [f"reward.{name}: {_no_row_of(name, domains, 'reward', otherwise)}" for name in wrong]
        key, otherwise = "rollout.domains", "the keys of rollout are for all"
        wrong = [name for name in config.rollout.domains if name not in domains] if trains else []
        problems += [f"{key}.{name}: {_no_row_of(name, domains, key, otherwise)}" for name in wrong]
        problems += _check_losses(config, rows)
    if config.evaluates and "val" in rows:
        domains, key = rows["val"].domain_names, "eval.sets"
        wrong = [name for name in config.eval.sets if name not in domains]
        told = [_no_row_of(name, domains, key, "the keys of eval are for all", "data.val") for name in wrong]
        problems += [f"{key}.{name}: {text}" for name, text in zip(wrong, told, strict=True)]
    return problems


def _check_losses(config: Config, rows: Mapping[Split, RowSet]) -> list[str]:
    """Reports weights of domains without a row to train on."""
    if not config.learns_from_rewards or "train" not in rows:
        return []
    domains, otherwise = rows["train"].domain_names, "loss.default is for all domains without their own"
    wrong = [name for name in config.loss if name not in (*domains, DEFAULT)]
    problems = [f"loss.{name}: {_no_row_of(name, domains, 'loss', otherwise, 'data.train')}" for name in wrong]
    return problems + (_check_teachers(config, domains) if config.uses_teacher else [])


def _check_teachers(config: Config, domains: Sequence[str]) -> list[str]:
    """Reports teachers of domains without a row to train on, and domains that learn from a teacher and have none."""
    if config.teacher.source != "folder" or config.teacher.endpoint.url is not None:  # nothing reads them
        return []
    key, otherwise = "teacher.paths", "teacher.paths.default is for all domains without their own"
    wrong = [name for name in config.teacher.paths if name not in (*domains, DEFAULT)]
    problems = [f"{key}.{name}: {_no_row_of(name, domains, key, otherwise, 'data.train')}" for name in wrong]
    asked = [name for name in domains if name not in config.loss]  # hpcrl.config.teacher_checks reports others
    return problems + [why for name in asked if (why := lacks_teacher(config, name))]


def _unused(config: Config, rows: Mapping[Split, RowSet]) -> set[str]:
    return {name for domains in _all_domains(config, rows) for name in config.reward if name not in (*domains, DEFAULT)}


def check_reward_ranks(config: Config, layout: RoleLayout, rows: Mapping[Split, RowSet]) -> list[str]:
    """Reports entries of layout.reward.domains with nothing to score, and row domains without a rank, one line each."""
    problems, key = [], "layout.reward.domains"
    for domains in _all_domains(config, rows) if layout.scorers else ():
        problems += [
            f"{key}.{name}: {_no_row_of(name, domains, key, 'ranks that are not listed score all other domains')}"
            for name in layout.scorers
            if name not in domains
        ]
        envs = {name: env for name in domains if (env := config.env_of(name)) is not None and not env.add_reward}
        problems += [
            f"{key}.{name}: the environment gives this domain's rewards, so these ranks would score nothing; leave it "
            "out, or add a reward to them (env.NAME.add_reward)"
            for name in layout.scorers
            if name in envs
        ]
        if left := [name for name in domains if name not in envs and not layout.scorers_of(name)]:
            problems.append(
                f"{key}: all {len(layout.ranks['reward'])} reward ranks score one domain only, and none is left for "
                f"{', '.join(left)}; raise layout.reward.num_ranks, or give a domain fewer"
            )
    return problems


def _all_domains(config: Config, rows: Mapping[Split, RowSet]) -> Iterator[list[str]]:
    """The domains of all rows; nothing if some rows could not be read."""
    splits: tuple[Split, ...] = ("train", "val")
    if not any(split not in rows and sources(config.data, split) for split in splits):
        yield list(dict.fromkeys(domain for found in rows.values() for domain in found.domain_names))


def _no_row_of(
    name: str, domains: Sequence[str], key: str, otherwise: str, where: str = "data.train or data.val"
) -> str:
    near = get_close_matches(name, domains, n=1)
    hint = f"did you mean {key}.{near[0]}?" if near else otherwise
    return f"no row of {where} is of domain {name} (there are: {', '.join(domains)}); {hint}"


def _check_rows(section: RewardConfig, domain: str, split: Split, found: RowSet) -> list[str]:
    """Reports the first row of a domain that its reward cannot score, with the number of such rows, in one line."""
    if REWARDS[section.name].imports_code or _check_options(section):
        return []
    reward = make_reward(section)
    if type(reward).problem_of_row is Reward.problem_of_row:
        return []
    wrong = [
        f"{where}: {problem}"
        for where, row in found.read_rows(domain)
        if (problem := reward.problem_of_row(row.answer, row.extra))
    ]
    return [f"{wrong[0]}; data.{split} has {len(wrong)} such rows of domain {domain}"] if wrong else []


def _check_options(section: RewardConfig) -> str | None:
    try:
        make_reward(section)
    except ValueError as error:
        return f"options: {error}"
    return None


def _check_function(section: RewardConfig) -> str | None:
    """Start a worker with the function, then end it; returns the problem, if any."""
    command = [sys.executable, "-m", "hpcrl.rewards.serving.worker", str(os.getpid())]
    try:
        done = subprocess.run(
            command,
            input=pack(Begin(section.model_dump_json())),
            stdout=subprocess.PIPE,
            timeout=CHECK_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"function: importing {section.function} takes more than {CHECK_TIMEOUT_S:g} s"
    answers = take_answers(bytearray(done.stdout))
    if not answers or not isinstance(answers[0], Ready):
        return f"function: importing {section.function} ended the process with {done.returncode}"
    return f"function: {answers[0].error}" if answers[0].error else None
