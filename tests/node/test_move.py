"""Programs people run move from node A to node B through a registry, and go on as if nothing had happened.

Each test starts a real program on A, makes state of one kind, moves the container (destroyed on A, restored
on B by `cedana`), and proves the state on B.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.node.bed import CONTAINERD_1_7, Bed, Node, wait_until
from tests.node.bed import bed as running_bed
from tests.node.clients import HttpClient, PostgresClient, RedisClient

PROGRAMS = (
    "threads",
    "deleted_files",
    "unix_sockets",
    "pipes",
    "events",
    "shared_memory",
    "locks",
    "large",
)
RUNTIME = "io.containerd.cedana.v1"
COUNT = (
    "i=0; while :; do i=$((i+1)); echo $i >/count.new; mv /count.new /count; echo line $i; sleep 0.05; done"
)


@pytest.mark.parametrize("program", PROGRAMS)
def test_program_keeps_its_state(bed: Bed, name: str, program: str) -> None:
    start_workload(bed, name, program)
    bed.move(name)
    verify_workload(bed.node_b, name)


def test_zero_memory_is_there_and_takes_no_room(bed: Bed, name: str) -> None:
    script = (
        "import mmap, os, time\n"
        "m = mmap.mmap(-1, 256 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\n"
        "m[:] = bytes(len(m)); m[5 << 20] = 7; open('/ticks', 'w').write('1')\n"
        "while not os.path.exists('/verify'): time.sleep(0.1)\n"
        "open('/sum', 'w').write(f'{m[:].count(0)} {m[5 << 20]} ')\n"
        "time.sleep(1000)"
    )
    bed.node_a.run_container(bed.image("python"), name, "/usr/bin/python3", "-c", script)
    wait_until(lambda: bed.node_a.read(name, "/ticks"), "the memory is filled")
    assert resident_pages(bed.node_a, name) > 60_000
    bed.move(name)
    assert resident_pages(bed.node_b, name) < 10_000
    bed.node_b.exec(name, "touch", "/verify")
    wait_until(lambda: bed.node_b.read(name, "/sum"), "the memory is counted", 60)
    assert bed.node_b.read(name, "/sum").split() == [str((256 << 20) - 1), "7"]


def test_program_started_by_nerdctl_keeps_its_state(bed: Bed, name: str) -> None:
    bed.node_a.nerdctl(
        "run", "--detach", "--pull", "never", "--name", name, "--net", "bed", "--runtime", RUNTIME,
        bed.image("python"), "/usr/bin/python3", "/workloads/threads.py",
    )  # fmt: skip
    identity = container_id(bed.node_a, name)
    wait_until(lambda: bed.node_a.read(identity, "/ticks"), "the program is ready")
    bed.node_a.cedana("checkpoint", name, "--to", (reference := bed.reference(name)))
    assert bed.node_a.task_status(identity) in ("", "STOPPED")
    bed.node_b.cedana("restore", reference)
    verify_workload(bed.node_b, container_id(bed.node_b, name))
    assert "ok" in bed.node_b.nerdctl("logs", name)
    for node in bed.nodes:
        node.nerdctl("rm", "--force", name)


def test_redis_client_stays_connected_and_loses_no_key(bed: Bed, name: str) -> None:
    bed.node_a.run_container(bed.image("redis"), name)
    address = bed.node_a.container_address(name)
    with RedisClient(bed.hub, address) as idle, RedisClient(bed.hub, address) as client:
        identity = idle.command("CLIENT", "ID")
        info = redis_identity(idle)
        client.start().wait_for(500)

        bed.move(name)

        client.wait_for(500)
        client.stop()
        assert client.values == list(range(1, len(client.values) + 1))
        assert client.command("GET", "counter") == str(client.values[-1])
        assert idle.command("CLIENT", "ID") == identity
        assert redis_identity(idle) == info
    assert bed.node_b.container_address(name) == address


def test_postgresql_commits_a_transaction_begun_before_the_move(bed: Bed, name: str) -> None:
    bed.node_a.run_container(bed.image("postgres"), name, options=["--user", "102:102"])
    address = bed.node_a.container_address(name)
    session = PostgresClient(bed.hub, address)
    idle = PostgresClient(bed.hub, address)
    session.query("CREATE TABLE kept (value int PRIMARY KEY)")
    session.query("BEGIN")
    session.query("INSERT INTO kept SELECT generate_series(1, 1000)")
    session.query("SELECT pg_advisory_lock(7)")
    session.query("DECLARE reader CURSOR FOR SELECT value FROM kept ORDER BY value")
    session.query("FETCH 10 FROM reader")
    backend = session.query("SELECT pg_backend_pid()")

    bed.move(name)

    assert session.query("FETCH 1 FROM reader") == [("11",)]
    assert session.query("SELECT pg_backend_pid()") == backend
    assert idle.query("SELECT count(*) FROM kept") == [("0",)]
    assert idle.query("SELECT pg_try_advisory_lock(7)") == [("f",)]
    session.query("INSERT INTO kept VALUES (1001)")
    session.query("COMMIT")
    assert idle.query("SELECT count(*), sum(value) FROM kept") == [("1001", "501501")]
    later = PostgresClient(bed.hub, address)
    assert later.query("SELECT max(value) FROM kept") == [("1001",)]
    later.query("CHECKPOINT")
    for client in (session, idle, later):
        client.close()


def test_nginx_finishes_a_download_on_the_same_connection(bed: Bed, name: str) -> None:
    bed.node_a.run_container(bed.image("nginx"), name)
    bed.node_a.exec(name, "dd", "if=/dev/urandom", "of=/srv/file", "bs=1M", "count=12")
    digest = bed.node_a.exec(name, "sha256sum", "/srv/file").split()[0]
    client = HttpClient(bed.hub, bed.node_a.container_address(name))
    length = client.ask("/slow/file")
    received = hashlib.sha256(client.read(2 << 20))

    bed.move(name)

    received.update(client.read(length - (2 << 20)))
    assert received.hexdigest() == digest
    again = client.read(client.ask("/file"))
    assert hashlib.sha256(again).hexdigest() == digest
    client.close()


def test_shell_pipeline_loses_no_line(bed: Bed, name: str) -> None:
    pipeline = (
        "i=0; while :; do i=$((i+1)); echo $i; sleep 0.01; done"
        " | sed -u s/^/n=/ | while read line; do echo $line >>/out; done"
    )
    node_a, node_b = bed.nodes
    node_a.run_container(bed.image("base"), name, "sh", "-c", pipeline)
    wait_until(lambda: node_a.read(name, "/out").count("\n") > 50, "the pipeline runs")
    before = {pid for pid, comm in node_a.processes(name).items() if comm == "sed"} | {1}

    bed.move(name)

    moved = node_b.read(name, "/out").count("\n")
    wait_until(lambda: node_b.read(name, "/out").count("\n") > moved + 50, "the pipeline goes on")
    lines = node_b.read(name, "/out").splitlines()[:-1]
    assert lines == [f"n={i}" for i in range(1, len(lines) + 1)]
    assert before <= set(node_b.processes(name))


def test_terminal_session_of_ctr_goes_on(bed: Bed, name: str) -> None:
    node_a, node_b = bed.nodes
    run = ["ctr", "run", "--tty", "--runtime", RUNTIME, bed.image("base"), name, "sh"]
    with node_a.terminal(run) as screen:
        screen.expect(r"[#$] ")
        screen.type("kept=42; stty cols 111; echo shell=$$\n")
        screen.expect(r"shell=(\d+)\s")
        bed.move(name)
    with node_b.terminal(["ctr", "tasks", "attach", name]) as screen:
        screen.type("echo kept=$kept shell=$$ $(stty size)\n")
        screen.expect(r"kept=42 shell=1 \d+ \d+\s")
        screen.type("exit 3\n")
        wait_until(lambda: node_b.task_status(name) in ("", "STOPPED"), "the shell ended")


def test_terminal_session_of_nerdctl_goes_on(bed: Bed, name: str) -> None:
    node_a, node_b = bed.nodes
    run = ["nerdctl", "run", "-it", "--pull", "never", "--name", name, "--net", "none", "--runtime", RUNTIME,
           bed.image("base"), "sh"]  # fmt: skip
    with node_a.terminal(run) as screen:
        screen.expect(r"[#$] ")
        screen.type("kept=42; echo shell=$$\n")
        screen.expect(r"shell=(\d+)\s")
        node_a.cedana("checkpoint", name, "--to", (reference := bed.reference(name)))
    node_b.cedana("restore", reference)
    with node_b.terminal(["nerdctl", "attach", name]) as screen:
        screen.type("echo kept=$kept shell=$$\n")
        screen.expect(r"kept=42 shell=1\s")
    for node in bed.nodes:
        node.nerdctl("rm", "--force", name)


def test_container_of_the_stock_runtime_moves(bed: Bed, name: str) -> None:
    node_a, node_b = bed.nodes
    node_a.run_container(bed.image("base"), name, "sh", "-c", COUNT, runtime="io.containerd.runc.v2")
    before = wait_for_count(node_a, name, 20)
    bed.move(name)
    assert wait_for_count(node_b, name, before + 20) >= before + 20


def test_processes_in_cgroups_of_their_own_move(bed: Bed, name: str) -> None:
    """As under systemd, whose init moves itself and every service below the container's cgroup."""
    node_a, node_b = bed.nodes
    other = "i=0; while :; do i=$((i+1)); echo $i >/other.new; mv /other.new /other; sleep 0.05; done"
    node_a.run_container(bed.image("base"), name, "sh", "-c", f"sh -c '{other}' & {COUNT}")
    before = wait_for_count(node_a, name, 5)
    init = node_a.task_pid(name)
    script = f"""
        set -e; cd /sys/fs/cgroup/freezer/default/{name}; mkdir init.scope system.slice
        for pid in $(cat cgroup.procs); do
            if [ $pid = {init} ]; then echo $pid >init.scope/cgroup.procs
            elif grep -q other.new /proc/$pid/cmdline; then echo $pid >system.slice/cgroup.procs; fi
        done"""
    node_a.ns_exec(["sh", "-c", script])
    node_a.cedana("checkpoint", name, "--leave-running")
    wait_for_count(node_a, name, before + 5)
    bed.move(name)
    assert wait_for_count(node_b, name, before + 10) >= before + 10
    first = node_b.read(name, "/other")
    wait_until(lambda: node_b.read(name, "/other") not in (first, ""), "the other process goes on")


