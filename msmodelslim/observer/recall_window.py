"""The shortest range that keeps a given share of the values, per row (`RecallWindowObserver`).

Each update sorts a row and slides a window over it that holds the share; over updates the union of the windows is kept.
So with one sample an update the result does not depend on order or on how samples are dealt to ranks.

Letters: H rows (heads), N values of a row.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from msmodelslim.distributed.dist_ops import sync_base_operation


def shortest_window(values_HN: Tensor, ratio: float) -> tuple[Tensor, Tensor]:
    """Ends of the shortest range that holds the share `ratio` of each row; of equally short ones the lowest.

    Args:
        values_HN: any float type, N above 0; a row with a NaN gives NaN.
        ratio: above 0 to 1; int(ratio·N) values are kept, at least one.

    Returns:
        Smallest and largest value kept, [H] each, in the type of the values.
    """
    count = values_HN.shape[1]
    kept = min(max(int(ratio * count), 1), count)
    sorted_HN = values_HN.sort(dim=1).values
    starts, ends = sorted_HN[:, : count - kept + 1], sorted_HN[:, kept - 1 :]
    # Infinity minus infinity is no length; such a window is chosen last.
    length = (ends - starts).nan_to_num_(torch.inf, torch.inf, torch.inf)
    at = length.min(dim=1, keepdim=True).indices
    poison = torch.where(values_HN.isnan().any(1), torch.nan, 0.0).to(values_HN.dtype)
    return starts.gather(1, at).squeeze(1) + poison, ends.gather(1, at).squeeze(1) + poison


class RecallWindowObserver:
    """Running union of the shortest windows of each update.

    Args:
        ratio: share of the values that a window keeps, above 0 to 1; 1 is plain min-max.

    Raises:
        ValueError: a ratio outside.
    """

    def __init__(self, ratio: float = 1.0) -> None:
        if not 0 < ratio <= 1:
            raise ValueError(f"ratio is {ratio}; it is the share of values to keep, so give above 0 to 1")
        self._ratio = ratio
        self._min_values: Tensor | None = None
        self._max_values: Tensor | None = None

    @torch.no_grad()
    def update(self, x: Tensor, sync: bool = False) -> None:
        """Take in one sample.

        Args:
            x: [H, N]; N may be 0.
            sync: reduce over the ranks at once. Every rank must call equally often then.

        Raises:
            ValueError: x is no matrix, or has another number of rows than before.
        """
        if x.dim() != 2:
            raise ValueError(f"a tensor of shape {tuple(x.shape)}; give rows of values, [rows, values]")
        if self._min_values is None or self._max_values is None:
            self._min_values = torch.full((len(x),), torch.inf, device=x.device)
            self._max_values = -self._min_values
        if len(x) != len(self._min_values):
            raise ValueError(f"{len(x)} rows after {len(self._min_values)}; use one observer a module")
        if x.shape[1]:
            low, high = shortest_window(x.detach().float(), self._ratio)
            self._min_values = torch.minimum(self._min_values, low)
            self._max_values = torch.maximum(self._max_values, high)
        if sync and dist.is_initialized():
            sync_base_operation(self._min_values, op="min")
            sync_base_operation(self._max_values, op="max")

    def get_min_max(self) -> tuple[Tensor, Tensor]:
        """Ends of the union of all windows, float32 [H] each.

        Raises:
            ValueError: nothing was seen, or a row held a NaN or kept an infinity.
        """
        if self._min_values is None or self._max_values is None:
            raise ValueError("no values were seen; calibrate with at least one sample")
        bad = (~(self._min_values.isfinite() & self._max_values.isfinite())).nonzero().flatten().tolist()
        if bad:
            raise ValueError(f"rows {bad[:10]} saw no values, a NaN, or an infinity that the window had to keep")
        return self._min_values, self._max_values

    def reset(self) -> None:
        """Forget everything."""
        self._min_values = self._max_values = None
