"""What a person sees of a run without a terminal: a line a layer, and a line now and then while one goes on."""

import logging
import threading
import time
from collections.abc import Callable

import pytest

from msmodelslim.runner import progress
from msmodelslim.runner.progress import LayerProgress


@pytest.fixture
def quick_heart(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(progress, "_HEARTBEAT_S", 0.02)
    caplog.set_level(logging.INFO, "msmodelslim")


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def until(reached: Callable[[], bool]) -> None:
    """Wait for what another thread does; a phase that never speaks fails here."""
    end = time.monotonic() + 20
    while not reached():
        assert time.monotonic() < end, "nothing was said"
        time.sleep(0.005)


@pytest.mark.usefixtures("quick_heart")
def test_a_long_phase_that_never_calls_back_is_reported_again_and_again(caplog: pytest.LogCaptureFixture) -> None:
    with LayerProgress("quantize", 3) as shown:
        shown.phase("model.layers.0", "gptq")
        until(lambda: len(said(caplog)) >= 2)
    assert all(line.startswith("quantize 0/3 model.layers.0: gptq, 0.") for line in said(caplog))


@pytest.mark.usefixtures("quick_heart")
def test_a_long_forward_says_which_sample_it_is_at(caplog: pytest.LogCaptureFixture) -> None:
    with LayerProgress("quantize", 3) as shown:
        shown.phase("model.layers.0", "forward")
        shown.sample(5, 128)
        until(lambda: any("model.layers.0: sample 5/128" in line for line in said(caplog)))


def test_the_time_left_is_that_of_the_layers_so_far(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "msmodelslim")
    with LayerProgress("quantize", 3) as shown:
        shown._start -= 8  # two layers in 8 s
        shown.phase("model.layers.1", "save")
        shown._done = 1
        shown.layer_done()
    assert said(caplog) == ["quantize 2/3 model.layers.1: done, 8.0 s, about 4 s left"]


@pytest.mark.usefixtures("quick_heart")
def test_nothing_speaks_after_the_end_nor_on_other_ranks(caplog: pytest.LogCaptureFixture) -> None:
    with LayerProgress("quantize", 3, shown=False) as hidden:
        hidden.phase("model.layers.0", "gptq")
        hidden.layer_done()
        time.sleep(0.1)
    assert said(caplog) == []
    with LayerProgress("quantize", 3):
        beats = [thread for thread in threading.enumerate() if thread.name == "heartbeat"]
        assert len(beats) == 1
    beats[0].join(timeout=20)
    assert not beats[0].is_alive()