def test_leave_running_leaves_it_running(bed: Bed, name: str) -> None:
    node_a, node_b = bed.nodes
    node_a.ctr("run", "--detach", "--runtime", RUNTIME, bed.image("base"), name, "sh", "-c", COUNT)
    wait_for_count(node_a, name, 20)
    pid, reference = node_a.task_pid(name), bed.reference(name)
    node_a.cedana("checkpoint", name, "--to", reference, "--leave-running")
    saved = count(node_a, name)
    assert node_a.task_pid(name) == pid
    wait_for_count(node_a, name, saved + 20)
    node_b.cedana("restore", reference)
    assert count(node_b, name) < saved + 20
    wait_for_count(node_b, name, saved + 20)
    wait_for_count(node_a, name, saved + 40)


def test_tcp_close_drops_connections_and_keeps_the_data(bed: Bed, name: str) -> None:
    bed.node_a.run_container(bed.image("redis"), name)
    address = bed.node_a.container_address(name)
    with RedisClient(bed.hub, address) as client:
        client.start().wait_for(100)
        bed.move(name, checkpoint=["--tcp", "close"])
        with pytest.raises(AssertionError, match="lost its connection"):
            client.wait_for(1_000_000)
        with RedisClient(bed.hub, address, "fresh") as fresh:
            fresh.start().wait_for(100)
            fresh.stop()
            assert int(fresh.command("GET", "counter")) >= client.values[-1]


