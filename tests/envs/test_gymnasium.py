"""Third-party games of gymnasium as environments; and the built-in frozen lake compared with gymnasium's."""

from __future__ import annotations

import io
import math
from collections import Counter
from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete, Text
from PIL import Image

from hpcrl.config import EnvConfig, parse
from hpcrl.envs.adapters.gymnasium import probe
from hpcrl.envs.factory import check_env, make_env, validate_envs
from hpcrl.envs.games.frozen_lake import FrozenLake
from hpcrl.envs.spec import FrozenLakeOptions, GymnasiumOptions

HERE = "tests.envs.test_gymnasium"
MOVES = ["Left", "Down", "Right", "Up"]
"""In the order of FrozenLake-v1."""
PLAIN = {"prompt": "{observation}", "turn": "{observation}"}
LAKE = {"id": "FrozenLake-v1", "kwargs": {"is_slippery": False}, "actions": MOVES}


def game(**options: Any) -> Any:
    return make_env(EnvConfig(name="gymnasium", options=PLAIN | options), {"extra": {}})


def say(action: str) -> str:
    return f"I go. <answer>{action}</answer>"


class Echo(gymnasium.Env[str, str]):
    """Ends when the action is `word`."""

    action_space = Text(8, charset="abc")
    observation_space = Text(8)
    closed = 0

    def __init__(self, word: str = "abc", reward: float = 1.0, space: Any = None):
        self.word, self.reward = word, reward
        self.action_space = space or self.action_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict]:
        return f"seed {seed}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        return f"not {action}", self.reward, action == self.word, False, {"won": action == self.word}

    def close(self) -> None:
        type(self).closed += 1


class Painted(Echo):
    """Renders its last number as a shade of red, or `picture` if given."""

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["rgb_array"]}
    action_space = Discrete(3)

    def __init__(self, render_mode: str | None = None, picture: Any = None):
        super().__init__("2")
        self.render_mode, self._picture, self._shade = render_mode, picture, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict]:
        self._shade = (seed or 0) % 256
        return super().reset(seed=seed)

    def step(self, action: Any) -> tuple[str, float, bool, bool, dict]:
        self._shade = 100 + int(action)
        return f"not {action}", 1.0, bool(action == 2), False, {}

    def render(self) -> Any:
        assert self.render_mode == "rgb_array"
        return np.full((28, 56, 3), (self._shade, 0, 0), np.uint8) if self._picture is None else self._picture


gymnasium.register("hpcrl/Painted-v0", entry_point=f"{HERE}:Painted")
gymnasium.register("hpcrl/Unrendered-v0", entry_point=f"{HERE}:Echo")


class Wide(Echo):
    action_space = Box(0.0, 1.0)


def test_frozen_lake_of_gymnasium_by_hand() -> None:
    env = game(**LAKE, highlight="P")
    assert env.reset(0)[0] == "PFFF\nFHFH\nFFFH\nHFFG"
    assert env.step(say("up"))[0] == "  (Up)\nPFFF\nFHFH\nFFFH\nHFFG"
    text, reward, *ended, info = env.step("I go Down.")
    assert text.endswith("Choose from Left, Down, Right, Up, as in <answer>...</answer>.") and reward == -0.05
    assert ended == [False, False]
    for word in ("Down", "Down", "Right", "Right", "Down", "Right"):
        text, reward, *ended, info = env.step(say(word))
    assert (text, reward, ended) == ("  (Right)\nSFFF\nFHFH\nFFFH\nHFFP", 1.0, [True, False])
    assert info["metrics"] == {"success": 1.0, "action_is_valid": 7 / 8, "action_is_effective": 6 / 8}
    with pytest.raises(RuntimeError, match="reset"):
        env.step(say("Up"))
    env.reset(0)
    assert [env.step(say(word))[1:3] for word in ("Right", "Down")] == [(0.0, False), (0.0, True)], "a hole"
    env.close()


def test_the_seed_determines_random_outcomes() -> None:
    """Blackjack has no text picture, so its observation is shown."""

    def played(seed: int) -> list[Any]:
        env = game(id="Blackjack-v1", actions={"stick": 0, "hit": 1})
        return [env.reset(seed)[0], *(env.step(say(word))[:4] for word in ("stick",))]

    games = [played(seed) for seed in range(40)]
    assert games == [played(seed) for seed in range(40)]
    real = gymnasium.make("Blackjack-v1")
    assert [text for text, _ in games] == [str(tuple(map(int, real.reset(seed=seed)[0]))) for seed in range(40)]
    assert {reward for _, (_, reward, *_) in games} >= {-1.0, 1.0}
    assert len({text for text, _ in games}) > 20


