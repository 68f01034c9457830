"""Images in observations: the forms that environments return, and the games that draw them."""

from __future__ import annotations

import io
import itertools
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hpcrl.config import DataConfig, EnvConfig
from hpcrl.data import sft_rows
from hpcrl.data.env_sources import ExpertTask
from hpcrl.data.image_tokens import bound_vision
from hpcrl.data.pictures import read_picture
from hpcrl.envs.environment import checked_reset, checked_step, cut, image_bytes, num_chars, num_image_bytes
from hpcrl.envs.factory import make_env
from hpcrl.envs.games.tiles import LINE, draw
from hpcrl.spec.media import IMAGE_MARK
from hpcrl.workers.dialogue import as_messages, encode_prompt
from tests.vlm import PAD, seeing_tokenizer

GREY = np.full((2, 3, 3), 128, np.uint8)
ICE, BLUE, BLACK, GREEN = (214, 236, 250), (30, 80, 220), (20, 20, 30), (40, 170, 70)
WALL, FLOOR, RED, ORANGE = (70, 70, 80), (245, 240, 225), (215, 40, 40), (240, 150, 30)
PLAIN = {"prompt": "{observation}", "turn": "{observation}", "invalid": "{observation}", "tag": "", "show": "image"}


def pixels(file: Any) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(file)))


