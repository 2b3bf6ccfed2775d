"""What all that look at modules during a forward have in common: hooks that are taken away in the end."""

from torch.utils.hooks import RemovableHandle


class Watcher:
    """Keeps the handles of its hooks."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    def close(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
