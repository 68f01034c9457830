"""The specifications of the built-in environments, with their options."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from hpcrl.envs.tool_formats.table import FormatName
from hpcrl.spec.fields import NUMBER, ImportPath, Natural, Positive, SandboxLevel, Seconds, Section, Share
from hpcrl.spec.kinds import EnvSpec
from hpcrl.spec.media import IMAGE


def _tag(name: str) -> str:
    if re.search(r"[<>/\s]", name):
        raise ValueError(f"{name!r} is not the name of a tag; give one such as answer, or an empty text")
    return name


def _symbols(text: str) -> str:
    """Different visible characters; the field's own limits set their number."""
    if len(set(text)) < len(text) or not text.isprintable() or " " in text:
        raise ValueError(f"{text!r} must be different visible characters")
    return text


def _words(names: list[str] | dict[str, int]) -> list[str] | dict[str, int]:
    """Names of actions that differ even without regard to case."""
    if wrong := [name for name in names if not name or name != name.strip()]:
        raise ValueError(f"{wrong[0]!r} is not the name of an action; names have no blanks around them")
    if len({name.lower() for name in names}) < len(names):
        raise ValueError("two actions have the same name; upper and lower case are not told apart")
    return names


def _success(rule: str) -> str:
    if rule not in ("reward", "terminated") and not re.fullmatch(r"info\..+", rule):
        raise ValueError(f"{rule!r} is none of reward, terminated and info.KEY")
    return rule


def _success_seen(rule: str) -> str:
    if rule not in ("reward", "done") and not re.fullmatch(r"observation\..+", rule):
        raise ValueError(f"{rule!r} is none of reward, done and observation.FIELD")
    return rule


def _shows_answer(action: dict[str, Any]) -> dict[str, Any]:
    if "{answer}" not in str(action):
        raise ValueError(f"no field of {action} has {{answer}}, what the response gives")
    return action


Penalty = Annotated[float, Field(le=0), NUMBER]


class GameOptions(Section):
    """Options of every game of one action per turn. Texts may contain the fields {observation}, {actions} (their
    names), {answer} (the tag of an action), {symbols} (their meanings), {turn} (the number of the next turn, from 1)
    and {turns_left} (up to max_turns)."""

    fields: ClassVar[tuple[str, ...]] = ("observation", "actions", "answer", "symbols", "turn", "turns_left")
    """The fields of the texts."""
    prompt: str = "{observation}"
    """First prompt; system_prompt of the data stays before it."""
    turn: str = "Turn {turn}, {turns_left} left:\n{observation}"
    """Text after a valid action."""
    invalid: str = (
        "Turn {turn}, {turns_left} left:\n{observation}\n"
        "That was not a valid action. Choose from {actions}, as in {answer}."
    )
    """Text after a response without a valid action."""
    tag: Annotated[str, AfterValidator(_tag)] = "answer"
    """The action is the text in the last `<tag>` and `</tag>` after the response's thinking; empty: all that text."""
    invalid_reward: Penalty = -0.05
    """Reward of a response without a valid action, which changes nothing."""

    @field_validator("prompt", "turn", "invalid")
    @classmethod
    def _template(cls, text: str) -> str:
        """A text with fields. ValueError if it has an unknown one, or does not show the observation."""
        named = re.findall(r"\{(\w+)\}", text)
        if unknown := [name for name in named if name not in cls.fields]:
            raise ValueError(f"there is no field {{{unknown[0]}}} (there are: {', '.join(cls.fields)})")
        if "observation" not in named:
            raise ValueError("the text must contain {observation}")
        return text


class GridOptions(GameOptions):
    """Options of a game on a grid, whose texts have one more field."""

    fields: ClassVar[tuple[str, ...]] = (*GameOptions.fields, "places")
    size: int
    """Rows and columns."""
    show: Literal["text", "image"] = "text"
    """What {observation} shows: the grid as text, or an image of the grid, whose colours and shapes {symbols} names."""
    tile_pixels: Annotated[int, Field(ge=8, le=112), NUMBER] = 28
    """image: pixels of a place's side. Multiples of the model's patch size x merge size (28 for Qwen2.5-VL) avoid
    resizing."""
    symbols: str
    """The characters for all kinds of places."""


