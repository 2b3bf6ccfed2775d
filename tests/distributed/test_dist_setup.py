import os
import socket

import pytest
import torch
import torch.distributed as dist

from msmodelslim.distributed import find_free_port, is_rank_zero, process_group, setup_distributed
from msmodelslim.errors import EnvError, SchemaValidateError


def test_the_first_free_port_is_found_above_a_taken_one():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = find_free_port(port, 50)
        assert port < found < port + 50
        with pytest.raises(EnvError, match=f"no free port from {port} to {port}; stop what uses them"):
            find_free_port(port, 1)


@pytest.mark.parametrize("port", [1023, 65536, -1])
def test_a_port_outside_the_free_range_is_refused(port):
    with pytest.raises(SchemaValidateError, match=f"start_port is {port}; give 1024 to 65535"):
        find_free_port(port)


def test_one_rank_joins_and_leaves_and_the_environment_is_as_before(monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "12345")
    before = dict(os.environ)
    assert is_rank_zero()
    with process_group(0, 1, "gloo", find_free_port(29700)):
        assert dist.get_world_size() == 1 and dist.get_backend() == "gloo"
        assert is_rank_zero()
        assert dict(os.environ) == before
        with pytest.raises(EnvError, match="this process is already in a process group"):
            setup_distributed(0, 1, "gloo", 29500)
    assert not dist.is_initialized() and dict(os.environ) == before


def test_where_to_meet_must_be_known(monkeypatch):
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with pytest.raises(EnvError, match="nothing says where the ranks meet; give master_port"):
        setup_distributed(0, 2, "gloo")


def test_a_rank_outside_its_world_is_refused():
    with pytest.raises(ValueError, match="rank is 2; give 0 to 1"):
        setup_distributed(2, 2, "gloo", 29500)


def rejoin(rank: int, port: int) -> list[float]:
    dist.destroy_process_group()
    os.environ.pop("MASTER_ADDR", None)
    sums = []
    for _ in range(2):  # a second stage meets at the port of the first
        with process_group(rank, 2, "gloo", port):
            own = torch.tensor([float(rank + 1)])
            dist.all_reduce(own)
            sums.append(own.item())
            dist.barrier()
    assert "MASTER_PORT" not in os.environ and "MASTER_ADDR" not in os.environ
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # what the fixture leaves
    return sums


def zero(rank: int) -> bool:
    return is_rank_zero()


def test_two_ranks_meet_twice_at_one_port(run_ranks):
    assert run_ranks(2, rejoin, find_free_port(29800)) == [[3.0, 3.0]] * 2
    assert run_ranks(2, zero) == [True, False]
