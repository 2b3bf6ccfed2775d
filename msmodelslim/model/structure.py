"""What a decoder layer is made of, described once a family and read by every algorithm.

All names are relative to the layer ("self_attn.q_proj"), so one description holds for every layer of its kind.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class LayerStructure:
    """The parts of one decoder layer.

    Args:
        norm_linears: norm → the linears that read its output, all of them.
        ov: (v, o): the value projection and the output projection that mixes the heads' values.
        up_down: (up, down): a linear whose output reaches `down` through products only.
        linear_linear: (first, second): `second` reads the output of `first` and nothing else does.
        unfused: linears that read one tensor whose producer cannot be scaled, and which is none of the above. Smoothing
            them needs a multiplication at run time, for which no format has a reader.
        fused: linears that engines fuse into one: same scheme, same activation scale.
        row_parallel: linears that engines split along their input; every other one along its output.
        heads: query heads.
        kv_heads: key-value heads.
        head_width: channels of one head's values.
        value_rows: (start, stop) of the rows of the value projection that make values, in the order of the key-value
            heads; empty where all of them do. A linear that makes queries, keys and values has one such range, one
            that interleaves heads has one a head.
    """

    norm_linears: tuple[tuple[str, tuple[str, ...]], ...] = ()
    ov: tuple[tuple[str, str], ...] = ()
    up_down: tuple[tuple[str, str], ...] = ()
    linear_linear: tuple[tuple[str, str], ...] = ()
    unfused: tuple[tuple[str, ...], ...] = ()
    fused: tuple[tuple[str, ...], ...] = ()
    row_parallel: frozenset[str] = field(default_factory=frozenset)
    heads: int = 0
    kv_heads: int = 0
    head_width: int = 0
    value_rows: tuple[tuple[int, int], ...] = ()

    def input_groups(self, layer_name: str, names: Sequence[str]) -> list[list[str]]:
        """Full names of linears of the layer, those together that read one tensor; each is in exactly one group."""
        groups = []
        for linears in (*(linears for _, linears in self.norm_linears), *self.unfused):
            full = [f"{layer_name}.{linear}" for linear in linears]
            groups.append([name for name in full if name in names])
        grouped = {name for group in groups for name in group}
        return [group for group in groups if group] + [[name] for name in names if name not in grouped]