def game(name: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> Any:
    return make_env(EnvConfig(name=name, options=PLAIN | options), {"messages": messages or [], "extra": {}})


def image_of(observation: Any) -> np.ndarray:
    (message,) = observation
    assert (message["role"], message["content"]) == ("user", "<image>")
    (file,) = message["images"]
    return pixels(file)


def centres(image: np.ndarray, tile: int = 28) -> list[list[tuple[int, ...]]]:
    """The colour in the middle of each tile."""
    return [[tuple(map(int, pixel)) for pixel in row] for row in image[tile // 2 :: tile, tile // 2 :: tile]]


def test_arrays_and_pil_images_become_png_files_without_loss() -> None:
    drawn = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    assert (pixels(image_bytes(drawn)) == drawn).all()
    assert (pixels(image_bytes(drawn[:, ::-1])) == drawn[:, ::-1]).all(), "not contiguous"
    assert (pixels(image_bytes(Image.fromarray(drawn).convert("RGBA")))[..., :3] == drawn).all()
    assert image_bytes(drawn) == image_bytes(drawn.copy())
    for unchanged in ("map.png", "data:image/png;base64,AAAA", b"file"):
        assert image_bytes(unchanged) is unchanged


@pytest.mark.parametrize(
    ("image", "problem"),
    [
        (GREY / 2, r"an array must be uint8 \[height, width, 3\], not float64 \[2, 3, 3\]"),
        (np.zeros((2, 3, 4), np.uint8), r"not uint8 \[2, 3, 4\]"),
        (np.zeros((2, 3), np.uint8), r"not uint8 \[2, 3\]"),
        (np.zeros((0, 3, 3), np.uint8), r"not uint8 \[0, 3, 3\]"),
        (GREY.tolist(), "list is not a path, a data URL, bytes, a PIL image or a numpy array"),
        (None, "NoneType is not a path"),
        (Image.new("CMYK", (3, 2)), r"3 x 2 pixels of mode CMYK cannot be a PNG file; convert\('RGB'\)"),
        (Image.new("RGB", (0, 2)), "0 x 2 pixels of mode RGB"),
    ],
)
def test_an_image_of_another_form_is_refused(image: Any, problem: str) -> None:
    with pytest.raises(TypeError, match=problem):
        image_bytes(image)
    with pytest.raises(TypeError, match=rf"images\[1\] of a message: .*{problem}"):
        checked_reset(([{"role": "user", "content": "", "images": ["a.png", image]}], {}))


def test_checked_results_have_only_paths_and_bytes() -> None:
    message = {"role": "user", "content": "<image> and <image>", "images": ("a.png", GREY)}
    observation, *_ = checked_step(
        ([message, {"role": "user", "content": "Go."}], 0.0, False, False, {"suffix": "Now"})
    )
    assert isinstance(observation, list)
    path, file = observation[0]["images"]
    assert path == "a.png" and (pixels(file) == GREY).all()
    assert [one["content"] for one in observation] == ["<image> and <image>", "Go.\nNow"]
    assert message["images"][1] is GREY, "the environment's own message is unchanged"
    with pytest.raises(TypeError, match="images of a message must be a list, not bytes"):
        checked_reset(([message | {"images": b"file"}], {}))


def test_images_are_neither_counted_nor_cut() -> None:
    text = f"{'a' * 50}<image>{'b' * 50}<image>{'c' * 50}"
    message = {"role": "user", "content": text, "images": [bytes(1000), "a.png"]}
    assert num_chars([message]) == len("user") + len(text) + 1 and num_image_bytes([message]) == 1000
    (shorter,) = cut([message], 40)
    # 150 letters and two marks, each counted as one character
    assert shorter["content"] == f"{'a' * 20}<image><image>\n[112 characters left out]\n{'c' * 20}"
    assert shorter["images"] == message["images"]
    (shorter,) = cut([message], 102)
    assert shorter["content"] == f"{'a' * 50}<image>\n[50 characters left out]\n<image>{'c' * 50}"
    assert cut([message], len(text)) == [message]


def lake(**options: Any) -> Any:
    """P _ _
    O _ O
    _ _ G"""
    env = game("frozen_lake", size=3, **options)
    env.reset(0)
    env.player, env.goal, env.holes = (0, 0), (2, 2), {(1, 0), (1, 2)}
    return env


def test_a_frozen_lake_as_an_image() -> None:
    env = lake()
    image = image_of(env.step("nothing")[0])
    assert image.shape == (84, 84, 3)
    assert centres(image) == [[BLUE, ICE, ICE], [BLACK, ICE, BLACK], [ICE, ICE, GREEN]]
    assert {tuple(pixel) for edge in (image[28], image[:, 56]) for pixel in edge} == {LINE}
    assert centres(image_of(env.step("Right")[0]))[0] == [ICE, BLUE, ICE]
    fallen = image_of(lake().step("Down")[0])
    assert centres(fallen)[1][0] == BLUE and tuple(fallen[28 + 14, 4]) == BLACK, "the hole around the player"
    for word in ("Down", "Down"):
        env.step(word)
    arrived = image_of(env.step("Right")[0])
    assert centres(arrived)[2][2] == BLUE and tuple(arrived[56 + 14, 56 + 3]) == GREEN, "the goal behind the player"


def test_a_sokoban_room_as_an_image() -> None:
    """Player, box and two targets in a row, and another box below the player."""
    env = game("sokoban", size=6, tile_pixels=14)
    env.reset(0)
    env.floor = {(1, column) for column in range(1, 5)} | {(2, 1)}
    env.player, env.boxes, env.targets = (1, 1), frozenset({(1, 2), (2, 1)}), frozenset({(1, 3), (1, 4)})
    image = image_of(env.step("nothing")[0])
    assert image.shape == (84, 84, 3)
    assert centres(image, 14)[:2] == [[WALL] * 6, [WALL, BLUE, ORANGE, RED, RED, WALL]]
    image = image_of(env.step("Right")[0])
    assert centres(image, 14)[1] == [WALL, FLOOR, BLUE, GREEN, RED, WALL]
    assert tuple(image[14 + 7, 42 + 1]) == RED, "the target behind the box"
    image = image_of(env.step("Right")[0])
    assert centres(image, 14)[1] == [WALL, FLOOR, FLOOR, BLUE, GREEN, WALL]
    assert tuple(image[14 + 7, 42 + 1]) == RED, "the target behind the player"


@pytest.mark.parametrize("name", ["frozen_lake", "sokoban"])
def test_every_kind_of_place_has_its_own_tile(name: str) -> None:
    env = game(name)
    assert len(env.tiles) == len(env.symbols) == len(env.options.symbols)
    assert len({tile.look for tile in env.tiles}) == len(env.tiles)
    for one, other in itertools.combinations([draw([[tile]], 28) for tile in env.tiles], 2):
        assert (one != other).any(axis=2).mean() > 0.03


def test_a_cut_of_a_decoded_observation_keeps_its_images() -> None:
    seeing = seeing_tokenizer()
    said = [{"role": "user", "content": f"{'a' * 50}<image>{'b' * 50}", "images": [GREY]}]
    decoded = as_messages(checked_reset((said, {}))[0], bound_vision(seeing))
    for most in (10, 300):
        (shorter,) = cut(decoded, most)
        assert shorter["content"].count(IMAGE_MARK) == 1 and len(shorter["images"]) == 1
        assert len(encode_prompt(seeing, [shorter], None).media) == 1


def test_equal_states_give_equal_files() -> None:
    env, other = game("sokoban"), game("sokoban")
    (first,), (second,) = env.reset(5)[0], other.reset(5)[0]
    assert first == second
    assert env.step("Up")[0] == other.step("Up")[0]
    (elsewhere,) = other.reset(6)[0]
    assert elsewhere["images"] != first["images"]


def test_the_prompt_describes_colours_and_keeps_the_system_prompt() -> None:
    system = {"role": "system", "content": "Be brief."}
    env = make_env(
        EnvConfig(name="frozen_lake", options={"show": "image"}),
        {"messages": [system, {"role": "user", "content": "frozen_lake 1"}], "extra": {}},
    )
    observation, _ = env.reset(1)
    assert isinstance(observation, list) and observation[0] == system and len(observation) == 2
    text = observation[1]["content"]
    assert "a blue disc for you, pale blue for ice, a black disc for hole" in text and text.count("<image>") == 1
    (later,) = env.step("?")[0]
    assert later["content"].startswith("Turn 2") and len(later["images"]) == 1
    twice = game("frozen_lake", prompt="{observation} {observation}")
    (message,) = twice.reset(0)[0]
    assert message["content"] == "<image> <image>" and len(message["images"]) == 2


@pytest.mark.parametrize("name", ["frozen_lake", "sokoban"])
def test_an_experts_episodes_have_the_images_of_the_game(name: str) -> None:
    """The rows of supervised training, in which every turn of the user has an image."""
    source = {"path": f"expert:{name}", "size": 4, "options": {"env": {"show": "image"}}}
    config, seeing = DataConfig.model_validate({"train": [source]}), seeing_tokenizer()
    vision, rows = bound_vision(seeing), sft_rows(config, "train", seeing)
    told = ExpertTask(name, {"env": {"show": "image"}}, 4, 0, "train").row(0)["messages"]
    shown = [image for message in told for image in message.get("images", ())]
    assert len(shown) == sum(message["role"] == "user" for message in told) >= 1
    sequence = rows.row(0)
    assert [medium.content for medium in sequence.media] == [
        m.content for file in shown for m in read_picture(file, vision)
    ]
    assert all(sequence.token_ids[m.start : m.start + m.length] == [PAD] * m.length for m in sequence.media)
    texts = "".join(message["content"] for message in told if message["role"] == "assistant")
    assert sum(sequence.loss_mask) == len(texts.encode()) + len(shown), "each answer and its end token"
