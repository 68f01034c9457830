"""The plan of a run as text: roles of ranks, batch sizes, paths."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from hpcrl.cluster.layout import RoleLayout
from hpcrl.config import Config, DataConfig, EvalSampling, LoRAConfig
from hpcrl.config.abilities import chosen
from hpcrl.config.generating import GenerateConfig
from hpcrl.config.teacher_paths import PATH, keys_of_teachers
from hpcrl.launch.frozen import described
from hpcrl.launch.machine import device_row, machine_notes
from hpcrl.launch.model_folder import ModelFolder
from hpcrl.launch.presets import preset_of
from hpcrl.launch.resources import memory_rows, node_rows, step_rows, storage_rows, trainer_rows, update_rows
from hpcrl.models.families import read_shape, shape_of
from hpcrl.models.mtp import mtp_line
from hpcrl.models.shape import CannotPlanError, ModelShape
from hpcrl.models.tower import PREFIX
from hpcrl.planner.adapters import trained
from hpcrl.planner.image_memory import image_tokens_of_row, with_row_tokens
from hpcrl.planner.trainer import trained_shape
from hpcrl.run_folder import RunState
from hpcrl.spec.extras import version_of

NODE_LOCAL = ("/tmp", "/var/tmp", "/dev/shm", "/run")
"""Folders that are usually local to each machine."""
LONGER = {
    "drop": "are dropped",
    "keep_start": "lose the end of the answer",
    "keep_end": "lose the beginning of the prompt",
    "error": "end the run",
}
"""data.overlong_sequences -> what happens to such rows."""


@dataclass
class ShownRows:
    """The plan's summary of the rows. `counts` maps (split, source path) to the number of rows, `examples` are (label,
    text), and `notes` are warnings about rows that look wrong but may be intended."""

    counts: dict[tuple[str, str], str] = field(default_factory=dict)
    examples: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    image_tokens: int | None = None
    """Tokens of a row's images at most; None if they were not counted."""


def describe(config: Config, layout: RoleLayout, model: ModelFolder | None, run: RunState, shown: ShownRows) -> str:
    """The plan as lines of `label  text`."""
    loads, trains = not config.pipeline_spec.rank0_only, config.pipeline_spec.trains
    try:
        shape, unknown = with_row_tokens(plan_shape(config, model), shown.image_tokens), ""
    except CannotPlanError as error:
        shape, unknown = None, f"cannot be planned: {error}"
    rows = [
        ("run", f"{config.run_name}, {_kind(run)}, folder {run.run_dir}"),
        *(("", note) for note in _place_notes(config, run)),
        *(("", note) for note in described(run.ignored, config.model_dump(mode="json"))),
        ("work", _work(config)),
        *((("debug", _debug(config)),) if config.debug != "none" else ()),
        *(_inputs(config, layout, model, shape, shown) if loads else ()),
        *(("", f"note: {note}") for note in shown.notes),
        ("ranks", f"{layout.world_size} ({config.layout.name}), {config.cluster.threads_per_rank} thread(s) each"),
        *(("", f"{ranks:<8}{', '.join(roles)}") for ranks, roles in _rank_table(layout)),
        *(("", note) for note in machine_notes(config, layout)),
        ("device", device_row(config, layout)),
        *(node_rows(config, layout) if config.cluster.name == "slurm" or config.cluster.components else ()),
    ]
    if loads and config.debug == "fake":
        rows.append(("memory", "not computed: no rank holds the model"))
    elif loads:
        rows += _resources(config, layout, shape) if shape is not None else [("memory", unknown)]
    if config.writes_responses:
        written = "" if config.section(GenerateConfig).target is not None else "rows.jsonl "
        rows.append(("files", f"config.yaml plan.txt {written}generate/ generation.json logs/"))
    elif loads and not trains:
        rows.append(("files", "config.yaml plan.txt validation/ evaluation.json evaluation.html logs/"))
    elif loads:
        rollouts = "rollouts/ " if config.generates and config.rollout.save_rollouts else ""
        episodes = "episodes/ " if config.envs and config.evaluates else ""
        responses = "validation/ " if config.evaluates else ""
        looks = ("timeline/ " if config.timeline.enabled else "") + ("profiles/ " if config.profile.steps else "")
        exports = "hf/ hf_critic/" if config.uses_critic else "hf/"
        results = f"tensorboard/ {rollouts}{episodes}{responses}{looks}checkpoints/ {exports} plot.png logs/"
        rows.append(("files", f"config.yaml plan.txt metrics.jsonl {results}"))
    return "\n".join(f"{name:<8}{text}" for name, text in rows)