class FrozenLakeOptions(GridOptions):
    """Options of the environment frozen_lake. Texts may also contain {places}: row and column of you and of the goal,
    counted from 0 at the upper left, as in P2,1 G0,3."""

    prompt: str = (
        "You are on a frozen lake. Go to the goal, and not into a hole. The lake, row by row, with {symbols}:\n"
        "{observation}\nYour actions are {actions}. Give one in each answer, as in {answer}. Turns left: {turns_left}."
    )
    """First prompt."""
    size: Annotated[int, Field(ge=2, le=32), NUMBER] = 4
    """Rows and columns of the lake."""
    frozen: Share = 0.8
    """Probability that a place is ice and no hole. Maps whose goal cannot be reached are drawn again."""
    slippery: bool = False
    """Whether a step goes to each side of its direction with a probability of a third."""
    symbols: Annotated[str, Field(min_length=6, max_length=6), AfterValidator(_symbols)] = "P_OGX√"
    """The characters for you, ice, hole, goal, you in a hole and you at the goal."""


class SokobanOptions(GridOptions):
    """Options of the environment sokoban. Texts may also contain {places}: row and column of you, the boxes and the
    targets, counted from 0 at the upper left, as in P1,2 X2,2 O3,4."""

    prompt: str = (
        "You are in a room. Push every box onto a target; you cannot pull. The room, row by row, with {symbols}:\n"
        "{observation}\nYour actions are {actions}. Give one in each answer, as in {answer}. Turns left: {turns_left}."
    )
    """First prompt."""
    size: Annotated[int, Field(ge=5, le=16), NUMBER] = 6
    """Rows and columns of the room, with its outer walls."""
    num_boxes: Annotated[int, Field(ge=1, le=8), NUMBER] = 1
    """Boxes and targets."""
    floor: Annotated[float, Field(ge=0.3, le=1), NUMBER] = 0.7
    """Share of the places within the outer walls that is floor."""
    steps_back: Annotated[int, Field(ge=10, le=10000), NUMBER] = 100
    """Random steps from the solved room back to the start."""
    invalid_reward: Penalty = -0.2
    """Reward of a response without a valid action, below the -0.1 of an action, so to act is never worse."""
    symbols: Annotated[str, Field(min_length=7, max_length=7), AfterValidator(_symbols)] = "#_O√XPS"
    """The characters for wall, floor, target, box on a target, box, you, and you on a target."""

    @model_validator(mode="after")
    def _room_for_boxes(self) -> Self:
        places = round(self.floor * (self.size - 2) ** 2)
        if places < 5 * self.num_boxes:
            raise ValueError(
                f"num_boxes={self.num_boxes} need {5 * self.num_boxes} places of floor, and size={self.size} with "
                f"floor={self.floor:g} has {places}"
            )
        return self


class GuessOptions(GameOptions):
    """Options of the environment guess."""

    prompt: str = (
        "Find the number, which is {observation}. Give {actions} in each answer, as in {answer}. "
        "Turns left: {turns_left}."
    )
    """First prompt."""
    turn: str = "The number is {observation}. Turns left: {turns_left}."
    """Text after a valid action."""
    invalid: str = (
        "That is not a valid guess. Give {actions}, as in {answer}. The number is {observation}. "
        "Turns left: {turns_left}."
    )
    """Text after a response without a valid action."""
    low: Natural = 1
    """Smallest number."""
    high: Annotated[int, Field(ge=1, le=100000), NUMBER] = 100
    """Largest number."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low={self.low} must be below high={self.high}")
        return self


class TicTacToeOptions(GameOptions):
    """Options of the environment tic_tac_toe."""

    prompt: str = (
        "Play tic-tac-toe: three X in a row win. You are X, the opponent is O, free cells have a number.\n"
        "{observation}\nGive the number of a free cell in each answer, as in {answer}."
    )
    """First prompt."""
    opponent: Literal["random", "perfect"] = "random"
    """How the opponent plays."""
    begins: bool = True
    """The model has the first move."""
    draw_reward: Share = 0.5
    """Reward of a draw."""


class GymnasiumOptions(GameOptions):
    """Options of the environment gymnasium."""

    prompt: str = (
        "{observation}\nYour actions are {actions}. Give one in each answer, as in {answer}. Turns left: {turns_left}."
    )
    """First prompt; it should explain the game."""
    id: str = ""
    """The environment's name in gymnasium's registry, such as FrozenLake-v1; package:NAME imports the package first."""
    entry_point: str = ""
    """Instead of id: a class that is not registered, package.module:Class."""
    kwargs: dict[str, Any] = {}
    """Arguments of the environment; with id also arguments of gymnasium.make, such as max_episode_steps."""
    actions: Annotated[list[str] | dict[str, int], AfterValidator(_words)] = []
    """Names of the actions: a list in the order of a Discrete space, or a mapping from name to action, which may omit
    actions; empty: actions are numbers. Not for a Text space, whose actions are texts."""
    observation: Literal["auto", "ansi", "value", "image"] = "auto"
    """What {observation} shows: ansi: the environment's rendering as text (render_mode=ansi); image: its rendering as
    an image (render_mode=rgb_array); value: the observation in Python's notation; auto: ansi if the environment has it,
    else value."""
    highlight: Annotated[str, Field(max_length=1), AfterValidator(_symbols)] = ""
    """Replaces each character that has a coloured background; empty: such characters are shown in [brackets]. Bold
    characters are shown in *asterisks*, other coloured characters in (parentheses)."""
    success: Annotated[str, AfterValidator(_success)] = "reward"
    """When an episode succeeds: reward: it is terminated with a positive reward; terminated: it is terminated;
    info.KEY: this value of info is true at its end."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if bool(self.id) == bool(self.entry_point):
            raise ValueError("give either id, such as FrozenLake-v1, or entry_point, package.module:Class")
        if "render_mode" in self.kwargs:
            raise ValueError("kwargs.render_mode: the option observation chooses it")
        return self