def test_a_limit_of_steps_truncates_without_success() -> None:
    env = game(
        id="CliffWalking-v1",
        kwargs={"max_episode_steps": 2},
        success="terminated",
        actions=["Up", "Right", "Down", "Left"],
    )
    first, _ = env.reset(0)
    assert first.splitlines()[-1] == "x  C  C  C  C  C  C  C  C  C  C  T"
    assert env.step(say("Right"))[1:4] == (-100.0, False, False), "off the cliff, and back to the start"
    *_, reward, ended, truncated, info = env.step(say("Up"))
    assert (reward, ended, truncated, info["metrics"]["success"]) == (-1.0, False, True, 0.0)
    env = game(id="CliffWalking-v1", success="terminated")
    env.reset(0)
    for action in "0" + 11 * "1" + "2":
        *_, reward, ended, _, info = env.step(say(action))
    assert (reward, ended, info["metrics"]["success"]) == (-1.0, True, 1.0)


def test_a_picture_is_shown_as_characters_by_colour() -> None:
    env = game(id="Taxi-v4")
    first, _ = env.reset(1)
    assert first.count("*") == 2 and first.count("[") == 1 and first.count("(") == 1 and "\x1b" not in first
    plain = game(id="Taxi-v4", observation="value")
    assert plain.reset(1)[0] == str(int(gymnasium.make("Taxi-v4").reset(seed=1)[0]))


@pytest.mark.parametrize("source", [{"id": "hpcrl/Painted-v0"}, {"entry_point": f"{HERE}:Painted"}])
def test_a_rendering_is_shown_as_an_image(source: dict[str, str]) -> None:
    def shade(observation: Any) -> Any:
        (file,) = observation[-1]["images"]
        image = Image.open(io.BytesIO(file))
        assert image.size == (56, 28)
        return image.getpixel((55, 27))

    messages = [{"role": "system", "content": "Play."}, {"role": "user", "content": "row"}]
    config = EnvConfig(name="gymnasium", options={**source, "observation": "image"})
    check_env(config, "default")
    env = make_env(config, {"messages": messages, "extra": {}})
    observation: Any = env.reset(7)[0]
    assert observation[0] == messages[0] and len(observation) == 2
    assert observation[1]["content"].startswith("<image>\nYour actions are numbers from 0 to 2.")
    assert shade(observation) == (7, 0, 0)
    observation, reward, *ended, _ = env.step(say("1"))
    assert (shade(observation), reward, ended) == ((101, 0, 0), 1.0, [False, False])
    observation, *_ = env.step("nothing")
    assert shade(observation) == (101, 0, 0) and "That was not a valid action" in str(observation[0]["content"])
    with pytest.raises(ValueError, match=r"observation: .*Painted.* has no render_mode ansi"):
        check_env(EnvConfig(name="gymnasium", options={**source, "observation": "ansi"}), "default")


@pytest.mark.parametrize(
    ("picture", "problem"),
    [
        ("text", "TypeError: render.. returned str with render_mode=rgb_array, not an array"),
        (np.zeros((2, 2, 3)), "TypeError: an array must be uint8"),
    ],
)
def test_a_rendering_of_another_form_is_refused_when_the_ranks_start(picture: Any, problem: str) -> None:
    options = {"entry_point": f"{HERE}:Painted", "observation": "image", "kwargs": {"picture": picture}}
    with pytest.raises(ValueError, match=f"^observation: no image can be rendered: {problem}"):
        probe(GymnasiumOptions.model_validate(options), own_code=True)
    with pytest.raises(TypeError, match=problem.removeprefix("TypeError: ")):
        game(**options).reset(0)


def test_actions_can_be_texts() -> None:
    env = game(entry_point=f"{HERE}:Echo", success="info.won", prompt="{observation}, {actions}, {answer}")
    assert env.reset(7)[0] == "seed 7, texts of at most 8 characters, <answer>...</answer>"
    seen = [env.step(say(word))[:3] for word in ("ab", "xyz", "abc")]
    assert seen[0] == ("not ab", 1.0, False) and seen[1][1:] == (-0.05, False) and seen[2] == ("not abc", 1.0, True)
    before = Echo.closed
    env.close()
    assert Echo.closed == before + 1


