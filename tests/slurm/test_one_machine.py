"""The Slurm for trials starts although another process takes a port that was free."""

from __future__ import annotations

import socket
from types import ModuleType

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.mark.parametrize("whose", [0, -1], ids=["controller", "last node"])
def test_a_port_taken_by_another_process_is_replaced(
    one_machine: ModuleType, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, whose: int
) -> None:
    choose, chosen = one_machine._free_ports, []
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()

        def choose_late(count: int) -> list[int]:
            chosen.append(choose(count))
            if len(chosen) == 1:
                chosen[0][whose] = taken.getsockname()[1]
            return chosen[-1]

        monkeypatch.setattr(one_machine, "_free_ports", choose_late)
        cluster = one_machine.Cluster(tmp_path_factory.mktemp("slurm"), [one_machine.Nodes("n", 2)])
        with cluster:
            assert len(chosen) == 2 and cluster._states() == {"idle"}
            assert f"Port={taken.getsockname()[1]}" not in cluster.conf.read_text()
        assert not cluster._pids()
