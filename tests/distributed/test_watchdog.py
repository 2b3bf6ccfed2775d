import os
from pathlib import Path

import pytest
import torch

from msmodelslim.cli import main
from msmodelslim.distributed import sync_base_operation, watchdog
from msmodelslim.distributed.watchdog import LIMIT_VARIABLES, Beat, Limits, Place, innermost_line, stuck_ranks
from msmodelslim.errors import EnvError


def beat(at_s: float, waiting: str = "", ended: str = "", pid: int = 1) -> Beat:
    return Beat(pid=pid, waiting=waiting, at_s=at_s, ended=ended)


@pytest.mark.parametrize(
    ("beats", "stuck"),
    [
        ([beat(0), beat(95)], [0]),  # one is silent, the other works
        ([beat(0, "x"), beat(95)], []),  # rank 0 waits for a rank that works
        ([beat(0, "x"), beat(0)], [1]),  # rank 0 waits for the silent one
        ([beat(0, "x"), beat(0, "y")], [0, 1]),  # both wait, for different things
        ([beat(0, "x"), beat(95, "x")], []),  # the second has just come
        ([beat(0, "x"), beat(0, ended="finished")], [0]),  # nobody is left to answer
        ([beat(0, ended="finished"), beat(0, ended="terminated")], []),
        ([beat(0, pid=0), beat(0, "x")], []),  # rank 0 may still import
        ([beat(-30, pid=0), beat(0, "x")], [0]),
    ],
)
def test_who_holds_up_the_run_is_who_is_silent_outside_a_collective(beats, stuck):
    assert stuck_ranks(beats, 100, 10) == stuck


def test_a_place_reads_as_words_and_a_run_begins_at_the_start():
    assert str(Place("layer 17", "", "calibrating")) == "layer 17, calibrating"
    assert str(Place()) == "the start"


def test_notes_are_read_back_and_a_missing_or_broken_one_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "_file", None)
    monkeypatch.setattr(watchdog, "_beat", Beat())
    path = tmp_path / "beat"
    assert watchdog.read_beat(path) is None
    watchdog.start_beats(path)
    watchdog.note("layer 3", "save", "writing é" * 50)
    with watchdog.waiting("w" * 5000):
        inside = watchdog.read_beat(path)
        watchdog.beat()
    outside = watchdog.read_beat(path)
    assert inside.pid == os.getpid() and inside.place == watchdog.place() and inside.waiting == "w" * 300
    assert outside.waiting == "" and outside.at_s >= inside.at_s and not watchdog.has_ended()
    watchdog.end_beats(watchdog.FINISHED)
    assert watchdog.read_beat(path).says(0) == "finished" and watchdog.has_ended()
    path.write_text("{half")
    assert watchdog.read_beat(path) is None


def test_the_innermost_line_outside_torch_of_the_newest_stack_is_shown(tmp_path):
    frame = '  File "{}", line {} in {}\n'
    old = "Current thread 0x1 (most recent call first):\n" + frame.format("/a/old.py", 1, "f")
    new = "Current thread 0x1 (most recent call first):\n" + frame.format(
        "/x/torch/distributed/c10d.py", 9, "all_reduce"
    )
    path = tmp_path / "stack"
    assert innermost_line(path) == ""
    path.write_text(old + new)
    assert innermost_line(path) == "all_reduce in c10d.py:9"
    path.write_text(
        old + new + frame.format("/b/linear_quant.py", 120, "postprocess") + frame.format("/b/x.py", 3, "g")
    )
    assert innermost_line(path) == "postprocess in linear_quant.py:120"


def test_this_process_is_alive_and_a_number_without_one_is_not():
    assert watchdog.is_alive(os.getpid())
    assert not watchdog.is_alive(int(Path("/proc/sys/kernel/pid_max").read_text()) + 1)


def reduce_twice(rank: int) -> watchdog.Traffic:
    before = watchdog.traffic()
    sync_base_operation(torch.full((1000,), float(rank)), "max")
    sync_base_operation(torch.full((1000,), float(rank)), "max")
    return watchdog.traffic().since(before)


def test_traffic_counts_calls_bytes_and_seconds_of_collectives(run_ranks):
    for found in run_ranks(2, reduce_twice):
        assert found.collectives == 4  # facts and data, twice
        assert found.sent_bytes == 2 * (512 + 4000)  # a header of 512 bytes, 1000 float32
        assert found.seconds > 0


def test_limits_come_from_the_environment_and_bad_ones_are_told_together(monkeypatch):
    assert Limits.from_environment() == Limits()
    monkeypatch.setenv("MSMODELSLIM_STUCK_AFTER_S", "1.5")
    monkeypatch.setenv("MSMODELSLIM_GIVE_UP_AFTER_S", "inf")
    assert Limits.from_environment() == Limits(stuck_after_s=1.5, give_up_after_s=float("inf"))
    monkeypatch.setenv("MSMODELSLIM_STUCK_AFTER_S", "soon")
    monkeypatch.setenv("MSMODELSLIM_GIVE_UP_AFTER_S", "-1")
    text = (
        "MSMODELSLIM_STUCK_AFTER_S is 'soon', and MSMODELSLIM_GIVE_UP_AFTER_S is '-1'; give seconds, a number above 0 "
        "(inf for no limit)"
    )
    with pytest.raises(EnvError) as raised:
        Limits.from_environment()
    assert str(raised.value) == text


def test_the_help_names_the_variables_that_set_the_limits(capsys):
    main(["quant", "--help"])
    shown = capsys.readouterr().out
    assert all(f"${name}" in shown for name in LIMIT_VARIABLES.values())