def test_container_moves_there_and_back_again(bed: Bed, name: str) -> None:
    node_a, node_b = bed.nodes
    node_a.run_container(bed.image("redis"), name)
    address = node_a.container_address(name)
    with RedisClient(bed.hub, address) as client:
        client.start().wait_for(100)
        for source, target in ((node_a, node_b), (node_b, node_a)) * 2:
            reference = bed.reference(name)
            source.cedana("checkpoint", name, "--to", reference)
            source.remove_container(name)
            target.cedana("restore", reference)
            client.wait_for(100)
        client.stop()
        assert client.values == list(range(1, len(client.values) + 1))


def test_checkpoint_in_a_layout_needs_no_registry(bed: Bed, name: str) -> None:
    node_a, node_b = bed.nodes
    start_workload(bed, name, "threads")
    layout = f"oci:{bed.shared / name}:one"
    node_a.cedana("checkpoint", name, "--to", layout)
    node_b.cedana("restore", layout)
    verify_workload(node_b, name)


def test_move_on_other_nodes(other_bed: Bed) -> None:
    """A client stays connected, and an artifact runs as an image, on every kind of node there is."""
    node_a, node_b = other_bed.nodes
    node_a.run_container(other_bed.image("redis"), "moving")
    with RedisClient(other_bed.hub, node_a.container_address("moving")) as client:
        client.start().wait_for(100)
        other_bed.move("moving")
        client.wait_for(100)
        client.stop()
        assert client.values == list(range(1, len(client.values) + 1))
    start_workload(other_bed, "image", "threads")
    reference = other_bed.reference("image")
    node_a.cedana("checkpoint", "image", "--to", reference)
    node_b.ctr("images", "pull", "--plain-http", reference)
    node_b.run_container(reference, "image", network=False)
    verify_workload(node_b, "image")


