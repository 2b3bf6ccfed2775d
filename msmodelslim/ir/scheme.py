"""What a tensor is rounded to: number type, the block that shares a scale, symmetry. Plain, hashable, printable."""

from dataclasses import dataclass
from enum import StrEnum


class QDType(StrEnum):
    """Number type of the codes; values are the words of recipes."""

    FLOAT = "float"
    INT8 = "int8"
    INT4 = "int4"
    FP8_E4M3 = "fp8_e4m3"
    MXFP8 = "mxfp8"
    MXFP4 = "mxfp4"


class QScope(StrEnum):
    """Which elements share a scale; values are the words of recipes."""

    PER_TENSOR = "per_tensor"
    PER_CHANNEL = "per_channel"
    PER_GROUP = "per_group"
    PER_BLOCK = "per_block"
    PER_TOKEN = "per_token"
    PD_MIX = "pd_mix"
    DUAL_SCALE = "dual_scale"


BITS = {QDType.FLOAT: 16, QDType.INT8: 8, QDType.INT4: 4, QDType.FP8_E4M3: 8, QDType.MXFP8: 8, QDType.MXFP4: 4}
MX_BLOCK = 32  # elements that share an exponent, OCP MX v1.0


@dataclass(frozen=True)
class QScheme:
    """How one tensor is quantized.

    Args:
        dtype: number type of the codes.
        scope: which elements share a scale.
        symmetric: no offset: zero is code zero.
        group_size: columns that share a scale; only for `per_group`, else 0.
        block: rows and columns of a tile that shares a scale; only fp8 `per_block`, else (0, 0).
        two_level: int4 groups with integer scales inside int8 channels (QoQ, arXiv:2405.04532); only int4 `per_group`.
        dual_block: columns that share a float32 scale outside their MX blocks; only mxfp4 `dual_scale`, else 0.
    """

    dtype: QDType = QDType.FLOAT
    scope: QScope = QScope.PER_TENSOR
    symmetric: bool = True
    group_size: int = 0
    block: tuple[int, int] = (0, 0)
    two_level: bool = False
    dual_block: int = 0

    @property
    def is_float(self) -> bool:
        return self.dtype is QDType.FLOAT

    @property
    def is_mx(self) -> bool:
        return self.dtype in (QDType.MXFP8, QDType.MXFP4)

    @property
    def is_static(self) -> bool:
        """True for an activation scheme whose scale is calibrated and saved."""
        return not self.is_float and self.scope in (QScope.PER_TENSOR, QScope.PD_MIX)

    def __str__(self) -> str:
        if self.is_float:
            return "float"
        block = f"_{self.block[0]}x{self.block[1]}" if any(self.block) else ""
        size = f"_{self.group_size or self.dual_block}" if self.group_size or self.dual_block else block
        level = "_two_level" if self.two_level else ""
        return f"{self.dtype} {self.scope}{size}{level} {'sym' if self.symmetric else 'asym'}"


FLOAT = QScheme()


@dataclass(frozen=True)
class LinearScheme:
    """How a linear is quantized: its weight, and its input at run time."""

    weight: QScheme
    act: QScheme = FLOAT

    def __str__(self) -> str:
        return f"weight {self.weight}, act {self.act}"