class VerifiersOptions(Section):
    """Options of the environment verifiers."""

    id: str = ""
    """The environment's name for verifiers.load_environment(), equal to the name of its installed package."""
    entry_point: str = ""
    """Instead of id: a class or a function that gives an environment, package.module:NAME."""
    kwargs: dict[str, Any] = {}
    """Arguments of the environment."""
    task: Literal["dataset", "row"] = "dataset"
    """What an episode starts with: dataset: a row of the environment's own data set (for data.val its evaluation set),
    which the seed chooses; row: the messages, `answer` and `info` of the prompt's row."""
    format: FormatName = "auto"
    """How the model writes calls of the environment's tools; auto: as its chat template renders them."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if bool(self.id) == bool(self.entry_point):
            raise ValueError("give either id, such as wordle, or entry_point, package.module:NAME")
        return self


class OpenEnvOptions(GameOptions):
    """Options of the environment openenv. {actions} states that actions are texts."""

    prompt: str = "{observation}\nGive one action in each answer, as in {answer}. Turns left: {turns_left}."
    """First prompt; it should explain the environment and its actions."""
    invalid: str = (
        "That is not a valid action.\nTurn {turn}, {turns_left} left:\n{observation}\n"
        "Give one action in each answer, as in {answer}."
    )
    """Text after a response without a valid action."""
    url: Annotated[str, Field(pattern=r"^(https?|wss?)://[^\s/]+(/[^\s]*)?$")]
    """Address of the environment's server, such as http://node7:8000."""
    client: ImportPath = "openenv.core:GenericEnvClient"
    """The client's class, package.module:Class; the default one serves every environment."""
    action_class: Annotated[str, Field(pattern=r"^$|^[^\s:]+:[^\s:]+$")] = ""
    """The class of actions for the environment's own client, package.module:Class; empty: a mapping."""
    action: Annotated[dict[str, Any], AfterValidator(_shows_answer)] = {"message": "{answer}"}
    """The fields of an action; {answer} in a text, at any depth, is replaced by the response's answer."""
    observation: str = ""
    """What {observation} shows: a field of the observation, or a path (messages.-1.content); empty: all as JSON."""
    reset: dict[str, Any] = {}
    """Arguments of reset() besides the seed; arguments in the row's column `reset`, a mapping, override them."""
    success: Annotated[str, AfterValidator(_success_seen)] = "reward"
    """When an episode succeeds: reward: its last reward is positive; done: it ended; observation.FIELD: true then."""
    timeout_s: Seconds = 60.0
    """Timeout of the connection and of each answer, seconds."""


class TaskOptions(GameOptions):
    """Options of an environment whose texts have the field {task}, what it asks for, instead of {symbols}."""

    fields: ClassVar[tuple[str, ...]] = ("observation", "actions", "answer", "task", "turn", "turns_left")


