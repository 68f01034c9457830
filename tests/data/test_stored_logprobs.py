"""Log-probs in a folder: merged from parts, damaged files are left out."""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path

import numpy as np
import pytest

from hpcrl.data.stored_logprobs import INDEX, LOCK, StoredLogprobs, merge, write_part


def values(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float32)


def stored(folder: Path) -> dict[int, list[float]]:
    found = merge(folder)
    return {} if found is None else {int(n): found.values(int(n)).tolist() for n in found.sequences}


def test_parts_are_merged_and_the_earliest_steps_values_stay(tmp_path: Path) -> None:
    assert stored(tmp_path) == {}
    write_part(tmp_path, 2, 1, [4, 7], [values(9, 9), values(3)])
    write_part(tmp_path, 1, 0, [4, 2], [values(1, 2), values()])
    write_part(tmp_path, 1, 1, [], [])
    expected = {2: [], 4: [1, 2], 7: [3]}
    assert stored(tmp_path) == expected == stored(tmp_path)
    assert len(list(tmp_path.glob("[!.]*"))) == 2, "an index and the values"
    write_part(tmp_path, 1, 0, [8, 7], [values(5), values(6)])
    assert stored(tmp_path) == expected | {8: [5]}, "what is merged stays"
    assert len(list(tmp_path.glob("[!.]*"))) == 2
    found = StoredLogprobs(tmp_path, check=True)
    assert 8 in found and 3 not in found
    with pytest.raises(KeyError):
        found.values(3)


def test_only_sequences_without_values_are_not_stored(tmp_path: Path) -> None:
    write_part(tmp_path, 1, 0, [4], [values()])
    assert stored(tmp_path) == {} and not list(tmp_path.glob("[!.]*"))


@pytest.mark.parametrize("damage", ["changed", "cut", "gone", "index cut", "index changed"])
def test_a_damaged_file_is_not_read(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    write_part(tmp_path, 1, 0, [4, 7], [values(1, 2), values(3)])
    merge(tmp_path)
    (path,) = tmp_path.glob("values_*")
    path = tmp_path / INDEX if damage.startswith("index") else path
    content = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
    elif damage.endswith("cut"):
        path.write_bytes(content[:-1])
    else:
        content[len(content) // 2] ^= 255
        path.write_bytes(content)
    assert stored(tmp_path) == {} and "has no usable log-probs" in caplog.text
    write_part(tmp_path, 1, 0, [4], [values(1, 2)])
    assert stored(tmp_path) == {4: [1, 2]}, "and is replaced"
    assert len(list(tmp_path.glob("[!.]*"))) == 2


def test_a_damaged_part_is_left_out_and_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_part(tmp_path, 1, 0, [4], [values(1)])
    write_part(tmp_path, 2, 0, [5], [values(2)])
    cut = next(tmp_path.glob("part_00000001_*"))
    cut.write_bytes(cut.read_bytes()[:50])
    assert stored(tmp_path) == {5: [2]} and f"{cut} is damaged" in caplog.text
    assert not list(tmp_path.glob("part_*"))


@pytest.mark.timeout(30)
def test_a_run_waits_while_another_one_merges(tmp_path: Path) -> None:
    """Else each of them would lose the parts that the other one has removed."""
    write_part(tmp_path, 1, 0, [4], [values(1)])
    found: list[dict[int, list[float]]] = []
    waiting = threading.Thread(target=lambda: found.append(stored(tmp_path)))
    with open(tmp_path / LOCK, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive() and not (tmp_path / INDEX).exists()
        write_part(tmp_path, 2, 0, [5], [values(2)])
    waiting.join()
    assert found == [{4: [1], 5: [2]}]