def _inputs(
    config: Config, layout: RoleLayout, model: ModelFolder | None, shape: ModelShape | None, shown: ShownRows
) -> Iterator[tuple[str, str]]:
    yield "model", _model(config, model, shape, bool(layout.replicas))
    yield from (("", f"note: {note}") for note in (model.notes if model is not None else ()))
    held = model.config.get("dtype", model.config.get("torch_dtype")) if model is not None else None
    if held == "bfloat16" != config.model.dtype and config.pipeline_spec.trains:
        text = f"the model's files are in {held}; the model is kept, and exported to hf/, in {config.model.dtype}"
        yield "", f"note: {text} (model.dtype)"
    if model is not None and config.pipeline_spec.learns:
        text = mtp_line(model.config, model.shapes or None, config.model.mtp)
        yield from [("", text)] if text else []
    if layout.ranks["reference"] and config.reference.path is not None:
        yield "", f"reference {_folder(config.reference.path)}, frozen"
    for folder, keys in keys_of_teachers(config.teacher).items() if layout.ranks["teacher"] else ():
        whose = "" if keys == [PATH] else f" of {', '.join(str(key[-1]) for key in keys)}:"
        yield "", f"teacher{whose} {_folder(folder)}, frozen"
    yield from _own_teacher(config)
    if (endpoint := config.teacher_endpoint) is not None:
        yield "", f"teacher {endpoint.model} at {endpoint.url}, asked once before the first step"
    if config.uses_reference and config.reference.cache is not None:
        yield "", f"log-probs of the reference, computed once before the first step, in {config.reference.cache}"
    yield from _engines(config)
    if not config.generates and config.learns_from_rewards:
        yield "data", f"train rollouts of {config.load_rollouts}"
    elif config.pipeline_spec.trains or config.writes_responses:
        what = "train" if config.pipeline_spec.trains else "prompts"
        yield "data", f"{what} {_sources(config.data, 'train', shown)}"
        yield from _environments(config)
    if config.imitates:
        answers = _sources(config.of_imitation().data, "train", ShownRows())
        yield "", f"{config.imitation.num_rows} rows of answers a step from {answers}"
    if config.data.val is not None:
        yield "" if config.pipeline_spec.trains else "data", f"validation {_sources(config.data, 'val', shown)}"
        if not config.pipeline_spec.trains:
            yield from _environments(config)
    for name, own in config.eval.sets.items() if config.evaluates else ():
        yield "", f"validation of {name}: {_set(own.num_prompts, config.eval.of_domain(name))}"
    yield from shown.examples
    for path in _missing_files(config):
        yield "", f"note: {path} does not exist; its rows are not checked, and the run cannot start without it"
    if shape is not None and shape.tower is not None:
        yield "images", _images(config, shape, shown)
    if config.pipeline_spec.trains:
        yield "batch", _batch(config, layout)
    if layout.replicas:
        yield "" if config.pipeline_spec.trains else "batch", _generation(config, layout)
    yield from _served(config, layout)
    if config.generates and config.rollout.max_staleness > 0:
        yield from _asynchrony(config)


def _environments(config: Config) -> Iterator[tuple[str, str]]:
    if config.envs:
        names = ", ".join(dict.fromkeys(env.name for env in config.envs.values()))
        yield "", f"environment {names}, episodes of up to {config.max_turns} turns"
    if config.expert_plays:
        falls = config.imitation.expert_decay_prompts
        until = "" if falls is None else f", falling to 0 over {falls} prompts"
        yield "", f"the environment's expert plays turns with probability {config.imitation.expert_turns:g}{until}"


def _images(config: Config, shape: ModelShape, shown: ShownRows) -> str:
    """What the plan assumes of images."""
    tower, tokens = shape.tower, image_tokens_of_row(config, shape.tower)
    assert tower is not None
    size = sum(parameter.size for parameter in shape.parameters if parameter.name.startswith(PREFIX))
    pixels = tokens * tower.patches * tower.patch_size**2
    counted = "as counted in the data" if shown.image_tokens is not None else "assumed (data.max_pixels)"
    return f"vision tower of {_count(size)} parameters; at most {tokens} tokens, {pixels:,} pixels a row, {counted}"