def test_errors_of_an_environment_are_raised_to_the_role() -> None:
    """The role ends the episode at exceptions and at non-numeric rewards."""
    env = game(entry_point=f"{HERE}:Echo", success="info.win", kwargs={"reward": math.nan})
    env.reset(0)
    assert math.isnan(env.step(say("ab"))[1])
    with pytest.raises(KeyError, match=r"options.success: info has no 'win' at the end \(it has: won\)"):
        env.step(say("abc"))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "give either id, such as FrozenLake-v1, or entry_point"),
        ({"id": "FrozenLak-v1"}, "id: 'FrozenLak-v1' cannot be loaded: NameNotFound: Environment `FrozenLak` doesn't"),
        ({"id": "FrozenLake-v9"}, "id: 'FrozenLake-v9' cannot be loaded: VersionNotFound"),
        (
            {"id": "FrozenLake-v1", "kwargs": {"sise": 3}},
            "kwargs: FrozenLake-v1 cannot be made with {'sise': 3, 'render",
        ),
        ({"id": "FrozenLake-v1", "kwargs": {"render_mode": "human"}}, "kwargs.render_mode: the option observation"),
        ({"id": "Pendulum-v1"}, "id: the action space Box(-2.0, 2.0, (1,), float32) is not Discrete or Text"),
        (
            {"id": "Blackjack-v1", "observation": "ansi"},
            "observation: Blackjack-v1 has no render_mode ansi; set observation=value",
        ),
        (
            {"entry_point": "", "id": "hpcrl/Unrendered-v0", "observation": "image"},
            "observation: hpcrl/Unrendered-v0 has no render_mode rgb_array; set observation=value",
        ),
        ({"id": "FrozenLake-v1", "actions": ["Up"]}, "actions: 1 names for the 4 actions of Discrete(4)"),
        ({"id": "FrozenLake-v1", "actions": {"Up": 4}}, "actions: Up is 4, which Discrete(4) does not have"),
        ({"id": "FrozenLake-v1", "actions": {"Up": 3, "UP": 2}}, "actions: two actions have the same name"),
        ({"id": "FrozenLake-v1", "actions": ["Up ", "a", "b", "c"]}, "actions: 'Up ' is not the name of an action"),
        ({"id": "FrozenLake-v1", "success": "won"}, "success: 'won' is none of reward, terminated and info.KEY"),
    ],
)
def test_wrong_options_are_named_before_the_start(options: dict[str, Any], problem: str) -> None:
    config = parse({"env": {"default": {"name": "gymnasium", "options": options}}})
    (line,) = validate_envs(config, {})
    assert line.startswith("env.default.options") and problem in line
    with pytest.raises(ValueError, match="options"):
        check_env(config.envs["default"], "default")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            {"entry_point": f"{HERE}:Ekko"},
            "entry_point: 'tests.envs.test_gymnasium:Ekko' cannot be loaded: AttributeError",
        ),
        (
            {"entry_point": f"{HERE}:Wide"},
            r"entry_point: the action space Box\(0.0, 1.0, \(1,\), float32\) is not Discrete",
        ),
        ({"entry_point": f"{HERE}:Echo", "kwargs": {"w": 1}}, "kwargs: .*Echo cannot be made with {'w': 1}: TypeError"),
        ({"entry_point": f"{HERE}:Echo", "actions": ["a"]}, "actions: the actions of Text.* are texts"),
        ({"id": "no_such_package:Game-v0"}, "id: 'no_such_package:Game-v0' cannot be loaded: ModuleNotFoundError"),
    ],
)
def test_custom_code_is_imported_only_by_env_ranks(options: dict[str, Any], problem: str) -> None:
    config = parse({"env": {"default": {"name": "gymnasium", "options": options}}})
    assert validate_envs(config, {}) == []
    with pytest.raises(ValueError, match=rf"env\.default\.options\.{problem}"):
        check_env(config.envs["default"], "default")


def test_built_in_slippery_ice_matches_gymnasium() -> None:
    """Every place and action of the 4x4 map, against the table of FrozenLake-v1."""
    table = gymnasium.make("FrozenLake-v1", map_name="4x4", is_slippery=True).unwrapped.P  # type: ignore[attr-defined]
    rows = ("SFFF", "FHFH", "FFFH", "HFFG")
    cells = {divmod(number, 4): rows[number // 4][number % 4] for number in range(16)}
    ours = FrozenLake(FrozenLakeOptions(slippery=True))
    ours.reset(0)
    ours.goal, ours.holes = (3, 3), {place for place, cell in cells.items() if cell == "H"}

    class Each:
        """Takes the choices one after the other."""

        def __init__(self, index: int):
            self.index = index

        def choice(self, options: Any) -> Any:
            assert len(options) == 3
            return options[self.index]

    for place, cell in cells.items():
        if cell in "HG":
            continue
        for action, word in enumerate(MOVES):
            mine: Counter[Any] = Counter()
            for index in range(3):
                ours.player, ours._rng = place, Each(index)  # type: ignore[assignment]
                outcome = ours.act(word)
                mine[4 * ours.player[0] + ours.player[1], outcome.reward, outcome.ended] += 1
            theirs: Counter[Any] = Counter()
            for share, reached, reward, ended in table[4 * place[0] + place[1]][action]:
                assert share == pytest.approx(1 / 3)
                theirs[reached, float(reward), bool(ended)] += 1
            assert mine == theirs, (place, word)


def test_unnamed_actions_are_named_by_their_numbers() -> None:
    env = game(
        entry_point=f"{HERE}:Echo", kwargs={"space": Discrete(3, start=5), "word": "6"}, prompt="{observation}{actions}"
    )
    env.reset(0)
    assert env.described_actions == "numbers from 5 to 7" and env.actions == ("5", "6", "7")
