"""Whatever goes wrong on any rank ends the command: soon, told once, with nothing left behind.

Each run here is the command itself, in processes of its own; most are forked from one that has torch imported. An
earlier result lies at the target and --overwrite is given, so that a run that fails must leave exactly that.
"""

import hashlib
import json
import math
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from msmodelslim.distributed.failure import was_told
from msmodelslim.errors import EnvError, UnsupportedError
from msmodelslim.model.checkpoint import Checkpoint
from msmodelslim.processor.linear_quant import LinearQuantProcessor
from msmodelslim.quant_service import QuantJob, quantize, run_rank
from tests import fixtures
from tests.command_run import Ended, Run, quant_words, run
from tests.run_ranks import RankRunner

END_S = 15  # from a fault to the last process gone
LINE = re.compile(
    r"INFO multi device configuration detected, using distributed layer-wise pipeline\.|"
    r"INFO Starting distributed execution with \d devices: \[[\d, ]+\]|"
    r"WARNING \d ranks share \d cores; more ranks than cores is slower, not faster|"
    r"INFO rank (\d): Rank \1/\d initialized on device cpu:\1 with backend gloo|"
    r"INFO rank 0: .*"
)


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_samples(tmp_path_factory.mktemp("data") / "samples.jsonl", 7)


@pytest.fixture(scope="session")
def one_device(tmp_path_factory: pytest.TempPathFactory, t_dense: Path, dataset: Path) -> Path:
    """The result of one device: what any number must give, and the earlier result at the target of a faulty run."""
    folder = tmp_path_factory.mktemp("one")
    ended = run(folder / "run", quant_words(folder / "in", t_dense, folder / "out", dataset, 1))
    assert ended.code == 0, ended.err
    return folder / "out"


@pytest.fixture
def faulty(tmp_path: Path, t_dense: Path, dataset: Path, one_device: Path) -> Callable[..., Run]:
    """Starts a run with the given steps before the others, over an earlier result; afterwards that is all there is."""

    def start(*steps: dict[str, Any], devices: int = 2, limits: dict[str, str] | None = None, **options: Any) -> Run:
        shutil.copytree(one_device, tmp_path / "results" / "out")
        steps = tuple({"type": "fault", "folder": str(tmp_path / "run"), **step} for step in steps)
        words = quant_words(tmp_path / "in", t_dense, tmp_path / "results" / "out", dataset, devices, steps)
        return Run(tmp_path / "run", [*words, "--overwrite"], limits, **options)

    return start


def write_samples(path: Path, count: int) -> Path:
    rows = [[(7 * index + 3 * place) % 290 + 3 for place in range(5 + index)] for index in range(count)]
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    return path