OTHER_NODES: dict[str, dict[str, Any]] = {
    "cgroup-v2": {"cgroup_version": 2},
    "containerd-1.7": {"containerd": CONTAINERD_1_7},
}


@pytest.fixture(params=OTHER_NODES)
def other_bed(request: pytest.FixtureRequest) -> Iterator[Bed]:
    """A bed of its own, whose nodes see only a cgroup v2 tree, or run containerd's older line."""
    with running_bed(**OTHER_NODES[request.param]) as made:
        yield made


def start_workload(bed: Bed, name: str, program: str) -> None:
    """A program of tests/node/workloads on node A, its state made."""
    bed.node_a.run_container(bed.image("python"), name, "/usr/bin/python3", f"/workloads/{program}.py")
    wait_until(lambda: bed.node_a.read(name, "/ticks"), f"{program} is ready")


def verify_workload(node: Node, name: str) -> None:
    """The program goes on, and finds its state whole."""
    ticks = int(node.read(name, "/ticks"))
    wait_until(lambda: int(node.read(name, "/ticks") or 0) > ticks, "the program goes on")
    node.exec(name, "touch", "/verify")
    wait_until(lambda: node.read(name, "/result"), "the program looked at its state")
    assert node.read(name, "/result") == "ok"


def resident_pages(node: Node, name: str) -> int:
    return int(node.exec(name, "cat", "/proc/1/statm").split()[1])


def container_id(node: Node, name: str) -> str:
    """The id of nerdctl's container `name`."""
    return node.nerdctl("inspect", "--format", "{{.ID}}", name).strip()


def redis_identity(client: RedisClient) -> dict[str, str]:
    """What tells this redis process from any other."""
    lines = (line.split(":", 1) for line in client.command("INFO", "server").splitlines() if ":" in line)
    return {key: value for key, value in lines if key in ("process_id", "run_id")}


def count(node: Node, name: str) -> int:
    return int(node.read(name, "/count").strip() or 0)


def wait_for_count(node: Node, name: str, at_least: int) -> int:
    wait_until(lambda: count(node, name) >= at_least, f"the container counts to {at_least}")
    return count(node, name)
