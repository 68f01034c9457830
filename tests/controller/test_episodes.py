"""Episodes as files to look at."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from hpcrl.controller.episodes import Episode, grid_of, write_episode
from hpcrl.spec.media import IMAGE, Medium

LAKES = ["P_\n_G", "_P\n_G", "__\nPG"]
HOSTILE = "</pre><script>alert(1)</script>\udcff"


def episode(*grids: str) -> Episode:
    messages = [{"role": "system", "content": "Play."}, {"role": "user", "content": "GP\n__"}]
    messages.append({"role": "assistant", "content": "an example of the prompt"})
    for number, grid in enumerate(grids):
        messages.append({"role": "user", "content": f"The lake:\n{grid}\nYour turn."})
        messages.append({"role": "assistant", "content": f"{HOSTILE} Right" if number else "Down"})
    return Episode(messages, [0.5 * number for number in range(len(grids))], 1.0, 0.25)


@pytest.mark.parametrize(
    ("text", "grid"),
    [
        ("Go\nto\nP_O\n__G\nAnswer.", ["P_O", "__G"]),
        ("ab\ncd\n\nP_\n_G", ["P_", "_G"]),
        ("one line of words", []),
        ("P_O", []),
        ("P _\n_ G", []),
        ("", []),
    ],
)
def test_trailing_lines_of_equal_length_are_the_grid(text: str, grid: list[str]) -> None:
    assert grid_of(text) == grid


def test_a_grid_world_episode_becomes_text_a_page_pictures_and_an_animation(tmp_path: Path) -> None:
    paths = write_episode(tmp_path / "step_000004", "best", episode(*LAKES))
    assert [path.name for path in paths] == ["best.txt", "best.html", "best.png", "best.gif"]
    text = paths[0].read_text()
    assert text.startswith(
        "score 0.25, reward 1, 3 turns\n\n[system]\nPlay.\n\n[user]\nGP\n__\n\n[assistant]\nan example of the prompt\n"
    )
    assert "[assistant, turn 1, reward 0]\nDown\n" in text and "[assistant, turn 3, reward 1]\n</pre><script>" in text
    film, row = Image.open(paths[3]), Image.open(paths[2])
    assert film.n_frames == 3 and row.size[1] == film.size[1] and row.size[0] > 3 * film.size[0]
    first = film.convert("RGB").tobytes()
    film.seek(1)
    assert film.convert("RGB").tobytes() != first, "the player has moved"


def test_model_output_is_escaped_in_the_page(tmp_path: Path) -> None:
    page = write_episode(tmp_path, "first", episode(*LAKES))[1].read_text()
    assert "<script>" not in page and "&lt;script&gt;" in page and page.count("data:image/png;base64,") == 3
    assert "default-src 'none'" in page


def test_an_episode_of_images_shows_them_in_their_messages_and_as_a_film(tmp_path: Path) -> None:
    """The images of two boards, and of an example in the prompt; the model's own <image> is text."""
    said = [("user", "<image>an example"), ("assistant", "Up"), ("user", "The map: <image>")]
    said += [("assistant", "<image> Down"), ("user", "now <image>"), ("assistant", "Left")]
    media = [Medium(IMAGE, bytes([n, 0, 0] * 6), 3, 2) for n in (9, 50, 200)]
    messages = [{"role": role, "content": content} for role, content in said]
    paths = write_episode(tmp_path, "first", Episode(messages, [0.0, 1.0], 1.0, 1.0, media=media))
    assert [path.suffix for path in paths] == [".txt", ".html", ".png", ".gif"]
    page = paths[1].read_text()
    heads = [part.count("<img ") for part in page.split("<div ")[1:]]
    assert heads == [1, 0, 1, 0, 1, 0]
    film = Image.open(paths[3])
    assert film.n_frames == 2 and film.convert("RGB").getpixel((5, 5)) == (50, 0, 0)
    film.seek(1)
    assert film.convert("RGB").getpixel((5, 5)) == (200, 0, 0)


def test_the_last_observation_has_its_own_images(tmp_path: Path) -> None:
    """Of more images than pages show, the dialogue has the first; the last observation's image stays at its place."""
    said = [("user", "<image>"), ("assistant", "Up"), ("user", "<image>"), ("assistant", "Left")]
    first, last = (Medium(IMAGE, bytes([n, 0, 0] * 6), 3, 2) for n in (9, 200))
    messages = [{"role": role, "content": content} for role, content in said]
    end = [{"role": "user", "content": "the goal: <image>"}]
    paths = write_episode(tmp_path, "best", Episode(messages, [0.0, 1.0], 1.0, 1.0, "", [first], end, [last]))
    heads = [part.count("<img ") for part in paths[1].read_text().split("<div ")[1:]]
    assert heads == [1, 0, 0, 0, 1] and "the goal: <image>" in paths[0].read_text()
    film = Image.open(paths[3])
    film.seek(1)
    assert film.n_frames == 2 and film.convert("RGB").getpixel((5, 5)) == (200, 0, 0)


@pytest.mark.parametrize("messages", [["What is it?"], ["a\nb", "P_\n_G"]])
def test_fewer_than_two_grids_make_no_pictures(tmp_path: Path, messages: list[str]) -> None:
    shown = Episode([{"role": "user", "content": text} for text in messages], [], 0.0, 0.0, "it raised")
    paths = write_episode(tmp_path, "worst", shown)
    assert [path.suffix for path in paths] == [".txt", ".html"]
    assert paths[0].read_text().startswith("score 0, reward 0, 0 turns, error: it raised\n")


def test_long_texts_and_long_episodes_make_pictures_of_limited_size(tmp_path: Path) -> None:
    tall = "\n".join(["ab"] * 3000)
    assert grid_of(tall) == [] and grid_of(f"P_\n_G\n\n{tall}") == ["P_", "_G"]
    write_episode(tmp_path, "long", episode(*LAKES * 70))
    with Image.open(tmp_path / "long.png") as row:
        assert row.size[0] < 65535
