"""A checkpoint's own Python files are copied into one cache of transformers before they are imported.

Several processes may do that at once, ranks that torchrun started for instance, and then one reads what another is
writing. So they take turns.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import dynamic_module_utils

_LOCK = "msmodelslim.lock"


@contextmanager
def one_at_a_time(allowed: bool) -> Iterator[None]:
    """Hold the cache for this process while transformers imports code of a checkpoint.

    Args:
        allowed: whether such code may run; without it nothing is locked.
    """
    if not allowed or sys.platform == "win32":
        yield
        return
    import fcntl

    cache = Path(dynamic_module_utils.HF_MODULES_CACHE)
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / _LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # given back when the file is closed, also by a process that is killed
        yield
