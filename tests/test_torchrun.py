"""Runs that torchrun starts, on one machine and on two: the same bytes, and the same end when something is wrong.

Two network namespaces joined by a cable stand in for two machines; they share the file system unless a test mounts
something of its own on one of them.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from msmodelslim.device import parse_device
from tests.command_run import Ended, Run, quant_words, run
from tests.test_faults import END_S, hashes, write_samples

TORCHRUN = ("-m", "torch.distributed.run")
PORT = "29411"  # nobody else is in the namespace


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_samples(tmp_path_factory.mktemp("data") / "samples.jsonl", 7)


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory, t_dense: Path, dataset: Path) -> dict[str, str]:
    """Hashes of what one device gives."""
    folder = tmp_path_factory.mktemp("one")
    ended = run(folder / "run", quant_words(folder / "in", t_dense, folder / "out", dataset, 1))
    assert ended.code == 0, ended.err
    return hashes(folder / "out")


@pytest.fixture(scope="module")
def machines() -> Iterator[tuple[str, str]]:
    """Two network namespaces with addresses 10.99.x.1 and 10.99.x.2, each with nothing but a loopback and the cable."""
    names = (f"slim{os.getpid()}a", f"slim{os.getpid()}b")
    commands = [f"netns add {name}" for name in names]
    commands.append(f"link add cable netns {names[0]} type veth peer name cable netns {names[1]}")
    for number, name in enumerate(names, 1):
        commands += [f"-n {name} addr add {address(number)}/24 dev cable"]
        commands += [f"-n {name} link set {device} up" for device in ("lo", "cable")]
    try:
        for command in commands:
            subprocess.run(["ip", *command.split()], check=True, capture_output=True)
        yield names
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces need root and iproute2: {error}")
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def address(number: int) -> str:
    return f"10.99.{os.getpid() % 250}.{number}"


def on_two(
    tmp_path: Path, machines: Sequence[str], words: Sequence[str], more: Sequence[str] = ("", "")
) -> tuple[Ended, Ended]:
    """The command on both machines, one rank each; `more` is shell code that each runs first, in its own mounts."""
    running = []
    for number, (name, code) in enumerate(zip(machines, more, strict=True)):
        launcher = [*TORCHRUN, "--nnodes", "2", "--nproc_per_node", "1", "--node_rank", str(number)]
        launcher += ["--master_addr", address(1), "--master_port", PORT]
        prefix = ["ip", "netns", "exec", name, "sh", "-c", f'{code or "true"} && exec "$@"', "sh"]
        running.append(Run(tmp_path / name, words, launcher=launcher, prefix=prefix))
    ended = [one.finish(gone_s=END_S) for one in running]
    assert [one.left for one in ended] == [[], []]
    return ended[0], ended[1]


def told(*ended: Ended) -> list[str]:
    return [line for one in ended for line in one.told]


def test_torchrun_on_one_machine_gives_one_devices_bytes_and_one_device_a_process(
    tmp_path: Path, t_dense: Path, dataset: Path, one_device: dict[str, str]
) -> None:
    words = quant_words(tmp_path / "in", t_dense, tmp_path / "out", dataset, devices=0)
    launcher = [*TORCHRUN, "--standalone", "--nproc_per_node", "2"]
    ended = run(tmp_path / "run", words, launcher=launcher)
    assert ended.code == 0 and ended.left == [], ended.err
    assert hashes(tmp_path / "out") == one_device
    ours = [line for line in ended.err.splitlines() if line.startswith(("INFO", "WARNING", "ERROR"))]
    assert all(re.match(r"[A-Z]+ rank \d: ", line) for line in ours)
    for rank in range(2):
        assert f"INFO rank {rank}: Rank {rank}/2 initialized on device cpu:{rank} with backend gloo" in ours
    assert [line for line in ours if "Starting" in line] == [
        "INFO rank 0: Starting distributed execution with 2 devices: [0, 1]"
    ]
    assert ended.out.count("model:  llama") == 1 and ended.out.count("peak memory") == 1


def test_two_machines_give_one_devices_bytes(
    tmp_path: Path, machines: tuple[str, str], t_dense: Path, dataset: Path, one_device: dict[str, str]
) -> None:
    """Without a word about network interfaces: the host's own name means the loopback there."""
    words = quant_words(tmp_path / "in", t_dense, tmp_path / "out", dataset, devices=0)
    first, second = on_two(tmp_path, machines, words)
    assert (first.code, second.code) == (0, 0), first.err + second.err
    assert hashes(tmp_path / "out") == one_device
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == ["out"]
    assert "INFO rank 1: Rank 1/2 initialized on device cpu:0 with backend gloo" in second.err
    assert (first.out.count("peak memory"), second.out.count("peak memory")) == (1, 0)


