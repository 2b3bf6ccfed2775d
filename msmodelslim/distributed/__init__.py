"""Many ranks, one result: what ranks agree on, how they talk, how they are started and end as one job."""

from msmodelslim.distributed.dist_helper import DistHelper, StaleTopologyError
from msmodelslim.distributed.dist_ops import (
    ReduceOperation,
    sync_base_operation,
    sync_gather_tensor_lists,
    sync_gather_tensors,
)
from msmodelslim.distributed.dist_setup import find_free_port, is_rank_zero, process_group, setup_distributed
from msmodelslim.distributed.shard_tree import deal, shard_rank, visit_order
from msmodelslim.distributed.stat_agree import Stat, StatKind
from msmodelslim.distributed.stat_store import StatStore
from msmodelslim.distributed.task_scheduler import assign, run_tasks
from msmodelslim.distributed.wire import RankMismatchError

__all__ = [
    "DistHelper",
    "RankMismatchError",
    "ReduceOperation",
    "StaleTopologyError",
    "Stat",
    "StatKind",
    "StatStore",
    "assign",
    "deal",
    "find_free_port",
    "is_rank_zero",
    "process_group",
    "run_tasks",
    "setup_distributed",
    "shard_rank",
    "sync_base_operation",
    "sync_gather_tensor_lists",
    "sync_gather_tensors",
    "visit_order",
]