def _served(config: Config, layout: RoleLayout) -> Iterator[tuple[str, str]]:
    """The models that ranks of the run serve to rewards."""
    judge, scores = config.judge, config.reward_model
    if ranks := len(layout.ranks["judge"]):
        lengths = f"questions up to {judge.max_prompt_tokens} tokens, answers up to {judge.max_new_tokens}"
        slots = f"{ranks} rank(s) x {judge.max_num_seqs} slots, {judge.engine}"
        yield "judge", f"{_folder(judge.path)}, {judge.dtype}; {lengths}; {slots}"
    if ranks := len(layout.ranks["reward_model"]):
        yield "scores", f"{_folder(scores.path)}, {scores.dtype}; up to {scores.max_tokens} tokens; {ranks} rank(s)"


def _folder(path: str | None) -> str:
    try:
        shape = shape_of(path, "path")
    except CannotPlanError:
        return str(path)
    return f"{path} ({shape.family}, {_count(shape.num_parameters)} parameters)"


def plan_shape(config: Config, model: ModelFolder | None) -> ModelShape:
    """The model's parameters. CannotPlanError if its family is not known."""
    return trained_shape(config, read_shape(config.model.tiny.hf_config() if model is None else model.config))


def _resources(config: Config, layout: RoleLayout, shape: ModelShape) -> Iterator[tuple[str, str]]:
    trains = config.pipeline_spec.trains
    for rows in (trainer_rows, memory_rows, step_rows, update_rows, storage_rows) if trains else (memory_rows,):
        yield from rows(config, layout, shape)


def _place_notes(config: Config, run: RunState) -> Iterator[str]:
    """A note if some nodes of a job may not see the run folder."""
    local = next((folder for folder in NODE_LOCAL if run.run_dir.resolve().is_relative_to(folder)), None)
    if config.cluster.name == "slurm" and local is not None:
        yield f"note: on most clusters {local} is local to each machine, but all nodes must see the run folder"


def _kind(run: RunState) -> str:
    words = {"fresh": "new", "resume": f"attempt {run.attempt + 1}, resumes", "finished": "finished"}[run.kind]
    words += f", {run.lineage}" if run.lineage else ""
    return f"{words}; changed: {', '.join(run.changes)}" if run.changes else words


def _work(config: Config) -> str:
    if config.pipeline_spec.work is not None:
        return config.pipeline_spec.work(config)
    what = ", ".join((config.pipeline, *_methods(config)))
    save = f"checkpoint every {config.save_every}" if config.save_every else "checkpoint at the end"
    validates = config.evaluates or config.validates_rows
    evaluate = f"evaluation every {config.eval_every}" if validates else "no evaluation"
    return f"{what}, {config.max_steps} steps, {evaluate}, {save}{', deterministic' if config.deterministic else ''}"


def _methods(config: Config) -> Iterator[str]:
    """What the run learns by: its pipeline's own words, the algorithm if a domain has the policy loss, the teacher."""
    yield from config.pipeline_spec.methods(config)
    if not config.has_algorithm:
        return
    weights = config.loss.values()
    if not weights or any(each.policy for each in weights):
        yield _algorithm(config)
    if config.uses_teacher:
        own = config.teacher
        beta = "" if own.form == "sampled" else f", beta {own.beta:g}"
        tokens = f", {own.top_k} tokens" if own.form == "top_k" else ""
        yield f"teacher ({own.form}{tokens}{beta})"


def _own_teacher(config: Config) -> Iterator[tuple[str, str]]:
    """A policy that is its own teacher, and prompts that only a teacher reads."""
    own = config.teacher
    if not config.uses_teacher:
        return
    if own.source == "base":
        yield "", "teacher: the policy without its adapters, by the trainer's engine; no copy of weights"
    elif own.is_trainer and own.source == "policy":
        yield "", "teacher: the policy before each step's update, by the trainer's engine; no copy of weights"
    elif own.source == "policy":
        yield "", f"teacher: a copy of the policy, first the initial one, updated every {own.sync_every} step(s)"
    if own.context is not None:
        yield "", f"the teacher reads prompts up to {config.teacher_prompt_tokens} tokens with teacher.context"


