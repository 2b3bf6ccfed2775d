"""One thread, no network, and the tiny checkpoints of `tests/fixtures.py` as read-only fixtures of the session."""

import os

# Before torch and transformers are imported: bfloat16 results change with the number of threads.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from pathlib import Path

import pytest
import torch

from tests import fixtures
from tests.run_ranks import run_ranks  # noqa: F401 - a fixture

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def t_dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read-only; a test that changes files writes its own with `fixtures.t_dense(tmp_path)`."""
    return fixtures.t_dense(tmp_path_factory.mktemp("t_dense"))


@pytest.fixture(scope="session")
def t_bias(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fixtures.t_bias(tmp_path_factory.mktemp("t_bias"))


@pytest.fixture(scope="session")
def t_tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fixtures.t_tied(tmp_path_factory.mktemp("t_tied"))


@pytest.fixture(scope="session")
def t_mtp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fixtures.t_mtp(tmp_path_factory.mktemp("t_mtp"))


@pytest.fixture(scope="session")
def _t_fp8_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return fixtures.t_fp8(tmp_path_factory.mktemp("t_fp8"), tmp_path_factory.mktemp("t_fp8_plain"))


@pytest.fixture(scope="session")
def t_fp8(_t_fp8_pair: tuple[Path, Path]) -> Path:
    return _t_fp8_pair[0]


@pytest.fixture(scope="session")
def t_fp8_plain(_t_fp8_pair: tuple[Path, Path]) -> Path:
    """What the weights of `t_fp8` mean, in bfloat16."""
    return _t_fp8_pair[1]
