import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch

from msmodelslim.distributed import find_free_port, watchdog
from msmodelslim.distributed.failure import RankFailedError
from msmodelslim.distributed.launch import launch
from msmodelslim.distributed.watchdog import Limits
from msmodelslim.distributed.worker import core_slice
from msmodelslim.errors import EnvError, InvalidModelError

REPOSITORY = Path(__file__).parents[2]
FAULTS = "tests.distributed.faults"
END_S = 15  # from a fault to the last process gone


def state_of_this_process() -> dict:
    """What a launch must leave as it found it."""
    me = psutil.Process()
    return {
        "environment": {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
        "signals": {
            one: signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
        },
        "ports": sorted(one.laddr.port for one in me.net_connections() if one.status == psutil.CONN_LISTEN),
        "threads": sorted(one.name for one in threading.enumerate()),
        "torch": (torch.get_num_threads(), torch.get_default_dtype(), torch.is_grad_enabled()),
        "loggers": [name for name, one in logging.root.manager.loggerDict.items() if getattr(one, "disabled", False)],
        "path": list(sys.path),
    }


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After each test: no temporary file, port, thread, handler, variable or process of the launch."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    before = state_of_this_process()
    yield
    after = state_of_this_process()
    assert after == before
    assert list(temporary.iterdir()) == []
    pids = [int(file.read_text()) for file in tmp_path.glob("pid*")]
    deadline = time.monotonic() + 3  # children of a killed rank are collected by init
    while any(watchdog.is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if watchdog.is_alive(pid)]


def facts(folder: Path) -> list[dict]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob("?.json"))]


# ---------------------------------------------------------------- what a rank gets


