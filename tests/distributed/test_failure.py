import json

from msmodelslim.distributed.failure import Catch, Failure, RankFailedError, failure_of, first_of
from msmodelslim.distributed.watchdog import Place
from msmodelslim.errors import InvalidModelError, ModelslimError, UnsupportedError


class TwoPartsError(ModelslimError):
    """An error of a plugin, whose constructor is its own."""

    def __init__(self, one: str, two: int) -> None:
        super().__init__(f"{one} {two}", "choose another")


def caught(error: Exception) -> Failure:
    with Catch() as catch:
        raise error
    failure = failure_of(catch.error, 2, Place("layer 1", "", "saving"))
    return Failure.from_plain(json.loads(json.dumps(failure.plain())))


def test_an_error_keeps_its_class_message_and_action_and_gains_its_place():
    error = caught(InvalidModelError("w is short", "download it again")).error()
    assert type(error) is InvalidModelError
    assert str(error) == "w is short (rank 2, layer 1, saving); download it again"
    plugin = caught(TwoPartsError("a", 3)).error()
    assert type(plugin) is TwoPartsError and str(plugin) == "a 3 (rank 2, layer 1, saving); choose another"


def test_another_exception_is_told_with_its_line_and_keeps_its_traceback():
    error = caught(KeyError("x")).error()
    assert isinstance(error, RankFailedError) and error.rank == 2
    assert str(error).startswith("rank 2 failed at layer 1, saving: KeyError: 'x' (raised at test_failure.py:")
    assert "in caught" in error.worker_traceback


def test_a_class_inside_a_function_is_told_as_another_exception():
    class LocalError(ModelslimError):
        pass

    assert "LocalError: no" in str(caught(LocalError("no")).error())


def test_the_cause_is_the_earliest_that_is_no_echo_of_a_lost_rank():
    def failure(at_s: float, lost_peer: bool) -> Failure:
        return Failure(0, Place(), "E", "", "m", "", "", lost_peer, at_s, "")

    echo, cause, late = failure(1, True), failure(2, False), failure(3, False)
    assert first_of([late, echo, cause]) is cause
    assert first_of([failure(4, True), echo]) is echo
    assert first_of([]) is None


def test_an_error_after_a_lost_rank_is_an_echo_too():
    assert not caught(UnsupportedError("x")).lost_peer
