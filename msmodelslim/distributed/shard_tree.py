"""The order in which a float sum over samples is added up: the same tree, whatever the number of ranks.

A node (level, j) stands for all samples i with i mod 2^level = j. The leaves are the G = 2^k shards, level k; in a
leaf, samples are added in increasing i. A node is its lower child plus its upper child: (l, j) = (l + 1, j) + (l + 1,
j + 2^l). A node without any sample is skipped rather than added as zero.

Source: the summation tree of a pairwise sum, with the residues of the sample number as leaves.
"""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor

Node = tuple[int, int]
Parts = dict[Node, Tensor]

SAMPLE = -1  # the level of a single sample, for a shard whose samples lie on several ranks


def shard_rank(sample_id: int, world_size: int, shards: int = 8) -> int:
    """The rank that forwards a sample so that every shard lies on one rank: (i mod G) mod R.

    Ranks from G upward get no sample. Any other way of dealing gives the same sums with more memory and traffic.
    """
    return sample_id % shards % world_size


def visit_order(sample_ids: Sequence[int], shards: int = 8) -> list[int]:
    """The order of forwarding that keeps the fewest partial sums: by bit-reversed shard, then by number."""
    bits = _levels(shards)
    return sorted(sample_ids, key=lambda one: (_reversed_bits(one % shards, bits), one))


def deal(sample_count: int, world_size: int, shards: int = 8) -> list[list[int]]:
    """Each rank's samples in the order to forward them, so that sums need the least memory and traffic.

    The samples in `visit_order` are cut into as equal runs as whole shards allow: a rank then holds whole subtrees,
    at most 2 log2(G) partial sums. While there are no more samples than shards, runs differ by one sample at most.

    Returns:
        One list a rank, empty for ranks beyond the number of shards or samples.
    """
    order = visit_order(range(sample_count), shards)
    cuts = [at for at in range(1, sample_count) if order[at] % shards != order[at - 1] % shards]
    cuts = [0, *cuts, sample_count]
    bounds = [min(cuts, key=lambda cut: abs(cut - sample_count * rank / world_size)) for rank in range(world_size + 1)]
    return [order[start:stop] for start, stop in pairwise(bounds)]


class ShardTree:
    """The part of the tree that lies on this rank.

    Args:
        sample_ids: global numbers of this rank's samples in the order they are forwarded, increasing within a shard.
        sample_count: number of samples over all ranks.
        shards: G, a power of two.

    Raises:
        ValueError: `shards` is no power of two, a number repeats, decreases within its shard or lies outside the count.
    """

    def __init__(self, sample_ids: Sequence[int], sample_count: int, shards: int) -> None:
        self.levels = _levels(shards)
        self.shards = shards
        self.sample_count = sample_count
        self.place = {sample: at for at, sample in enumerate(sample_ids)}
        if len(self.place) < len(sample_ids):
            raise ValueError(f"a sample repeats in {list(sample_ids)[:20]}; deal each sample once")
        latest = dict.fromkeys(range(shards), -1)
        for sample in sample_ids:
            if not 0 <= sample < sample_count:
                raise ValueError(f"sample {sample} lies outside 0 to {sample_count - 1}; give global numbers")
            if sample < latest[sample % shards]:
                raise ValueError(f"sample {sample} comes after {latest[sample % shards]}; increase within a shard")
            latest[sample % shards] = sample
        # Of each node that lies wholly here: the place of its last sample, -1 when it has none.
        self._complete_after: dict[Node, int] = {}
        for shard in range(shards):
            own = [at for sample, at in self.place.items() if sample % shards == shard]
            if len(own) == len(range(shard, sample_count, shards)):
                self._complete_after[self.levels, shard] = max(own, default=-1)
        for level in reversed(range(self.levels)):
            for j in range(1 << level):
                children = [self._complete_after.get(child) for child in _children((level, j))]
                if None not in children:
                    self._complete_after[level, j] = max(at for at in children if at is not None)

    def add(self, parts: Parts, sample: int, partial: Tensor) -> None:
        """Put one sample's partial, which `parts` then owns, to its shard."""
        leaf = (self.levels, sample % self.shards)
        if leaf not in self._complete_after:
            parts[SAMPLE, sample] = partial
        elif leaf in parts:
            parts[leaf].add_(partial)
        else:
            parts[leaf] = partial

    def settle(self, parts: Parts, before: int | None = None) -> None:
        """Merge subtrees whose samples all came before this place of the visiting order; by default all that can be."""
        for level in reversed(range(self.levels)):
            for j in range(1 << level):
                done = self._complete_after.get((level, j))
                if done is not None and (before is None or done < before):
                    _merge(parts, (level, j))


def tree_sum(parts: Parts, shards: int) -> Tensor | None:
    """The sum of all parts by the tree, wherever they came from; uses up `parts`. None when there are none."""
    levels = _levels(shards)
    for node in sorted(node for node in parts if node[0] == SAMPLE):
        leaf, partial = (levels, node[1] % shards), parts.pop(node)
        parts[leaf] = parts[leaf].add_(partial) if leaf in parts else partial
    for level in reversed(range(levels)):
        for j in range(1 << level):
            _merge(parts, (level, j))
    return parts.pop((0, 0), None)


def _merge(parts: Parts, node: Node) -> None:
    lower, upper = _children(node)
    if lower in parts and upper in parts:
        parts[node] = parts.pop(lower).add_(parts.pop(upper))
    elif lower in parts or upper in parts:
        parts[node] = parts.pop(lower if lower in parts else upper)


def _children(node: Node) -> tuple[Node, Node]:
    level, j = node
    return (level + 1, j), (level + 1, j + (1 << level))


def _levels(shards: int) -> int:
    if shards < 1 or shards & (shards - 1):
        raise ValueError(f"shards is {shards}; give a power of two")
    return shards.bit_length() - 1


def _reversed_bits(value: int, bits: int) -> int:
    return int(f"{value:0{bits}b}"[::-1], 2) if bits else 0
