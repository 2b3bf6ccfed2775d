"""Which modules every rank holds (shared) and which only some do (local_only, such as routed experts), by name.

A `DistHelper` is a snapshot that knows when it is stale: after the module tree changed, it raises instead of answering
from the old structure. Each query checks the path to the module it is asked about and a slot of the tree. A tree of up
to 2000 modules is one slot, checked by every query (some 0.1 ms per 1000 modules); a larger one takes as many queries
as it has slots, so that asking about each of n modules costs n, not n². What walks the whole tree (`shared_modules`,
`get_shared_modules_slice`, …) checks the whole of it.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import torch.distributed as dist
from torch import Tensor, nn

from msmodelslim.distributed import wire
from msmodelslim.distributed.dist_ops import sync_gather_tensors

_SLOT = 4096  # modules and children that one query looks at
_NAMED = 3  # names an error shows of each kind


class StaleTopologyError(RuntimeError):
    """A `DistHelper` was asked after the module tree changed; make a new one after the last change of structure."""


class DistHelper:
    """The module topology of a model over all ranks; every rank makes it at the same point, after structural changes.

    Without a process group every module is shared. The names travel only when ranks differ: a digest comes first.

    Args:
        model: the tree; its `named_modules` are compared.
        prefix: put before every name, as in `named_modules(prefix=...)`.
        group: the ranks that are compared; all by default.
    """

    def __init__(self, model: nn.Module, prefix: str = "", group: dist.ProcessGroup | None = None) -> None:
        self._model = model
        self._prefix = prefix
        self._group = group
        self._seen = {name: (id(module), type(module)) for name, module in model.named_modules(prefix=prefix)}
        self._objects = frozenset(one for one, _ in self._seen.values())
        self._slots = _slots(model)
        self._queries = 0
        self._local = frozenset(self._seen)
        self._holders = self._gather_names(sorted(self._seen))
        self._shared = self._local.intersection(*self._holders.values())
        self._all = self._local.union(*self._holders.values())

    def is_local(self, name: str) -> bool:
        """Whether this rank holds the module."""
        self._check(name)
        return name in self._local

    def is_shared(self, name: str) -> bool:
        """Whether every rank holds the module; the same answer on every rank."""
        self._check(name)
        return name in self._shared

    def is_local_only(self, name: str) -> bool:
        """Whether this rank holds the module and some rank does not."""
        self._check(name)
        return name in self._local and name not in self._shared

    def is_all(self, name: str) -> bool:
        """Whether any rank holds the module (the union)."""
        self._check(name)
        return name in self._all

    def require_shared(self, name: str) -> None:
        """Raise at once where a collective about `name` would hang.

        Raises:
            ValueError: some rank does not hold the module; names the ranks that do.
            StaleTopologyError: the module tree changed.
        """
        if self.is_shared(name):
            return
        if name not in self._all:
            raise ValueError(
                f"{name!r} is not a module of this DistHelper (prefix {self._prefix!r}); write its full name"
            )
        holders = [rank for rank, names in self._holders.items() if name in names]
        raise ValueError(
            f"{name!r} is local_only: rank{'s' if len(holders) > 1 else ''} {', '.join(map(str, holders))} of "
            f"{len(self._holders)} hold it, so a collective about it would hang; synchronize only where is_shared"
        )

    def shared_modules(self) -> Iterator[nn.Module]:
        """The shared modules, sorted by name."""
        return self._resolve(self._shared)

    def local_modules(self) -> Iterator[nn.Module]:
        """The modules of this rank, sorted by name."""
        return self._resolve(self._local)

    def local_only_modules(self) -> Iterator[nn.Module]:
        """The modules of this rank that some rank lacks, sorted by name."""
        return self._resolve(self._local - self._shared)

    def all_modules(self) -> Iterator[nn.Module]:
        """Of the modules that any rank holds (see `is_all`), those that exist here, sorted by name."""
        return self._resolve(self._all & self._local)

    def get_shared_modules_slice(self, prefix: str = "") -> list[str]:
        """This rank's share of the sorted shared names, each on exactly one rank; `prefix` is put before the names."""
        self._check_all()
        place, size = self._place()
        names = sorted(self._shared)[place::size]
        return [".".join(part for part in (prefix, name) if part) for name in names]

    def get_rank(self) -> int:
        """This process's rank among all; 0 without a process group."""
        return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0

    @staticmethod
    def gather_variable_shapes(tensor: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
        """Every rank's tensor in rank order, each with its own shape; see `sync_gather_tensors`."""
        return sync_gather_tensors(tensor, variable_shapes=True, group=group)

    def _gather_names(self, names: list[str]) -> dict[int, frozenset[str]]:
        """Global rank → names; one small collective when all agree, one more when not."""
        where = wire.members(self._group, "DistHelper")
        if where is None:
            return {self.get_rank(): self._local}
        digest = hashlib.sha256("\n".join(names).encode()).hexdigest()
        digests = wire.exchange(where, "DistHelper", {"digest": digest, "names": len(names)})
        if all(one["digest"] == digest for one in digests):
            return dict.fromkeys(where.ranks, self._local)
        tables = wire.exchange(where, "DistHelper names", {"names": names})
        return {rank: frozenset(table["names"]) for rank, table in zip(where.ranks, tables, strict=True)}

    def _place(self) -> tuple[int, int]:
        where = wire.members(self._group, "DistHelper.get_shared_modules_slice")
        return (0, 1) if where is None else (where.rank, where.size)

    def _resolve(self, names: frozenset[str]) -> Iterator[nn.Module]:
        self._check_all()
        return iter([self._module(name) for name in sorted(names)])

    def _module(self, name: str) -> nn.Module:
        inner = name.removeprefix(self._prefix).removeprefix(".") if self._prefix else name
        return self._model.get_submodule(inner)

    def _check_all(self) -> None:
        if any(slot.changed() for slot in self._slots):
            self._raise_stale()

    def _check(self, name: str) -> None:
        """The path to `name` and the next slot of the tree are as they were."""
        slot = self._slots[self._queries % len(self._slots)]
        self._queries += 1
        if slot.changed() or not self._path_holds(name):
            self._raise_stale()

    def _path_holds(self, name: str) -> bool:
        """Whether each module on the way to `name` is the one it was, or is missing as it was."""
        module: nn.Module | None = self._model
        inner = name.removeprefix(self._prefix).removeprefix(".") if self._prefix else name
        path = self._prefix
        for part in inner.split(".") if inner else []:
            path = f"{path}.{part}" if path else part
            module = None if module is None else module._modules.get(part)
            if module is None:
                return path not in self._seen
            # A module that is reachable under two names is listed under the first only.
            if self._seen.get(path) != (id(module), type(module)) and (
                path in self._seen or id(module) not in self._objects
            ):
                return False
        return True

    def _raise_stale(self) -> None:
        now = {name: (id(module), type(module)) for name, module in self._model.named_modules(prefix=self._prefix)}
        changes = {
            "added": sorted(now.keys() - self._seen.keys()),
            "removed": sorted(self._seen.keys() - now.keys()),
            "replaced": sorted(name for name in now.keys() & self._seen.keys() if now[name] != self._seen[name]),
        }
        told = [f"{word} {_some(names)}" for word, names in changes.items() if names]
        raise StaleTopologyError(
            f"the module tree below {self._prefix or 'the root'!r} changed after this DistHelper was made: "
            f"{'; '.join(told) or 'modules were moved'}; make the DistHelper after the last change of structure"
        )


@dataclass(frozen=True)
class _Slot:
    """The children's dicts of some modules and what they held; `parents` is empty where a query has nothing to do."""

    parents: list[dict[str, nn.Module | None]]
    then: tuple[list, list, list]

    def changed(self) -> bool:
        return _fingerprint(self.parents) != self.then


def _fingerprint(parents: list[dict[str, nn.Module | None]]) -> tuple[list, list, list]:
    """Names, identities and types of all children: types too, as a new object may lie where a freed one was."""
    children = [*chain.from_iterable(one.values() for one in parents)]
    return [*chain.from_iterable(parents)], [*map(id, children)], [*map(type, children)]


def _slots(model: nn.Module) -> list[_Slot]:
    """The tree in pieces that cost a query about the same; a module with many children counts for several."""
    slots: list[_Slot] = []
    batch: list[dict[str, nn.Module | None]] = []
    weight = 0
    # The dicts themselves, not copies of them: a replaced module must not be kept alive here.
    for children in (module._modules for module in model.modules()):
        if weight + len(children) + 1 > _SLOT and batch:
            slots += [_Slot(batch, _fingerprint(batch)), *[_NOTHING] * (weight // _SLOT)]
            batch, weight = [], 0
        batch.append(children)
        weight += len(children) + 1
    return [*slots, _Slot(batch, _fingerprint(batch)), *[_NOTHING] * (weight // _SLOT)]


_NOTHING = _Slot([], _fingerprint([]))


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(repr(name) for name in names[:_NAMED]) + more
