"""The controller with thousands of generator replicas: the production scheduler, loop, controller and messages.

    python -m tests.bench.scale [--quick]

Prints one JSON line per size. `virtual`: replicas and scorers are scripted (tests/bench/scale_ranks.py), their time is
virtual but passes while rank 0 works, so that events queue up meanwhile. `connected`: the same ranks in processes of
their own, that answer at once, over real connections.

`utilisation` is the time that rank 0 worked over the time that passed, `events_per_cpu_s` what one core can take,
`needed_events_per_s` what the replicas send if they never wait. Every run asserts that each sample trained once.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hpcrl.messaging import messages as m
from hpcrl.messaging import queues
from hpcrl.messaging.dispatcher import Controller
from hpcrl.messaging.mailbox_server import Dialer, MailboxServer
from hpcrl.messaging.trace import Trace
from hpcrl.messaging.world import CONTROLLER_QUEUE
from hpcrl.rollout.loop import RolloutLoop
from hpcrl.rollout.scheduling.policies import SchedulerConfig
from hpcrl.rollout.scheduling.scheduler import RolloutScheduler
from hpcrl.rollout.types import Prompt
from tests.bench.machine import tell
from tests.bench.scale_ranks import KEY, Cluster, serve_ranks

IN_FLIGHT = 100_000
GROUP_SIZE = 8
DECODE_CHUNK_TOKENS = 16
ITERATION_S = 0.025  # of decoding: 40 tokens a second and response
MEAN_BURSTS = 16  # of a response
REPLICAS_PER_SCORER = 64
MAX_STALENESS = 4  # keeps the replicas full: five batches are on their way
PROMPT_TOKENS = 200
CLIENTS = 3  # processes that play the ranks
SAMPLING = m.Sampling(4096, 1.0, 1.0, 0, 0.0, [])
FOREVER_S = 1e6


def rss_mib(peak: bool = False) -> float:
    """Memory of this process."""
    if peak:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def make_controller(folder: str, sender: queues.Sender, inbox: queues.Inbox, size: int) -> Controller:
    """The production controller on these queues."""
    world: Any = SimpleNamespace(rank=0, size=size, sender=sender, events=inbox, trace=Trace())
    return Controller(
        world, lambda rank: ["generator"], command_s=FOREVER_S, start_s=120.0, survivable=lambda rank, lost: False
    )


def train_steps(loop: RolloutLoop, capacities: dict[int, int], in_flight: int, steps: int) -> dict[str, int]:
    """Drive `steps` batches of a quarter of what is in flight; counts of what was trained."""
    scheduler = RolloutScheduler(SchedulerConfig(GROUP_SIZE, max_staleness=MAX_STALENESS), capacities)
    need = max(1, in_flight // GROUP_SIZE // MAX_STALENESS)
    known: dict[int, Prompt] = {}
    uids = iter(range(1 << 40))
    trained: list[int] = []

    def draw(count: int) -> list[Prompt]:
        return [
            Prompt(uid, "maths", 0, uid, tuple(range(PROMPT_TOKENS)), "x" * 4 * PROMPT_TOKENS, "42")
            for uid, _ in zip(uids, range(count), strict=False)
        ]

    for version in range(steps):
        scheduler.begin_step(version, need)
        collected = loop.collect(scheduler, known, draw, SAMPLING)
        loop.forget(collected.groups)
        trained += [sample.id for group in collected.groups for sample in group.samples]
        for end in scheduler.ended_prompts():
            del known[end.uid]
    assert len(trained) == len(set(trained)) == steps * need * GROUP_SIZE, "a sample trained twice or never"
    return {"trained": len(trained), "prompts_on_their_way": len(known)}


def loop_of(controller: Controller, capacities: dict[int, int], scorers: list[int]) -> RolloutLoop:
    return RolloutLoop(
        controller,
        [[rank] for rank in capacities],
        scorers,
        [],
        seed=0,
        decode_chunk_tokens=DECODE_CHUNK_TOKENS,
        deterministic=False,
        free=list(capacities),
    )


def virtual(num_replicas: int, in_flight: int, steps: int) -> dict[str, Any]:
    """One size in virtual time; run in a process of its own, whose memory is reported."""
    capacity = -(-in_flight // num_replicas)
    capacities = dict.fromkeys(range(1, num_replicas + 1), capacity)
    scorers = list(range(num_replicas + 1, num_replicas + 1 + -(-num_replicas // REPLICAS_PER_SCORER)))
    before_mib = rss_mib()
    burst_s = DECODE_CHUNK_TOKENS * ITERATION_S
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(num_replicas, burst_s, MEAN_BURSTS)
        inbox = queues.Inbox(cluster, CONTROLLER_QUEUE, KEY, m.Event)  # type: ignore[arg-type]
        sender = queues.Sender(cluster.dial, KEY, 0)
        controller = make_controller(folder, sender, inbox, num_replicas + 1 + len(scorers))
        loop = loop_of(controller, capacities, scorers)
        began, cpu = time.perf_counter(), time.process_time()
        cluster.begin()
        counts = train_steps(loop, capacities, in_flight, steps)
        cpu_s = cluster.busy_s() * (time.process_time() - cpu) / (time.perf_counter() - began)
    events, commands = cluster.events, cluster.commands
    bursts_per_s = num_replicas / burst_s
    needed = bursts_per_s * events.count / max(1, cluster.bursts)
    return {
        "bench": "scale",
        "part": "virtual",
        "replicas": num_replicas,
        "capacity": capacity,
        "scorers": len(scorers),
        "in_flight": num_replicas * capacity,
        "decode_chunk_tokens": DECODE_CHUNK_TOKENS,
        "burst_s": burst_s,
        "mean_response_tokens": DECODE_CHUNK_TOKENS * MEAN_BURSTS,
        **counts,
        "events": events.count,
        "events_per_cpu_s": round(events.count / cpu_s),
        "needed_events_per_s": round(needed),
        "cores_needed": round(needed * cpu_s / events.count, 3),
        "utilisation": round(cluster.busy_s() / cluster.now, 3),
        "decoding_share": round(cluster.bursts / (bursts_per_s * cluster.now), 3),
        "event_bytes": round(events.bytes / events.count),
        "command_bytes": round(commands.bytes / max(1, commands.count)),
        "commands_per_event": round(commands.count / events.count, 3),
        "needed_mbytes_per_s": round(needed * (events.bytes + commands.bytes) / events.count / 1e6, 2),
        "peak_mib": round(rss_mib(peak=True)),
        "bytes_per_sample": round((rss_mib(peak=True) - before_mib) * 2**20 / (num_replicas * capacity)),
        "cpu_s": round(cpu_s, 2),
        "virtual_s": round(cluster.now, 2),
    }


def connected(num_ranks: int, in_flight: int, steps: int) -> dict[str, Any]:
    """One size over real connections, of its own for every rank."""
    capacity = max(GROUP_SIZE, in_flight // num_ranks)
    capacities = dict.fromkeys(range(1, num_ranks + 1), capacity)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        store = queues.serve("127.0.0.1", 60.0)
        mailbox_server = MailboxServer("127.0.0.1", KEY)
        inbox = queues.Inbox(mailbox_server.queue(CONTROLLER_QUEUE), CONTROLLER_QUEUE, KEY, m.Event)
        mailbox_server.publish(store, 0)
        sender = queues.Sender(Dialer(store, KEY, 0, 60.0, 60.0), KEY, 0)
        controller = make_controller(folder, sender, inbox, num_ranks + 1)
        controller._hosts[0] = "here"
        ranks = [list(capacities)[client::CLIENTS] for client in range(CLIENTS)]
        clients = [
            context.Process(target=serve_ranks, args=(store.port, mine, MEAN_BURSTS), daemon=True) for mine in ranks
        ]
        try:
            for client in clients:
                client.start()
            began = time.monotonic()
            controller.await_world()
            join_s = time.monotonic() - began
            call_ms = []
            for _ in range(5):
                start = time.monotonic()
                controller.call({rank: m.ReadTexts([]) for rank in capacities})
                call_ms.append(1e3 * (time.monotonic() - start))
            sent, heard = -_count(sender), -sum(inbox._last.values())
            start, cpu, own = time.monotonic(), time.process_time(), time.thread_time()
            counts = train_steps(loop_of(controller, capacities, list(capacities)), capacities, in_flight, steps)
            wall_s = time.monotonic() - start
            cpu_s, own_s = time.process_time() - cpu, time.thread_time() - own
            sent, heard = sent + _count(sender), heard + sum(inbox._last.values())
            controller.shut_down()
        finally:
            for client in clients:
                client.join(20.0)
                client.kill()
    return {
        "bench": "scale",
        "part": "connected",
        "ranks": num_ranks,
        "capacity": capacity,
        "clients": CLIENTS,
        **counts,
        "join_s": round(join_s, 2),
        "call_all_ms": round(sorted(call_ms)[2], 1),
        "events": heard,
        "events_per_s": round(heard / wall_s),
        "messages_per_s": round((heard + sent) / wall_s),
        "events_per_cpu_s": round(heard / own_s),
        "utilisation": round(own_s / wall_s, 3),
        "other_threads_utilisation": round((cpu_s - own_s) / wall_s, 3),
        "wall_s": round(wall_s, 2),
        "peak_mib": round(rss_mib(peak=True)),
        "cores": os.cpu_count(),
    }


def _count(sender: queues.Sender) -> int:
    return sum(line.seq for line in sender._lines.values())


def alone(measure: Callable[..., dict[str, Any]], *arguments: int) -> dict[str, Any]:
    """Its result in a new process, since the peak of a process's memory never falls."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, *arguments).result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="16 replicas, 512 samples")
    parser.add_argument("--virtual", type=int, nargs="*", default=[512, 1024, 4096], help="replicas")
    parser.add_argument("--connected", type=int, nargs="*", default=[64, 256, 512], help="ranks")
    options = parser.parse_args()
    if options.quick:
        options.virtual, options.connected = [16], [4]
    in_flight, steps = (512, 2) if options.quick else (IN_FLIGHT, 1)
    for num_replicas in options.virtual:
        tell(alone(virtual, num_replicas, in_flight, steps))
    for num_ranks in options.connected:
        tell(alone(connected, num_ranks, min(in_flight, 16 * num_ranks), steps))


if __name__ == "__main__":
    main()