def _algorithm(config: Config) -> str:
    """The algorithm, with the configuration's preset if its name differs."""
    name, preset = getattr(config.algorithm, "advantage_estimator", ""), preset_of(config)
    return name if preset in ("", name) else f"algorithm={preset} ({name})"


def _engines(config: Config) -> Iterator[tuple[str, str]]:
    """Versions of the packages that engines and other parts need, on this machine, which may be a login node."""
    specs = [spec for _, _, spec in chosen(config)]
    versions = {module: version_of(module) for spec in specs for module in spec.needs}
    if versions:
        yield "engines", ", ".join(f"{module} {found or '(not installed here)'}" for module, found in versions.items())
    for module, tested in ((module, tested) for spec in specs for module, tested in spec.tested_versions.items()):
        if versions.get(module) and not versions[module].startswith(tested):
            yield "", f"note: {module} {versions[module]} is installed, but hpcrl is written for {tested}*"
    yield from (("", f"note: {text}") for spec in specs for text in spec.notes(config))


def _debug(config: Config) -> str:
    fake = config.fake
    return {
        "rollout_only": "rollout_only: no log-probs, no optimizer step; the initial weights stay",
        "train_only": f"train_only: step N trains on the stored rollouts of step N in {config.load_rollouts}",
        "fake": "fake: engines without a model (only its tokenizer is used), with durations "
        f"{fake.decode_s:g} s per decode step, {fake.logprobs_s:g} s for the log-probs of a batch, {fake.train_s:g} s "
        f"per optimizer step; random rewards, {fake.pass_rate:.0%} pass",
    }[config.debug]


def _model(config: Config, model: ModelFolder | None, shape: ModelShape | None, generates: bool) -> str:
    count = f"{_count(shape.num_parameters)} parameters" if shape is not None else "parameters not counted"
    if shape is not None and shape.num_active < shape.num_parameters:
        count += f", {_count(shape.num_active)} active"
    if config.lora is not None:
        learnt = _count(trained(config, shape).num_parameters) if shape is not None else "some"
        count += f", frozen; {learnt} in adapters of rank {_ranks(config.lora)} are trained"
    if model is None:
        tiny = config.model.tiny
        return (
            f"tiny {tiny.architecture} ({tiny.num_layers} layers, hidden {tiny.hidden_size}, {count}), "
            f"random weights, created in the run folder, {_types(config, generates)}"
        )
    return f"{model.path} ({model.model_type}, {count}), {_types(config, generates)}"


def _ranks(lora: LoRAConfig) -> str:
    ranks = sorted({lora.rank, *lora.rank_pattern.values()})
    return f"{ranks[0]} to {ranks[-1]}" if len(ranks) > 1 else str(ranks[0])


def _types(config: Config, generates: bool) -> str:
    """The number types of trainer and generator."""
    held, computed, generated = config.model.dtype, config.trainer.param_dtype, config.generator.dtype
    if not config.pipeline_spec.trains:
        return generated
    if held == computed and (held == generated or not generates):
        return held
    return f"trained in {computed}, kept in {held}{f', generated in {generated}' if generates else ''}"


def _missing_files(config: Config) -> list[str]:
    """Missing prompt files, which a dry run does not need."""
    if not config.dry_run or (config.debug == "train_only" and not config.evaluates):
        return []
    from hpcrl.data.places import is_missing
    from hpcrl.data.rows import sources

    return [source.path for split in ("train", "val") for source in sources(config.data, split) if is_missing(source)]


def _sources(data: DataConfig, split: Literal["train", "val"], shown: ShownRows) -> str:
    """The sources of a split, with row counts for each that was read."""
    from hpcrl.data.rows import sources

    paths = [source.path for source in sources(data, split)]
    return ", ".join(
        f"{path} ({shown.counts[split, path]})" if (split, path) in shown.counts else path for path in paths
    )


def _set(num_prompts: int | None, asked: EvalSampling) -> str:
    """How a domain of eval.sets is evaluated."""
    prompts = f"{num_prompts} prompt(s)" if num_prompts is not None else "its part of eval.num_prompts"
    limit = f", up to {asked.max_new_tokens} tokens" if asked.max_new_tokens is not None else ""
    return f"{prompts}, {asked.samples} response(s) each at temperature {asked.temperature:g}{limit}"


