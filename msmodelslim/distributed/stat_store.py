"""Calibration statistics that come out the same, bit for bit, on any number of ranks.

While samples flow, a `StatStore` only accumulates. Once a layer `agree` combines the ranks: one exchange of facts
over the sorted union of stream names, then flat buckets. Ranks without data contribute identities, so nothing hangs
and nothing is skewed. A stream is named after its module, with ":" and what is measured behind it where a module has
several.

* Extrema and integer counts are exact in any order.
* A float sum is not, so it follows a fixed tree over G virtual shards. Sample i belongs to shard i mod G; a shard's
  samples are added in increasing i; then level by level a_j + a_(j + stride) with strides G/2, G/4, …, 1. The tree
  knows nothing of ranks, so neither does the sum.
* Scalars, one a sample, come back in the order of the global sample numbers.

Memory of a sum: a rank keeps one partial for each subtree that it has not finished. With all samples in increasing
order those are G. In `visit_order`, shard by shard with bit-reversed shards, siblings finish one after the other and
log2(G) + 1 suffice, as the digits of a binary counter. A shard whose samples lie on several ranks (dealt i mod R with
R not a divisor of G) keeps one partial a sample and sends them all: exact, cheap for vectors, not for Gram matrices;
deal those by `deal`, which gives every rank whole subtrees in visiting order.

A large sum that one rank alone goes on with is best sent to that rank alone, its owner: the partials travel once, and
only the owner allocates the total.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor

from msmodelslim.distributed import watchdog, wire
from msmodelslim.distributed.dist_helper import DistHelper
from msmodelslim.distributed.shard_tree import ShardTree
from msmodelslim.distributed.stat_agree import Stat, StatKind, Stream, combine


class StatStore:
    """Statistics of one rank, and how they become those of all ranks.

    Args:
        sample_ids: global numbers of the samples this rank forwards, in that order; increasing within a shard.
        sample_count: number of samples over all ranks; the numbers are 0 to sample_count - 1.
        shards: G, a power of two, the same on every rank and for every number of ranks.
        device: where statistics are kept and returned.
        group: the ranks that agree; all by default.
    """

    def __init__(
        self,
        sample_ids: Sequence[int],
        sample_count: int,
        *,
        shards: int = 8,
        device: torch.device | str = "cpu",
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self._tree = ShardTree(sample_ids, sample_count, shards)
        self._device = torch.device(device)
        self._group = group
        self._streams: dict[str, Stream] = {}

    def declare(self, name: str, kind: StatKind) -> None:
        """Announce a stream, so that `agree` lists it even when no sample reaches it."""
        stream = self._streams.setdefault(name, Stream(kind))
        if stream.kind is not kind:
            raise ValueError(f"stream {name!r} measures {stream.kind}, not {kind}; give each statistic its own name")

    def add_min(self, name: str, sample_id: int, values: Tensor) -> None:
        """Lower the running minimum. Any shape; float16 and bfloat16 become float32, integers int64; NaN wins."""
        self._add_extremum(name, StatKind.MIN, sample_id, values)

    def add_max(self, name: str, sample_id: int, values: Tensor) -> None:
        """Raise the running maximum; types as in `add_min`."""
        self._add_extremum(name, StatKind.MAX, sample_id, values)

    def add_count(self, name: str, sample_id: int, counts: Tensor) -> None:
        """Add integers or bools, of any shape; kept in int64.

        Raises:
            TypeError: `counts` are floats.
        """
        if counts.is_floating_point() or counts.is_complex():
            raise TypeError(f"stream {name!r}: counts are {counts.dtype}; give integers, or use add_sum")
        stream = self._enter(name, StatKind.COUNT, sample_id, torch.int64, counts.shape)
        own = counts.detach().to(self._device, torch.int64, copy=True)
        stream.value = own if stream.value is None else stream.value.add_(own)

    def add_sum(self, name: str, sample_id: int, values: Tensor) -> None:
        """Add one sample's float partial, of any shape; float16 and bfloat16 become float32. See the module's text.

        Raises:
            TypeError: `values` are not floats.
        """
        if not values.is_floating_point():
            raise TypeError(f"stream {name!r}: values are {values.dtype}; give floats, or use add_count")
        before = self._streams[name].latest if name in self._streams else None
        stream = self._enter(name, StatKind.SUM, sample_id, _kept_as(values.dtype), values.shape)
        own = values.detach().to(self._device, _kept_as(values.dtype), copy=True)
        if before == sample_id and stream.pending is not None:
            stream.pending.add_(own)
            return
        self._put_away(stream, before)
        if before is not None and before % self._tree.shards != sample_id % self._tree.shards:
            self._tree.settle(stream.parts, before=self._tree.place[sample_id])
        stream.pending = own

    def add_scalar(self, name: str, sample_id: int, value: float) -> None:
        """Note one number a sample, kept in float64.

        Raises:
            ValueError: the sample has one already.
        """
        stream = self._enter(name, StatKind.SCALAR, sample_id, torch.float64, torch.Size())
        if sample_id in stream.scalars:
            raise ValueError(f"stream {name!r}: sample {sample_id} has a scalar already; give one a sample")
        stream.scalars[sample_id] = float(value)

    def agree(
        self,
        shared: Callable[[str], bool] | DistHelper | None = None,
        *,
        owners: Mapping[str, int] | None = None,
    ) -> Mapping[str, Stat]:
        """Combine what all ranks have added since the last call, and begin anew. Every rank calls it, once a layer.

        Args:
            shared: which modules every rank holds; streams of other modules stay as this rank has them. A stream's
                module is its name up to the first ":". None: all are shared.
            owners: float sum, or module of float sums → the rank that alone receives it, by its place in the group as
                `assign` gives it; the same on every rank. Sums without an owner go to every rank; what is said of
                streams that are not shared is ignored.

        Returns:
            Stream name → statistic, sorted by name. Shared streams are equal on every rank, also those this rank
            never saw; but the value of a sum that has an owner is None on all other ranks.

        Raises:
            RankMismatchError: a stream's kind, type, shape or owner differs, it is shared on some ranks only, or the
                samples were not dealt once each; the same on every rank, naming stream and ranks.
            ValueError: a stream is named after no module of the `DistHelper`; an owner is none of the ranks, or is
                given for what is no float sum.
        """
        call = "StatStore.agree"
        where = wire.members(self._group, call)
        streams, self._streams = dict(sorted(self._streams.items())), {}
        for stream in streams.values():
            self._put_away(stream, stream.latest)
            self._tree.settle(stream.parts)
        is_shared = {name: _is_shared(name, shared) for name in streams}
        local = {name: stream for name, stream in streams.items() if not is_shared[name]}
        own = {name: stream for name, stream in streams.items() if is_shared[name]}
        found = combine(None, call, local, self._tree, self._device)
        with watchdog.waiting(f"{call} at {wire.call_site()}"):
            found |= combine(where, call, own, self._tree, self._device, sorted(local), owners)
        return MappingProxyType(dict(sorted(found.items())))

    def _enter(self, name: str, kind: StatKind, sample: int, dtype: torch.dtype, shape: torch.Size) -> Stream:
        """The stream, after checking that `sample` may be added to it now."""
        self.declare(name, kind)
        stream = self._streams[name]
        if sample not in self._tree.place:
            raise ValueError(f"stream {name!r}: sample {sample} is not one of this rank's; give its global number")
        if stream.latest is not None and self._tree.place[sample] < self._tree.place[stream.latest]:
            raise ValueError(
                f"stream {name!r}: sample {sample} after sample {stream.latest}; add in the order of sample_ids"
            )
        held = stream.form or (dtype, shape)
        if held != (dtype, shape):
            raise ValueError(
                f"stream {name!r}: sample {sample} has {dtype} {tuple(shape)}, earlier ones {held[0]} {tuple(held[1])}"
            )
        stream.form = held
        stream.samples += sample != stream.latest
        stream.latest = sample
        return stream

    def _add_extremum(self, name: str, kind: StatKind, sample: int, values: Tensor) -> None:
        dtype = _kept_as(values.dtype)
        stream = self._enter(name, kind, sample, dtype, values.shape)
        own = values.detach().to(self._device, dtype)
        # Adding 0 makes -0.0 a 0.0: which of the two a float extremum keeps depends on the order.
        own = own + 0
        if stream.value is None:
            stream.value = own
        else:
            combine = torch.minimum if kind is StatKind.MIN else torch.maximum
            combine(stream.value, own, out=stream.value)

    def _put_away(self, stream: Stream, sample: int | None) -> None:
        if stream.pending is not None and sample is not None:
            self._tree.add(stream.parts, sample, stream.pending)
            stream.pending = None


def _kept_as(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_floating_point:
        return torch.float64 if dtype == torch.float64 else torch.float32
    return torch.int64


def _is_shared(name: str, shared: Callable[[str], bool] | DistHelper | None) -> bool:
    module = name.partition(":")[0]
    if shared is None:
        return True
    if isinstance(shared, DistHelper):
        if not shared.is_all(module):
            raise ValueError(
                f"stream {name!r}: {module!r} is not a module; write the module's full name, then ':' and a word"
            )
        return shared.is_shared(module)
    return shared(module)