class WebShopOptions(TaskOptions):
    """Options of the environment webshop. {task} is the instruction."""

    prompt: str = (
        "You are in a web shop. Your task: {task}\nSearch for products, open one, choose its options, and buy it.\n"
        "{observation}\nYour actions are {actions}. Give one in each answer, as in {answer}. Turns left: {turns_left}."
    )
    """First prompt."""
    turn: str = "Turn {turn}, {turns_left} left. Your task: {task}\n{observation}\nYour actions are {actions}."
    """Text after a valid action. As in the original, every page repeats the task."""
    invalid: str = (
        "That is not a valid action.\nTurn {turn}, {turns_left} left. Your task: {task}\n{observation}\n"
        "Choose from {actions}, as in {answer}."
    )
    """Text after a response without a valid action."""
    items: str = ""
    """The original's products (items_shuffle.json); empty: a generated catalogue."""
    attributes: str = ""
    """The original's attributes and synthetic instructions (items_ins_v2.json), which items need."""
    human: str = ""
    """The original's human-written instructions (items_human_ins.json); empty: synthetic instructions."""
    num_products: Positive | None = None
    """Number of products; null: all in the file, or 1000 generated products."""
    seed: Natural = 0
    """Seed of the generated catalogue."""
    held_out: Natural = 500
    """Number of goals, the first ones, that belong only to data.val (seeds of 2^30 and more)."""
    page_chars: Annotated[int, Field(ge=100), NUMBER] = 4000
    """Maximum length of a page's text; the rest is cut off."""
    show_attributes: bool = False
    """Products have a page with their attributes."""

    @model_validator(mode="after")
    def _all_files(self) -> Self:
        if bool(self.items) != bool(self.attributes):
            raise ValueError("items and attributes need each other: items_shuffle.json and items_ins_v2.json")
        if self.human and not self.items:
            raise ValueError("human: instructions by people need items and attributes")
        return self


class TextWorldOptions(TaskOptions):
    """Options of the environment textworld. {task} is what the game asks for."""

    prompt: str = (
        "You play a text adventure.\n{observation}\nActions: {actions}. Give one per answer, as in {answer}. "
        "Turns left: {turns_left}."
    )
    """First prompt. The game's first text contains the task."""
    turn: str = "Turn {turn}, {turns_left} left:\n{observation}\nYour actions are {actions}."
    """Text after a valid action; without {actions} the model has to find the commands."""
    invalid: str = (
        "That is not a valid action.\nTurn {turn}, {turns_left} left:\n{observation}\n"
        "Choose from {actions}, as in {answer}."
    )
    """Text after a response without a valid action."""
    games: list[str] = []
    """Games of TextWorld (.z8 or .ulx, with their .json) and ALFWorld (.tw-pddl), or folders that contain games."""
    val_games: list[str] = []
    """The games of data.val (seeds of 2^30 and more); empty: the same as `games`."""
    reward: Literal["success", "score"] = "success"
    """success: 1 at the end of a won game; score: increase of the score, as a share of its maximum (not ALFWorld)."""

    @model_validator(mode="after")
    def _has_games(self) -> Self:
        if not self.games:
            raise ValueError("games: give files (made by tw-make, or ALFWorld's game.tw-pddl) or folders with files")
        return self


class SWEOptions(TaskOptions):
    """Options of the environment swe. {task} is the row's text."""

    prompt: str = (
        "You are in a shell in the folder of a repository, with these files:\n{observation}\nTask: {task}\n"
        "Give one command in each answer, as in {answer}; the command submit ends the task. Turns left: {turns_left}."
    )
    """First prompt."""
    turn: str = "Turn {turn}, {turns_left} left:\n{observation}"
    """Text after a command."""
    invalid: str = (
        "Turn {turn}, {turns_left} left:\n{observation}\nThat was no command. Give one, as in {answer}, or submit."
    )
    """Text after a response without a command."""
    tag: Annotated[str, AfterValidator(_tag)] = "bash"
    """The command is the text in the last `<tag>` and `</tag>` after the response's thinking; empty: all that text."""
    partial: bool = False
    """The reward is the share of hidden tests that pass; false: 1 if all pass, else 0."""
    output_chars: Annotated[int, Field(ge=100), NUMBER] = 2000
    """Maximum length of the output shown to the model; of longer output the middle is omitted."""
    command_timeout_s: Seconds = 10.0
    """Timeout of a command, seconds."""
    tests_timeout_s: Seconds = 20.0
    """Timeout of each file of hidden tests, seconds."""
    min_level: SandboxLevel = "L1"
    """Minimum isolation level for commands and tests (docs/security.md); L0 is unsafe."""
    memory_mib: Annotated[int, Field(ge=64), NUMBER] = 1024
    """Memory of all processes of a command, and address space of each, MiB."""
    max_processes: Annotated[int, Field(ge=2, le=1024), NUMBER] = 16
    """Processes and threads of a command."""
    max_file_mib: Positive = 16
    """Maximum size of a file, MiB; of all files of an episode four times this."""
    max_output_kib: Positive = 1024
    """Maximum output of a command, KiB; a command that writes more is stopped."""


class RemoteOptions(Section):
    """Options of the environment remote."""

    url: Annotated[str, Field(pattern=r"^https?://[^\s/]+/?$")]
    """Address of the server (python -m hpcrl.launch.env_server), such as http://node7:8123."""
    section: str = "default"
    """The section of the server's configuration whose environment is played."""
    token_env: str = ""
    """Environment variable with the server's token; empty: none."""
    timeout_s: Seconds = 60.0
    """Timeout of a request, seconds."""
    retry_s: Annotated[float, Field(ge=0), NUMBER] = 10.0
    """Time for which a request is repeated after broken connections, seconds."""