def test_every_rank_runs_the_entry_in_one_group_with_its_share_of_the_cores(tmp_path, capfd):
    job = {"out": str(tmp_path), "numbers": [1, 2.5, None, True], "deep": {"pair": (1, 2)}}
    launch(f"{FAULTS}:write_facts", job, 2)
    found = facts(tmp_path)
    cores = len(os.sched_getaffinity(0))
    assert [one["rank"] for one in found] == [0, 1]
    for one in found:
        assert one["world_size"] == 2 and one["total"] == 3.0 and one["backend"] == "gloo"
        assert one["threads"] == max(1, cores // 2) and one["omp"] == str(max(1, cores // 2))
        assert one["job"] == {**job, "deep": {"pair": [1, 2]}}
        assert not watchdog.is_alive(one["pid"])
    lines = sorted(capfd.readouterr().err.splitlines())
    assert lines == [
        f"INFO rank {rank}: Rank {rank}/2 initialized on device cpu:{rank} with backend gloo" for rank in range(2)
    ]


def test_threads_cores_devices_and_log_level_are_as_asked(tmp_path, capfd):
    launch(
        f"{FAULTS}:write_facts",
        {"out": str(tmp_path)},
        2,
        device_ids=(5, 3),
        threads=3,
        pin=True,
        log_level=logging.WARNING,
    )
    cores = sorted(os.sched_getaffinity(0))
    for rank, one in enumerate(facts(tmp_path)):
        assert one["threads"] == 3 and set(one["cores"]) == core_slice(cores, rank, 2)
    assert capfd.readouterr().err == ""


def test_slices_of_the_cores_are_disjoint_and_whole_or_shared_when_there_are_too_few():
    for count in range(1, 9):
        slices = [core_slice(list(range(8)), place, count) for place in range(count)]
        assert sorted(core for one in slices for core in one) == list(range(8))
    assert [core_slice([4, 6], place, 3) for place in range(3)] == [{4}, {6}, {4}]


def test_a_rank_that_launches_again_is_the_rank_it_is_already(tmp_path):
    launch(f"{FAULTS}:launch_again", {"out": str(tmp_path)}, 2)
    assert [one["total"] for one in facts(tmp_path)] == [3.0, 3.0]


# ---------------------------------------------------------------- refused before anything starts


@pytest.mark.parametrize(
    ("job", "text"),
    [
        (
            {"adapter": {"load": [1, len]}},
            r"job\['adapter'\]\['load'\]\[1\] is <built-in function len>, a builtin_function",
        ),
        ({"path": Path("/x")}, r"job\['path'\] is PosixPath\('/x'\), a PosixPath; give names and plain data to ranks"),
        ({"deep": {3: 1}}, r"job\['deep'\] has the key 3; give names and plain data to ranks, keys as str"),
        ({"file": sys.stdout}, r"job\['file'\] is .*give names and plain data"),
    ],
)
def test_an_object_in_the_job_is_refused_with_its_place(job, text):
    with pytest.raises(TypeError, match=text):
        launch(f"{FAULTS}:write_facts", job, 2)


def test_an_entry_without_a_function_and_too_few_devices_are_refused():
    with pytest.raises(ValueError, match="entry is 'module'; write 'module:function'"):
        launch("module", {}, 2)
    with pytest.raises(ValueError, match="3 ranks for 2 devices; give one device a rank"):
        launch("module:function", {}, 3, device_ids=(0, 1))
    with pytest.raises(ValueError, match="0 ranks for 0 devices"):
        launch("module:function", {}, 0)


def test_an_entry_that_does_not_exist_is_named(capfd):
    with pytest.raises(
        RankFailedError, match=r"rank 0 failed at starting: ModuleNotFoundError: No module named 'nowhere'"
    ):
        launch("nowhere:main", {}, 1)
    assert capfd.readouterr().err == ""


# ---------------------------------------------------------------- one rank fails

OUT_OF_MEMORY = (
    r"rank 1 was killed by signal 9, usually out of memory, at layer 17, linear_quant, calibrating; free memory"
)


@pytest.mark.parametrize(
    ("how", "others", "error", "text"),
    [
        (
            "user",
            "wait",
            InvalidModelError,
            r"^model.layers.1.w has 3 NaN \(rank 1, layer 17, linear_quant, calibrating\); mend the checkpoint$",
        ),
        (
            "bug",
            "compute",
            RankFailedError,
            r"^rank 1 failed at layer 17, linear_quant, calibrating: RuntimeError: shape '\[3\]' is invalid for "
            r"input of size 2 \(raised at faults.py:\d+\)$",
        ),
        ("kill", "wait", RankFailedError, OUT_OF_MEMORY),
        ("kill", "compute", RankFailedError, OUT_OF_MEMORY),
        ("segv", "wait", RankFailedError, r"rank 1 was killed by signal 11 at layer 17, linear_quant, calibrating$"),
        ("term", "compute", RankFailedError, r"rank 1 was killed by signal 15 at layer 17, linear_quant, calibrating$"),
        (
            "exit3",
            "wait",
            RankFailedError,
            r"rank 1 failed at layer 17, .*: SystemExit: 3 \(raised at faults.py:\d+\)$",
        ),
        ("die", "wait", RankFailedError, r"rank 1 ended with exit code 4 at layer 17, linear_quant, calibrating$"),
        (
            "leave",
            "wait",
            RankFailedError,
            r"rank 1 left at layer 17, linear_quant, calibrating, before the job was done$",
        ),
    ],
)
def test_the_first_failure_ends_the_job_and_is_told_once(tmp_path, capfd, how, others, error, text):
    with pytest.raises(error, match=text) as raised:
        launch(
            f"{FAULTS}:fail",
            {"out": str(tmp_path), "rank": 1, "how": how, "others": others},
            2,
            log_level=logging.ERROR,
        )
    assert time.time() - float((tmp_path / "fault").read_text()) < END_S
    assert capfd.readouterr().err == ""
    if how == "bug":
        assert "in _bug" in raised.value.worker_traceback and raised.value.rank == 1


def test_of_four_ranks_the_one_that_failed_is_named_though_all_fall_over(tmp_path):
    with pytest.raises(InvalidModelError, match=r"rank 2, layer 17"):
        launch(f"{FAULTS}:fail", {"out": str(tmp_path), "rank": 2, "how": "user"}, 4)
    assert time.time() - float((tmp_path / "fault").read_text()) < END_S


def test_a_rank_that_ignores_sigterm_is_killed(tmp_path):
    job = {"out": str(tmp_path), "rank": 1, "how": "user", "others": "compute", "deaf": 0}
    with pytest.raises(InvalidModelError, match="rank 1, layer 17"):
        launch(f"{FAULTS}:fail", job, 2, limits=Limits(grace_s=2))
    assert time.time() - float((tmp_path / "fault").read_text()) < END_S


def test_an_error_that_all_ranks_agree_on_is_told_once(tmp_path):
    with pytest.raises(
        RankFailedError, match=r"rank \d failed at starting: RankMismatchError: .*shape differs: \[1\] on rank 0"
    ):
        launch(f"{FAULTS}:all_fail", {}, 2)


# ---------------------------------------------------------------- no progress


def test_a_rank_without_progress_is_named_with_what_each_rank_does_and_then_ends_the_job(tmp_path, caplog):
    limits = Limits(stuck_after_s=1, give_up_after_s=5)
    with pytest.raises(RankFailedError) as raised:
        launch(f"{FAULTS}:fail", {"out": str(tmp_path), "rank": 1, "how": "hang"}, 2, limits=limits)
    stuck = r"rank 1 is at layer 17, linear_quant, calibrating since \d+ s \(_hang in faults.py:\d+\)"
    waits = (
        r"rank 0 waits in sync_base_operation\(stat\) at faults.py:\d+ at layer 17, linear_quant, calibrating "
        r"since \d+ s \(\w+ in \w+.py:\d+\)"
    )
    assert re.match(
        f"no progress: {stuck}; meanwhile {waits}; look at the rank that waits for nobody$", str(raised.value)
    )
    told = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert told and all(re.match(f"no progress: {stuck}; meanwhile {waits}", one) for one in told)


def test_a_long_phase_that_beats_is_no_fault(tmp_path, caplog):
    launch(f"{FAULTS}:slow_phase", {}, 2, limits=Limits(stuck_after_s=10, give_up_after_s=20))
    assert not caplog.records


def test_ranks_that_wait_for_different_things_are_all_named(tmp_path):
    with pytest.raises(
        RankFailedError, match=r"no progress: rank 0 waits in a barrier at .*; rank 1 waits in a message at"
    ):
        launch(f"{FAULTS}:different_calls", {}, 2, limits=Limits(stuck_after_s=60, give_up_after_s=6))


# ---------------------------------------------------------------- the starting process


def start_parent(
    tmp_path: Path, entry: str, job: dict, world_size: int = 2, prefix: tuple[str, ...] = ()
) -> subprocess.Popen:
    """A process of its own that launches; `prefix` are the words of an outer launcher."""
    code = (
        "import sys\n"
        "from msmodelslim.distributed.launch import launch\n"
        "from msmodelslim.errors import ModelslimError\n"
        "try:\n"
        f"    launch({FAULTS + ':' + entry!r}, {job!r}, {world_size})\n"
        "except ModelslimError as error:\n"
        "    sys.exit(f'ERROR {error}')\n"
    )
    script = tmp_path / "parent.py"
    script.write_text(code)
    temporary = tmp_path / ("outer" if prefix else "temporary")  # torchrun leaves its own files
    temporary.mkdir(exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "TMPDIR": str(temporary)}
    words = [sys.executable, *prefix, str(script)]
    return subprocess.Popen(
        words, cwd=REPOSITORY, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def wait_for_files(folder: Path, pattern: str, count: int) -> None:
    deadline = time.monotonic() + 60
    while len([file for file in folder.glob(pattern) if file.read_text()]) < count:
        assert time.monotonic() < deadline, f"no {count} files {pattern}"
        time.sleep(0.05)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_to_the_parent_ends_ranks_and_their_children(tmp_path, signum, code):
    parent = start_parent(tmp_path, "hang_with_a_child", {"out": str(tmp_path)})
    wait_for_files(tmp_path, "pid*", 4)
    start = time.monotonic()
    parent.send_signal(signum)
    _, err = parent.communicate(timeout=END_S)
    assert parent.returncode == code and time.monotonic() - start < END_S
    assert "Traceback" not in err and [line for line in err.splitlines() if "initialized on device" not in line] == []


def test_a_signal_while_a_rank_is_deaf_still_ends_it(tmp_path):
    job = {"out": str(tmp_path), "rank": 1, "how": "hang", "others": "compute", "deaf": 0}
    parent = start_parent(tmp_path, "fail", job)
    wait_for_files(tmp_path, "fault", 1)
    start = time.monotonic()
    parent.send_signal(signal.SIGTERM)
    parent.communicate(timeout=END_S)
    assert parent.returncode == 143 and time.monotonic() - start < END_S


def test_ranks_end_and_clean_up_when_the_parent_is_killed(tmp_path):
    parent = start_parent(tmp_path, "hang_with_a_child", {"out": str(tmp_path)})
    wait_for_files(tmp_path, "pid*", 4)
    start = time.monotonic()
    parent.kill()
    parent.communicate(timeout=END_S)  # ends when nobody is left who could write
    assert parent.returncode == -signal.SIGKILL and time.monotonic() - start < END_S


def test_two_jobs_at_once_pass_while_the_usual_port_is_taken(tmp_path):
    with socket.socket() as taken:
        with suppress(OSError):  # somebody else has it: as good
            taken.bind(("127.0.0.1", 29500))
            taken.listen()
        parents = []
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            parents.append(start_parent(tmp_path / name, "write_facts", {"out": str(tmp_path / name)}))
        for parent in parents:
            _, err = parent.communicate(timeout=120)
            assert parent.returncode == 0, err
    assert [one["total"] for name in ("one", "two") for one in facts(tmp_path / name)] == [3.0] * 4


# ---------------------------------------------------------------- an outer launcher

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def test_under_torchrun_the_job_joins_its_processes(tmp_path):
    parent = start_parent(tmp_path, "write_facts", {"out": str(tmp_path)}, prefix=TORCHRUN)
    _, err = parent.communicate(timeout=120)
    assert parent.returncode == 0, err
    found = facts(tmp_path)
    assert len(found) == 2 and all(one["world_size"] == 2 and one["total"] == 3.0 for one in found)


def test_under_torchrun_the_first_failure_is_told_once_and_all_ranks_end(tmp_path):
    job = {"out": str(tmp_path), "rank": 1, "how": "user"}
    parent = start_parent(tmp_path, "fail", job, prefix=TORCHRUN)
    _, err = parent.communicate(timeout=120)
    assert parent.returncode != 0 and time.time() - float((tmp_path / "fault").read_text()) < END_S
    told = [line for line in err.splitlines() if line.startswith("ERROR ")]
    assert told == [
        "ERROR model.layers.1.w has 3 NaN (rank 1, layer 17, linear_quant, calibrating); mend the checkpoint"
    ]


def test_a_failure_under_one_of_two_launchers_ends_the_ranks_of_the_other(tmp_path):
    endpoint = f"127.0.0.1:{find_free_port(29600)}"
    words = ("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint)
    prefix = ("-m", "torch.distributed.run", *words, "--rdzv-id", "two", "--local-addr", "127.0.0.1")
    job = {"out": str(tmp_path), "rank": 1, "how": "user", "others": "compute"}
    parents = [start_parent(tmp_path, "fail", job, world_size=1, prefix=prefix) for _ in range(2)]
    told = []
    for parent in parents:
        _, err = parent.communicate(timeout=120)
        assert parent.returncode != 0
        told += [line for line in err.splitlines() if line.startswith("ERROR ")]
    assert time.time() - float((tmp_path / "fault").read_text()) < END_S
    assert told == [
        "ERROR model.layers.1.w has 3 NaN (rank 1, layer 17, linear_quant, calibrating); mend the checkpoint"
    ]


def test_another_number_of_processes_than_devices_is_refused():
    outer = {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}
    text = r"the launcher started 4 processes on this machine for 2 devices \(0, 1\)"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(EnvError, match=text):
        for name, value in {**outer, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
            patch.setenv(name, value)
        launch(f"{FAULTS}:write_facts", {}, 2)