def test_machines_that_do_not_share_the_target_are_refused_before_the_first_layer(
    tmp_path: Path, machines: tuple[str, str], t_dense: Path, dataset: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    words = quant_words(tmp_path / "in", t_dense, disk / "out", dataset, devices=0)
    first, second = on_two(tmp_path, machines, words, ("", f"mount -t tmpfs none {disk}"))
    assert (first.code, second.code) == (1, 1)
    assert len(told(first, second)) == 1, first.err + second.err
    assert re.fullmatch(
        rf"error: ranks \[1\] do not see {disk} as rank 0 does \(rank \d, the whole model, "
        r"compressed_tensors_distributed, pre_run\); give a --save_path on a file system that all machines share",
        told(first, second)[0],
    )
    assert list(disk.iterdir()) == []
    assert "quantize 1/2" not in first.err


def test_machines_with_different_configs_are_refused(
    tmp_path: Path, machines: tuple[str, str], t_dense: Path, dataset: Path
) -> None:
    other = tmp_path / "config.json"
    other.write_text((t_dense / "config.json").read_text().replace('"tie_word_embeddings": false', '"x": 1'))
    words = quant_words(tmp_path / "in", t_dense, tmp_path / "out", dataset, devices=0)
    first, second = on_two(tmp_path, machines, words, ("", f"mount --bind {other} {t_dense}/config.json"))
    assert (first.code, second.code) == (1, 1)
    assert len(told(first, second)) == 1, first.err + second.err
    assert re.match(
        r"error: the ranks do not work on the same inputs: config\.json of the model is [0-9a-f]{12} on rank 0; "
        r"[0-9a-f]{12} on rank 1",
        told(first, second)[0],
    )
    assert not list(tmp_path.glob("*out*"))


def test_an_error_on_one_machine_before_the_ranks_have_met_ends_the_other(
    tmp_path: Path, machines: tuple[str, str], t_dense: Path, dataset: Path
) -> None:
    words = quant_words(tmp_path / "in", t_dense, tmp_path / "out", dataset, devices=0)
    first, second = on_two(tmp_path, machines, words, ("", f"mount -t tmpfs none {dataset.parent}"))
    assert first.code != 0 and second.code == 1
    assert len(told(first, second)) == 1 and "samples.jsonl" in second.told[0], first.err + second.err
    assert not list(tmp_path.glob("*out*"))


def test_a_rank_killed_on_one_machine_ends_the_other_in_time(
    tmp_path: Path, machines: tuple[str, str], t_dense: Path, dataset: Path
) -> None:
    step = {"type": "fault", "how": "kill", "folder": str(tmp_path)}
    words = quant_words(tmp_path / "in", t_dense, tmp_path / "out", dataset, 0, [step])
    for name in machines:
        (tmp_path / name).mkdir()
        (tmp_path / name / "fault").symlink_to(tmp_path / "fault")  # the time of the fault, for both
    first, second = on_two(tmp_path, machines, words)
    assert first.code != 0 and second.code != 0
    assert max(first.seconds, second.seconds) < END_S
    assert not list(tmp_path.glob("*out*"))


def test_a_stuck_rank_is_named_with_what_the_other_does_and_ends_the_job_at_the_limit(
    tmp_path: Path, t_dense: Path, dataset: Path
) -> None:
    limits = {"MSMODELSLIM_STUCK_AFTER_S": "1", "MSMODELSLIM_GIVE_UP_AFTER_S": "5"}
    (tmp_path / "run").mkdir()
    step = {"type": "fault", "how": "sleep", "folder": str(tmp_path / "run")}
    words = quant_words(tmp_path / "in", t_dense, tmp_path / "results" / "out", dataset, 0, [step])
    launcher = [*TORCHRUN, "--standalone", "--nproc_per_node", "2"]
    ended = run(tmp_path / "run", words, limits, launcher=launcher)
    found = (
        r"no progress: rank 1 is at model\.layers\.1, fault, postprocess since \d+ s; meanwhile rank 0 waits in .* at "
        r"model\.layers\.1, linear_quant, \w+ since \d+ s"
    )
    assert any(re.fullmatch(f"WARNING rank 0: {found}", line) for line in ended.err.splitlines()), ended.err
    assert [line for line in ended.told if re.fullmatch(f"error: {found}; look at the rank .*", line)] == ended.told
    assert len(ended.told) == 1 and ended.code == 1 and ended.left == []
    assert list((tmp_path / "results").iterdir()) == []


def test_a_runner_for_one_device_is_refused_under_a_launcher_of_two(
    tmp_path: Path, t_dense: Path, dataset: Path
) -> None:
    words = quant_words(tmp_path / "in", t_dense, tmp_path / "out", dataset, 0, spec={"runner": "layer_wise"})
    launcher = [*TORCHRUN, "--standalone", "--nproc_per_node", "2"]
    ended = run(tmp_path / "run", words, launcher=launcher)
    assert ended.code == 1
    assert len(ended.told) == 1
    assert "spec.runner is layer_wise, which uses one device, and the launcher started 2 processes" in ended.told[0]
    assert not (tmp_path / "out").exists()


def test_the_default_devices_are_as_many_as_the_launcher_started(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_device("cpu", None) == ("cpu", (0,))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert parse_device("cpu", None) == ("cpu", (0, 1, 2))
    assert parse_device("cpu", [5]) == ("cpu", (5,))


def test_the_interface_is_the_one_with_the_route(machines: tuple[str, str]) -> None:
    """To the other machine, and to itself, by address; where its name means the loopback there is no answer."""
    code = (
        "import sys; from msmodelslim.distributed.network import interface_towards as f; print(*map(f, sys.argv[1:]))"
    )
    words = [
        "ip",
        "netns",
        "exec",
        machines[0],
        sys.executable,
        "-c",
        code,
        address(2),
        address(1),
        "localhost",
        "no.such",
    ]
    shown = subprocess.run(words, check=True, capture_output=True, text=True).stdout
    assert shown == "cable cable  \n"
