import os
import subprocess
import sys

import pytest
import torch

from msmodelslim import device
from msmodelslim.errors import EnvError, SchemaValidateError


@pytest.mark.parametrize(
    ("words", "ids", "meaning"),
    [
        ("npu", None, ("npu", (0,))),
        ("npu:", None, ("npu", (0,))),
        ("npu:0,1", None, ("npu", (0, 1))),
        (" NPU : 3 , 1 ", None, ("npu", (3, 1))),
        ("npu", [0, 1], ("npu", (0, 1))),
        ("cuda:2", None, ("cuda", (2,))),
        ("cpu", [], ("cpu", (0,))),
    ],
)
def test_a_device_is_a_kind_and_indices(words, ids, meaning):
    assert device.parse_device(words, ids) == meaning


def test_indices_given_apart_win_with_a_warning(caplog):
    assert device.parse_device("npu:4,5", [0, 1]) == ("npu", (0, 1))
    assert "--device_id 0 1 is used, not the indices of npu:4,5" in caplog.text


def test_indices_given_once_do_not_warn(caplog):
    device.parse_device("npu", [0, 1])
    device.parse_device("npu:0,1", None)
    assert not caplog.records


@pytest.mark.parametrize(
    ("words", "ids", "fault"),
    [
        ("tpu", None, "'tpu' is not a device; write one of auto, npu, cuda, cpu"),
        ("", None, "'' is not a device"),
        ("npu:a", None, "'a' is not an index; write it like npu:0,1"),
        ("npu:0,", None, "'' is not an index"),
        ("npu:0,0", None, "index 0 is given twice"),
        ("npu", [1, 1], "index 1 is given twice"),
        ("npu:-1", None, "index -1 is negative"),
        ("npu", [-2], "index -2 is negative"),
    ],
)
def test_a_wrong_device_is_named(words, ids, fault):
    with pytest.raises(SchemaValidateError) as error:
        device.parse_device(words, ids)
    assert fault in str(error.value)


def test_all_mistakes_of_a_device_are_told_at_once():
    with pytest.raises(SchemaValidateError) as error:
        device.parse_device("gpu:x,1,1,-3", None)
    assert all(part in str(error.value) for part in ("'gpu'", "'x'", "index 1 is given twice", "index -3 is negative"))


def test_auto_is_the_best_kind_present():
    best = "cuda" if torch.cuda.is_available() else "cpu"
    assert device.parse_device("auto", None) == (best, (0,))


def test_a_device_that_is_not_there_is_an_error_of_one_line_that_says_what_is():
    with pytest.raises(EnvError) as error:
        device.check_present("npu", (0, 7))
    message = str(error.value)
    assert "npu:0, npu:7 is not on this machine (torch_npu is not installed); it has" in message
    assert "cpu:0" in message
    assert "\n" not in message


def test_more_cpu_slices_than_cores_share_the_cores_with_a_warning(caplog):
    cores = len(os.sched_getaffinity(0))
    device.check_present("cpu", tuple(range(cores)))
    assert not caplog.records
    device.check_present("cpu", tuple(range(cores + 1)))
    assert f"{cores + 1} ranks share {cores} cores" in caplog.text


def test_every_slice_of_the_cpu_is_torchs_cpu():
    assert device.torch_device("cpu", 3) == torch.device("cpu")
    assert device.torch_device("cuda", 1) == torch.device("cuda:1")


def test_each_kind_has_its_collective_backend():
    assert [device.collective_backend(kind) for kind in ("cpu", "cuda", "npu")] == ["gloo", "nccl", "hccl"]


def test_threads_on_the_cpu_are_exactly_as_many_as_asked_for():
    before = torch.get_num_threads()
    try:
        device.set_threads("cpu", 5)
        assert torch.get_num_threads() == 5
        device.set_threads("cuda", 1000)
        assert torch.get_num_threads() == len(os.sched_getaffinity(0))
    finally:
        torch.set_num_threads(before)


def test_peak_memory_grows_by_what_is_held_and_stays():
    code = (
        "from msmodelslim.device import peak_memory_mib\n"
        "before = peak_memory_mib('cpu')\n"
        "held = bytearray(b'x') * (64 << 20)\n"
        "del held\n"
        "print(peak_memory_mib('cpu') - before)"
    )
    grown = float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
    assert 60 < grown < 80


def test_the_cpu_needs_no_setting_up():
    device.set_current("cpu", 1)
    device.empty_cache("cpu")


def test_importing_device_does_not_import_torch():
    code = "import sys, msmodelslim.device; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_device_answers():
    device.check_present("cuda", (0,))
    device.set_current("cuda", 0)
    before = device.peak_memory_mib("cuda")
    held = torch.ones(64 << 18, device=device.torch_device("cuda", 0))
    assert device.peak_memory_mib("cuda") >= before + 64
    del held
    device.empty_cache("cuda")
    with pytest.raises(EnvError, match=r"cuda:99 is not on this machine; it has cuda:0"):
        device.check_present("cuda", (99,))