def hashes(folder: Path) -> dict[str, str]:
    """sha256 of every file but the report, which tells the number of ranks and the time."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "quant_report.json")
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def assert_failed_as_one(ended: Ended, tmp_path: Path, one_device: Path, code: int, told: str) -> None:
    """The exit code, in time, told in these words once; only the earlier result is there."""
    assert ended.code == code, ended.err
    assert ended.left == []
    assert math.isnan(ended.seconds) or ended.seconds < END_S
    other = [line for line in ended.err.splitlines() if not LINE.fullmatch(line)]
    assert len(other) == 1 and re.fullmatch(told, other[0]), ended.err
    results = tmp_path / "results"
    assert [path.name for path in results.iterdir()] == ["out"]
    assert hashes(results / "out") == hashes(one_device)


@pytest.fixture(autouse=True)
def source_is_untouched(t_dense: Path) -> Any:
    before = hashes(t_dense)
    yield
    assert hashes(t_dense) == before


# ---------------------------------------------------------------- an error on one rank

USER = r"error: model\.layers\.1\.w has 3 NaN \(rank 1, model\.layers\.1, fault, {}\); mend the checkpoint"
BUG = (
    r"error: rank 1 failed at model\.layers\.1, fault, {}: RuntimeError: shape '\[3\]' is invalid for input of size 2 "
    r"\(raised at fault_plugin\.py:\d+\)"
)


@pytest.mark.parametrize(
    ("steps", "devices", "told"),
    [
        pytest.param([{"how": "user", "phase": "forward"}], 2, USER.format("forward"), id="user's error, forward"),
        pytest.param([{"how": "bug", "phase": "forward"}], 2, BUG.format("forward"), id="bug, forward"),
        pytest.param([{"how": "bug"}], 4, BUG.format("postprocess"), id="bug on one of four"),
        pytest.param(
            [{"how": "shape"}],
            2,
            r"error: rank \d failed at model\.layers\.1, fault, postprocess: RankMismatchError: sync_base_operation of "
            r"'model\.layers\.1\.stat': shape differs: \[1\] on rank 0; \[2\] on rank 1 \(raised at wire\.py:\d+\)",
            id="reduction",
        ),
        pytest.param(
            [{"how": "file_limit"}],
            2,
            r"error: rank 1 failed at model\.layers\.1, compressed_tensors_distributed, postprocess: OSError: "
            r"\[Errno 27\] File too large \(raised at shards\.py:\d+\)",
            id="save",
        ),
        pytest.param(
            [{"how": "file_limit", "limit_bytes": 0}],
            2,
            r"error: rank 1 ended with exit code 1 at model\.layers\.1, fault, postprocess",
            id="save, and no room for the report",
        ),
        pytest.param(
            [{"how": "kill", "rank": 2, "layer": 0}],
            3,
            r"error: rank 2 was killed by signal 9, usually out of memory, at model\.layers\.0, fault, postprocess; "
            r"free memory or use fewer ranks",
            id="SIGKILL",
        ),
        pytest.param(
            # Rank 0 is in a long computation, and takes no notice of SIGTERM.
            [
                {"how": "sleep", "rank": 0, "phase": "preprocess", "deaf": [0]},
                {"how": "user", "phase": "preprocess"},
            ],
            2,
            USER.format("preprocess"),
            id="the other rank ignores SIGTERM",
        ),
    ],
)
def test_a_fault_ends_all_ranks_is_told_once_and_leaves_nothing(
    steps: list[dict[str, Any]],
    devices: int,
    told: str,
    faulty: Callable[..., Run],
    tmp_path: Path,
    one_device: Path,
) -> None:
    ended = faulty(*steps, devices=devices).finish()
    assert ended.processes == devices + 1
    assert_failed_as_one(ended, tmp_path, one_device, 1, told)


@pytest.mark.parametrize("step", ["linear_quant", "smooth_quant"])
def test_an_activation_that_is_not_finite_is_named_with_its_sample_and_the_rank_that_held_it(
    step: str, tmp_path: Path
) -> None:
    """C26"""
    config = fixtures.model_config("llama", torch.bfloat16)
    tensors = fixtures.dense_tensors(config, 0, torch.bfloat16)
    tensors["model.embed_tokens.weight"][300] = torch.inf
    model = fixtures.write_checkpoint(tmp_path / "model", config, tensors)
    dataset = write_samples(tmp_path / "samples.jsonl", 4)
    lines = dataset.read_text().splitlines()
    lines[2] = lines[2].replace("17", "300", 1)  # token 300 is in sample 2 alone
    dataset.write_text("\n".join(lines))
    process = [] if step == "linear_quant" else [{"type": step}]
    cause = r"model\.layers\.0\.self_attn\.q_proj: its input is not finite in calibration sample 2"
    for devices, place in ((1, ".*"), (4, rf" \(rank 2, model\.layers\.0, {step}, postprocess\)")):
        words = quant_words(tmp_path / "in", model, tmp_path / "results" / "out", dataset, devices, process)
        ended = run(tmp_path / str(devices), words)
        assert ended.code == 1 and ended.left == []
        assert len(ended.told) == 1 and re.match(f"error: {cause}{place}; take that sample out", ended.told[0])
        assert list((tmp_path / "results").glob("*")) == []


@pytest.mark.parametrize("temporary", ["elsewhere", "on the full disk"])
def test_a_disk_that_fills_up_is_told_and_leaves_nothing(
    temporary: str, tmp_path: Path, t_dense: Path, dataset: Path
) -> None:
    """A real file system, in a mount namespace of its own, which rank 1 fills before the last layer is written."""
    if subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    disk = tmp_path / "disk"
    disk.mkdir()
    step = {"type": "fault", "how": "full_disk", "phase": "preprocess", "disk": str(disk), "folder": str(tmp_path)}
    words = quant_words(tmp_path / "in", t_dense, disk / "out", dataset, 2, [step])
    environment = {"TMPDIR": str(disk)} if temporary == "on the full disk" else {}
    ended = run(tmp_path / "run", words, environment, disk=disk)
    assert ended.code == 1 and ended.left == [], ended.err
    told = (
        rf"rank \d.*no space left while writing {disk}/\.out\.partial-.*|"
        rf"error: no space left while writing {disk}/\.out\.partial-\d+/model\.safetensors \(rank \d, "
        r"model\.layers\.\d, compressed_tensors_distributed, postprocess\); free space or give another --save_path"
    )
    other = [line for line in ended.err.splitlines() if not LINE.fullmatch(line)]
    assert other and all(re.fullmatch(told, line) for line in other), ended.err
    assert (tmp_path / "run" / "left_on_disk").read_text() == "filler"


# ---------------------------------------------------------------- signals


@pytest.mark.parametrize(
    ("signum", "code", "told", "warm"),
    [(signal.SIGINT, 130, "interrupted", False), (signal.SIGTERM, 143, "terminated", True)],
)
def test_a_signal_to_the_command_ends_it_and_all_ranks(
    signum: int, code: int, told: str, warm: bool, faulty: Callable[..., Run], tmp_path: Path, one_device: Path
) -> None:
    running = faulty({"how": "sleep"}, warm=warm)
    running.wait_for_fault()
    running.send(signum)
    assert_failed_as_one(running.finish(), tmp_path, one_device, code, told)


def test_a_signal_ends_ranks_that_ignore_it(faulty: Callable[..., Run], tmp_path: Path, one_device: Path) -> None:
    running = faulty({"how": "sleep", "deaf": [0, 1]})
    running.wait_for_fault()
    running.send(signal.SIGTERM)
    assert_failed_as_one(running.finish(), tmp_path, one_device, 143, "terminated")


def test_ranks_end_and_clean_up_when_the_command_is_killed(
    faulty: Callable[..., Run], tmp_path: Path, one_device: Path
) -> None:
    running = faulty({"how": "sleep"})
    running.wait_for_fault()
    running.send(signal.SIGKILL)
    ended = running.finish()
    assert ended.code == -signal.SIGKILL and ended.left == [] and ended.seconds < END_S
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["out"]
    assert hashes(tmp_path / "results" / "out") == hashes(one_device)


# ---------------------------------------------------------------- no progress


def test_a_stuck_rank_is_named_and_the_run_goes_on_until_the_limit(
    faulty: Callable[..., Run], tmp_path: Path, one_device: Path
) -> None:
    limits = {"MSMODELSLIM_STUCK_AFTER_S": "1", "MSMODELSLIM_GIVE_UP_AFTER_S": "4"}
    ended = faulty({"how": "sleep"}, limits=limits).finish()
    found = (
        r"no progress: rank 1 is at model\.layers\.1, fault, postprocess since \d+ s \(<lambda> in fault_plugin\.py:\d+"
        r"\); meanwhile rank 0 waits in .* at model\.layers\.1, linear_quant, \w+ since \d+ s \(\w+ in \w+\.py:\d+\)"
    )
    warnings = [line for line in ended.err.splitlines() if line.startswith("WARNING no progress")]
    assert warnings and all(re.fullmatch(f"WARNING {found}", line) for line in warnings), ended.err
    assert len(ended.told) == 1 and re.fullmatch(f"error: {found}; look at the rank .*", ended.told[0]), ended.err
    assert ended.code == 1 and ended.left == [] and ended.seconds < END_S
    assert hashes(tmp_path / "results" / "out") == hashes(one_device)


def test_a_slow_rank_is_named_but_the_run_is_fine(faulty: Callable[..., Run], tmp_path: Path, one_device: Path) -> None:
    ended = faulty({"how": "sleep", "seconds": 4}, limits={"MSMODELSLIM_STUCK_AFTER_S": "1"}).finish()
    assert ended.code == 0 and ended.left == [], ended.err
    assert "WARNING no progress: rank 1 is at model.layers.1, fault, postprocess since" in ended.err
    assert hashes(tmp_path / "results" / "out") == hashes(one_device)


# ---------------------------------------------------------------- no fault


def test_lines_of_all_ranks_are_shown_with_their_rank_and_progress_once(faulty: Callable[..., Run]) -> None:
    ended = faulty({"how": "warn"}).finish()
    assert ended.code == 0 and ended.left == [], ended.err
    lines = [line for line in ended.err.splitlines() if "more ranks than cores" not in line]  # on a single core
    assert lines[:2] == [
        "INFO multi device configuration detected, using distributed layer-wise pipeline.",
        "INFO Starting distributed execution with 2 devices: [0, 1]",
    ]
    for rank in range(2):
        assert f"INFO rank {rank}: Rank {rank}/2 initialized on device cpu:{rank} with backend gloo" in lines
    assert [line for line in lines if line.startswith("WARNING")] == ["WARNING rank 1: something odd"]
    assert all(re.match(r"(INFO|WARNING) rank \d: ", line) for line in lines[2:])
    progress = [line for line in lines if "quantize " in line]
    assert len(progress) == 2 and all(line.startswith("INFO rank 0: quantize ") for line in progress)
    assert ended.out.count("peak memory") == 1


def test_uneven_shares_repeated_runs_and_a_second_run_at_once_give_one_devices_bytes(
    tmp_path: Path, t_dense: Path, dataset: Path, one_device: Path
) -> None:
    """Seven samples on three ranks and, meanwhile, on two, while the usual port is taken."""
    with socket.socket() as taken:
        with suppress(OSError):  # somebody else has it: as good
            taken.bind(("", 29500))
            taken.listen()
        running = [
            Run(
                tmp_path / name, quant_words(tmp_path / f"{name}in", t_dense, tmp_path / f"{name}out", dataset, devices)
            )
            for name, devices in (("a", 3), ("b", 2), ("c", 3))
        ]
        for one in running:
            ended = one.finish()
            assert ended.code == 0 and ended.left == [], ended.err
    assert [hashes(tmp_path / f"{name}out") for name in "abc"] == [hashes(one_device)] * 3


@pytest.mark.parametrize("devices", [2, 4])
def test_fewer_samples_than_ranks_give_one_devices_bytes(devices: int, tmp_path: Path, t_dense: Path) -> None:
    dataset = write_samples(tmp_path / "samples.jsonl", 1)
    for count in (1, devices):
        words = quant_words(tmp_path / f"in{count}", t_dense, tmp_path / f"out{count}", dataset, count)
        ended = run(tmp_path / f"run{count}", words)
        assert ended.code == 0 and ended.left == [], ended.err
    assert hashes(tmp_path / f"out{devices}") == hashes(tmp_path / "out1")


def test_no_samples_are_refused_before_a_rank_is_started(tmp_path: Path, t_dense: Path) -> None:
    (tmp_path / "samples.jsonl").write_text("")
    words = quant_words(tmp_path / "in", t_dense, tmp_path / "out", tmp_path / "samples.jsonl", 2)
    ended = run(tmp_path / "run", words)
    assert ended.code == 1 and ended.processes <= 1 and len(ended.told) == 1
    assert "0 records read, 0 too short, 0 kept" in ended.told[0]


def test_one_device_with_the_distributed_runner_warns_and_gives_the_same_bytes(
    tmp_path: Path, t_dense: Path, dataset: Path, one_device: Path
) -> None:
    words = quant_words(tmp_path / "in", t_dense, tmp_path / "out", dataset, 1, spec={"runner": "dp_layer_wise"})
    ended = run(tmp_path / "run", words)
    assert ended.code == 0 and ended.processes == 1
    assert "WARNING Number of devices <= 1, falling back to single-device execution" in ended.err.splitlines()
    assert hashes(tmp_path / "out") == hashes(one_device)


# ---------------------------------------------------------------- support is asked for first


def test_processors_without_support_are_named_at_once_before_anything_starts(
    tmp_path: Path, t_dense: Path, dataset: Path
) -> None:
    """Also those inside a group, and in a prior stage; a step that supports it, and the group itself, are not named."""
    group = {"type": "group", "configs": [{"type": "lonely"}, {"type": "fault", "how": "warn"}]}
    prior = {"prior": [{"process": [{"type": "lonely_too"}], "dataset": str(dataset)}]}
    words = quant_words(tmp_path / "in", t_dense, tmp_path / "out", dataset, 2, [group], prior)
    ended = run(tmp_path / "run", words)
    assert ended.code == 1 and ended.processes <= 1 and not (tmp_path / "out").exists()
    assert ended.told == [
        "error: The following processors do not support distributed quantization: ['lonely_too', 'lonely']; run on one "
        "device, or override support_distributed() once the step gives the same result on any number"
    ]
    assert "Starting distributed execution" not in ended.err


def test_no_weight_is_read_for_a_run_that_is_refused(
    tmp_path: Path, t_dense: Path, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tensor", "weight"):
        monkeypatch.setattr(Checkpoint, name, lambda *_: pytest.fail("a weight was read"))
    monkeypatch.setattr(LinearQuantProcessor, "support_distributed", lambda _: False)
    words = quant_words(tmp_path / "in", t_dense, tmp_path / "out", dataset, 2)
    recipe = Path(words[words.index("--config_path") + 1]).read_text()
    job = QuantJob(t_dense, tmp_path / "out", recipe, "test.yaml", device_ids=(0, 1), dataset=str(dataset))
    with pytest.raises(UnsupportedError, match=r"\['linear_quant'\]"):
        quantize(job)


def what_is_there_when_it_fails(rank: int, values: dict[str, Any]) -> list[bool]:
    """Whether the directory that all ranks write to is there: when this rank's error gets out, and once it was told."""
    partial, found = Path(values["save_path"]).parent / ".out.partial-1", []
    load_fault_steps()
    try:
        run_rank(values, rank, 2)
    except RuntimeError:  # of `bug`, or of a collective that lost the rank with the bug
        found.append(partial.exists())
    dist.barrier()
    was_told()
    dist.barrier()
    return [*found, partial.exists()]