class ScriptedOptions(Section):
    """Options of the environment scripted."""

    feedback: str = "check it and answer again"
    """Text after the first answer."""


def _image_if(shown: str) -> frozenset[str]:
    return frozenset({IMAGE}) if shown == "image" else frozenset()


SCRIPTED = EnvSpec(
    about="Asks for a second answer and compares it with the gold answer; for tests and as an example.",
    make="hpcrl.envs.games.scripted:ScriptedEnv",
    section=ScriptedOptions,
    shows=lambda options: frozenset(),
)
FROZEN_LAKE = EnvSpec(
    about="FrozenLake: find a way over the ice to the goal.",
    make="hpcrl.envs.games.frozen_lake:FrozenLake",
    section=FrozenLakeOptions,
    has_expert=True,
    shows=lambda options: _image_if(options.show),
)
SOKOBAN = EnvSpec(
    about="Sokoban: push every box onto a target.",
    make="hpcrl.envs.games.sokoban:Sokoban",
    section=SokobanOptions,
    has_expert=True,
    shows=lambda options: _image_if(options.show),
)
GUESS = EnvSpec(
    about="Find a number that is said to be higher or lower than each guess.",
    make="hpcrl.envs.games.guess:Guess",
    section=GuessOptions,
    shows=lambda options: frozenset(),
    has_expert=True,
)
TIC_TAC_TOE = EnvSpec(
    about="Tic-tac-toe against a random or a perfect opponent.",
    make="hpcrl.envs.games.tic_tac_toe:TicTacToe",
    section=TicTacToeOptions,
    shows=lambda options: frozenset(),
    has_expert=True,
)
GYMNASIUM = EnvSpec(
    about="An environment of gymnasium with a Discrete or a Text action space.",
    make="hpcrl.envs.adapters.gymnasium:Gymnasium",
    section=GymnasiumOptions,
    shows=lambda options: _image_if(options.observation),
    needs={"gymnasium": "gymnasium"},
    probe="hpcrl.envs.adapters.gymnasium:probe",
)
VERIFIERS = EnvSpec(
    about="An environment of verifiers, with its own data set and rubric.",
    make="hpcrl.envs.adapters.verifiers:Verifiers",
    section=VerifiersOptions,
    needs={"verifiers": "verifiers==0.1.14"},
    tested_versions={"verifiers": "0.1.14"},
    probe="hpcrl.envs.adapters.verifiers:probe",
)
OPENENV = EnvSpec(
    about="An environment behind a server of OpenEnv, by any of its clients.",
    make="hpcrl.envs.adapters.openenv:OpenEnv",
    section=OpenEnvOptions,
    needs={"openenv": "openenv==0.10.0"},
    tested_versions={"openenv": "0.10"},
    probe="hpcrl.envs.adapters.openenv:probe",
)
WEBSHOP = EnvSpec(
    about="WebShop: search for a product and buy it.",
    make="hpcrl.envs.webshop.shop:WebShop",
    section=WebShopOptions,
    shows=lambda options: frozenset(),
    has_expert=True,
    probe="hpcrl.envs.webshop.catalogue:probe",
)
TEXTWORLD = EnvSpec(
    about="Games of TextWorld and ALFWorld: text adventures with known commands.",
    make="hpcrl.envs.adapters.textworld:TextWorld",
    section=TextWorldOptions,
    shows=lambda options: frozenset(),
    needs={"textworld": "textworld"},
    probe="hpcrl.envs.adapters.textworld:probe",
)
SWE = EnvSpec(
    about="Repair a small repository by commands in a sandbox; hidden tests judge.",
    make="hpcrl.envs.swe.task:SWE",
    section=SWEOptions,
    shows=lambda options: frozenset(),
    has_expert=True,
    probe="hpcrl.envs.swe.task:probe",
    problem_of_row="hpcrl.envs.swe.row_check:problem_of_row",
    expert_problem_of_row="hpcrl.envs.swe.row_check:expert_problem_of_row",
)
REMOTE = EnvSpec(
    about="An environment on another machine, which a server plays (python -m hpcrl.launch.env_server).",
    make="hpcrl.envs.adapters.remote:RemoteEnv",
    section=RemoteOptions,
    probe="hpcrl.envs.adapters.remote:probe",
)
CLASS = EnvSpec(about="A user-defined class.", make="hpcrl.envs.factory:env_class", imports_code="class_path")
