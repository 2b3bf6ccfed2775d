"""Plugins for some tests only: other tests go through everything that is registered."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from msmodelslim import registry


@contextmanager
def own_registry() -> Iterator[None]:
    """What is registered or loaded as a plugin within is forgotten afterwards."""
    for kind in registry._FOLDERS:
        registry.names(kind)  # imports all that belongs to the package
    classes, modules = dict(registry._CLASSES), set(sys.modules)
    try:
        yield
    finally:
        registry._CLASSES.clear()
        registry._CLASSES.update(classes)
        for name in [one for one in sys.modules if one not in modules and one.startswith("msmodelslim_plugin_")]:
            del sys.modules[name]