def load_fault_steps() -> None:
    from tests import fault_plugin  # noqa: F401 # registers them


def test_a_rank_takes_the_shared_directory_away_only_when_its_error_has_been_told(
    tmp_path: Path, t_dense: Path, dataset: Path, run_ranks: RankRunner
) -> None:
    """Another rank that still writes there would fail for that, and earlier than the cause is known."""
    steps = [{"type": "fault", "how": "bug", "rank": rank, "folder": str(tmp_path)} for rank in (0, 1)]
    words = quant_words(tmp_path / "in", t_dense, tmp_path / "out", dataset, 2, steps)
    recipe = Path(words[words.index("--config_path") + 1]).read_text()
    job = QuantJob(t_dense, tmp_path / "out", recipe, "test.yaml", device_ids=(0, 1), dataset=str(dataset), leader=1)
    assert run_ranks(2, what_is_there_when_it_fails, job.plain()) == [[True, False]] * 2


# ---------------------------------------------------------------- ranks that read different files


def run_on_own_files(rank: int, values: dict[str, Any], models: list[str], datasets: list[str]) -> None:
    run_rank(values | {"model_path": models[rank], "dataset": datasets[rank]}, rank, len(models))


@pytest.mark.parametrize("differs", ["config.json of the model", "the list of its tensors", "the calibration data"])
def test_ranks_that_read_different_files_refuse_all_of_them(
    differs: str, tmp_path: Path, t_dense: Path, dataset: Path, run_ranks: RankRunner
) -> None:
    other_model, other_data = tmp_path / "model", tmp_path / "samples.jsonl"
    shutil.copytree(t_dense, other_model)
    shutil.copy(dataset, other_data)
    if differs.startswith("config"):
        text = (other_model / "config.json").read_text()
        (other_model / "config.json").write_text(text.replace('"tie_word_embeddings": false', '"pad_token_id": 2'))
    elif differs.startswith("the list"):
        shutil.rmtree(other_model)
        fixtures.t_dense(other_model, dtype=torch.float16)
        shutil.copy(t_dense / "config.json", other_model / "config.json")
    else:
        write_samples(other_data, 8)
    words = quant_words(tmp_path / "in", t_dense, tmp_path / "out", dataset, 2)
    recipe = Path(words[words.index("--config_path") + 1]).read_text()
    values = QuantJob(t_dense, tmp_path / "out", recipe, "test.yaml", device_ids=(0, 1), leader=1).plain()
    models, datasets = [str(t_dense), str(t_dense), str(other_model)], [str(dataset), str(dataset), str(other_data)]
    errors = run_ranks.errors(3, run_on_own_files, values, models, datasets)
    text = (
        rf"the ranks do not work on the same inputs: {differs} is [0-9a-f]{{12}} on ranks 0, 1; [0-9a-f]{{12}} on rank "
        r"2; give every machine the same files and versions"
    )
    assert all(isinstance(error, EnvError) and re.fullmatch(text, str(error)) for error in errors), errors
    assert not list(tmp_path.glob("*out*"))


def test_a_rank_without_the_file_that_others_have_is_named_with_nothing(run_ranks: RankRunner) -> None:
    errors = run_ranks.errors(2, compare_facts)
    assert [str(error) for error in errors] == [
        "the ranks do not work on the same inputs: a is 1 on rank 0; 2 on rank 1, and b is x on rank 0; nothing on "
        "rank 1; give every machine the same files and versions"
    ] * 2


def compare_facts(rank: int) -> None:
    from msmodelslim.distributed.same_inputs import refuse_differences

    refuse_differences({"a": "1", "b": "x", "c": "same"} if rank == 0 else {"a": "2", "c": "same"})