def _batch(config: Config, layout: RoleLayout) -> str:
    division = layout.division("trainer")
    trainers = f"{len(division.ranks)} trainer rank(s)"
    if division.is_split:
        trainers += f" in {len(division.groups)} data-parallel group(s)"
    if (batch_size := config.pipeline_spec.batch_size) is not None:
        most, overlong = config.data.max_sequence_tokens, config.data.overlong_sequences
        if config.trains_head:
            most, overlong = config.head_training.max_tokens, "drop"
        limit = "the model's context" if most is None else f"{most} tokens"
        longer = LONGER[overlong]
        return f"{batch_size(config)} rows a step over {trainers}, of up to {limit}; longer ones {longer}"
    rollout, algorithm = config.rollout, config.algorithm
    samples, updates = rollout.num_prompts * rollout.group_size, algorithm.num_mini_batches * algorithm.ppo_epochs
    if not config.generates:
        return f"the stored responses of a step; {updates} optimizer step(s) over {trainers}{_pairs(config)}"
    extra = f" (+ {rollout.extra_prompts} redundant prompts)" if rollout.extra_prompts else ""
    extra += (
        f" (+ {rollout.num_prompts} greedy responses, not trained on)" if config.algorithm_spec.greedy_baseline else ""
    )
    responses = f"{rollout.num_prompts} prompts x {rollout.group_size} = {samples} responses a step{extra}"
    if not config.learns:
        return f"{responses}; sent to {trainers}, not trained"
    if config.pairs_per_group:
        return f"{responses}; 1 optimizer step over {trainers}{_pairs(config)}"
    return f"{responses}; {updates} optimizer step(s) of {samples // algorithm.num_mini_batches} over {trainers}"


def _pairs(config: Config) -> str:
    """On which of the responses the run trains, if not on all."""
    if not (most := config.pairs_per_group):
        return ""
    best = "its best and its worst" if most == 1 else f"the best and the worst, up to {most} pairs"
    return f", on pairs of a prompt's responses: {best} by reward"


def _generation(config: Config, layout: RoleLayout) -> str:
    replicas, slots = len(layout.replicas), config.generator.max_num_seqs
    return (
        f"prompts up to {config.data.max_prompt_tokens} tokens, responses up to {config.max_response_tokens}; "
        f"{replicas} generator replica(s) x {slots} slots = {replicas * slots} concurrent responses"
    )


def _asynchrony(config: Config) -> Iterator[tuple[str, str]]:
    rollout, algorithm = config.rollout, config.algorithm
    behind = f"up to {rollout.max_staleness:g} steps behind, on_stale={rollout.on_stale}"
    if not config.has_algorithm:
        yield "async", behind
        return
    corrected = str(algorithm.correction)
    for key, what in (("correction_level", " weights"), ("rejection_level", ", rejection by the ratio")):
        if level := algorithm.correction_levels.get(key):
            corrected += f"{what} of each {level.replace('geometric', 'geometric mean')}"
    if algorithm.compares_with_generator:
        level = algorithm.ratio_level.replace("geometric", "geometric mean")
        corrected += f", the loss uses the ratio to the generator's probabilities per {level}"
    yield "async", f"{behind}; correction: {corrected}" if config.learns else behind
    if config.learns and corrected == "none":
        yield "", "note: without correction (algorithm.correction=none) the loss ignores the staleness of a response"
    if rollout.on_new_weights == "continue":
        yield (
            "",
            "note: responses continued with new weights (on_new_weights=continue) keep the old weights' KV cache,",
        )
        yield (
            "",
            "      so their log-probs belong to no single policy; token/mixed_weights_ratio is their share",
        )


def _rank_table(layout: RoleLayout) -> list[tuple[str, tuple[str, ...]]]:
    """Ranges of consecutive ranks with the same roles; for reward ranks also with the same domain."""
    table: list[tuple[int, int, tuple[str, ...]]] = []
    for rank in range(layout.world_size):
        alone = layout.domain_of(rank)
        roles = tuple(
            f"reward of {alone} only" if role == "reward" and alone is not None else role
            for role in layout.roles_of(rank)
        )
        if table and table[-1][2] == roles:
            table[-1] = (table[-1][0], rank, roles)
        else:
            table.append((rank, rank, roles))
    return [(str(a) if a == b else f"{a}-{b}", roles) for a, b, roles in table]


def _count(number: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)
