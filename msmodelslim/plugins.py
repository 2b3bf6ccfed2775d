"""Other people's processors, models and savers, named on the command line: importing them runs their `@register`.

Installed packages join by themselves, through the entry-point group `msmodelslim.plugins` (see `registry`). This is for
a module or a file that is no package yet.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from msmodelslim.errors import UnsupportedError

_PREFIX = "msmodelslim_plugin_"  # so that a file called like an installed module does not replace it


def load_plugins(words: Sequence[str]) -> None:
    """Import each word once: the name of a module, or the path of a file that ends in ".py".

    Raises:
        UnsupportedError: no such module or file, or it cannot be imported; names the word.
    """
    for word in words:
        try:
            if word.endswith(".py"):
                _load_file(Path(word))
            else:
                importlib.import_module(word)
        except (ImportError, SyntaxError, ValueError) as error:
            raise UnsupportedError(
                f"plugin {word!r} cannot be imported: {type(error).__name__}: {error}",
                "give the name of a module that Python finds, or the path of a .py file",
            ) from error


def absolute(words: Sequence[str]) -> tuple[str, ...]:
    """The same plugins, files with their whole path, for processes that start elsewhere."""
    return tuple(str(Path(word).resolve()) if word.endswith(".py") else word for word in words)


def _load_file(path: Path) -> None:
    path = path.resolve()
    name = _PREFIX + path.stem
    known = sys.modules.get(name)
    if known is not None and known.__file__ == str(path):
        return
    if known is not None:
        raise ImportError(f"{known.__file__} has the same name; rename one of the files")
    if not path.is_file():
        raise ImportError(f"{path} does not exist")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, f"{path} ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
