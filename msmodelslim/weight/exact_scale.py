"""The scale that loses least: the global optimum of Σ h·(w − s·q(s))² over s, not an approximation of it.

For fixed codes q the best scale is A/B with A = Σ h·|w|·|q| and B = Σ h·q², and it leaves Σ h·w² − A²/B. As s falls,
|w|'s code rises from k − 1 to k exactly at s = |w|/(k − ½), so all code vectors that any s can give are met by walking
down the sorted thresholds. Running sums of the steps of A and B along the walk, and the largest A²/B, are the answer.

Most of the walk need not be taken. Whoever knows the error J of one scale knows that the optimum lies where clipping
alone costs at most J (a lower end for s) and where the weights that become zero cost at most J (an upper end).

Letters: N blocks that share a scale, E elements of a block, W thresholds of a block.
"""

import torch
from torch import Tensor

_LOWER_RATIOS = torch.linspace(0.2, 1, 33).tolist()  # of a scale that clips little: where the lower end is looked for
_UPPER_RATIOS = torch.linspace(4, 1.05, 24).tolist()
_SLACK = 1 + 1e-4  # on float32 sums, so that their rounding never cuts the optimum off


def exact_scale(
    weight_NE: Tensor, importance_NE: Tensor, below_N1: Tensor, above_N1: Tensor, low_N1: Tensor, high_N1: Tensor
) -> Tensor:
    """The best scale of each block between two ends.

    Args:
        weight_NE: float32.
        importance_NE: weight of each squared error, above 0; float32.
        below_N1, above_N1: how many codes lie below and above that of zero, float32: 8 and 7 for symmetric int4.
        low_N1, high_N1: ends of the walk, from `certain_ends` for the global optimum.

    Returns:
        float64 [N, 1]; 0 for a block whose codes are all 0 at its best.
    """
    size_NE = weight_NE.abs()
    cap_NE = torch.where(weight_NE < 0, below_N1, above_N1)
    first_NE, last_NE = (torch.minimum((size_NE / end).add_(0.5).floor_(), cap_NE) for end in (high_N1, low_N1))
    last_NE.nan_to_num_(0)  # zero over zero
    moment_NE = size_NE * importance_NE
    start_A = (moment_NE * first_NE).sum(1, keepdim=True, dtype=torch.float64)
    start_B = (importance_NE * first_NE.square()).sum(1, keepdim=True, dtype=torch.float64)
    # The elements with the most steps first, so that step t of all of them fills a front part of the columns.
    steps_NE, order_NE = (last_NE - first_NE).clamp_(min=0).sort(stable=True, dim=1, descending=True)
    size_NE, first_NE, moment_NE, importance_NE = (
        each.gather(1, order_NE) for each in (size_NE, first_NE, moment_NE, importance_NE.expand_as(size_NE))
    )
    thresholds, steps_A, steps_B = [], [], []
    for step in range(int(steps_NE.max())):
        taken_NE = steps_NE > step
        front = slice(int(taken_NE.sum(1).max()))
        taken_NE, code_NE = taken_NE[:, front], first_NE[:, front] + (step + 1)
        thresholds.append((size_NE[:, front] / (code_NE - 0.5)).mul_(taken_NE))
        steps_A.append(moment_NE[:, front] * taken_NE)
        steps_B.append((2 * code_NE - 1).mul_(importance_NE[:, front]).mul_(taken_NE))
    if not thresholds:
        return (start_A / start_B).nan_to_num_(0)
    walk_NW = descending_order(torch.cat(thresholds, 1))
    sums_A, sums_B = (
        torch.cat((start, torch.cat(steps, 1).gather(1, walk_NW)), 1).cumsum_(1)
        for start, steps in ((start_A, steps_A), (start_B, steps_B))
    )
    best_N1 = sums_A.square().div_(sums_B).nan_to_num_(0).argmax(1, keepdim=True)
    return (sums_A.gather(1, best_N1) / sums_B.gather(1, best_N1)).nan_to_num_(0)


def certain_ends(
    weight_NE: Tensor,
    importance_NE: Tensor,
    below_N1: Tensor,
    above_N1: Tensor,
    guess_N1: Tensor,
    error_N1: Tensor,
) -> tuple[Tensor, Tensor]:
    """Scales that the best one certainly lies between; the lower is 0 and the upper infinite where nothing is certain.

    Args:
        weight_NE, importance_NE, below_N1, above_N1: as in `exact_scale`.
        guess_N1: a scale that clips little, as min-max; only says where to look.
        error_N1: error of some scale, the smaller the less is left between the ends.
    """
    size_NE, error_N1 = weight_NE.abs(), error_N1 * _SLACK
    cap_NE = torch.where(weight_NE < 0, below_N1, above_N1)
    low_N1 = torch.zeros_like(guess_N1)
    for ratio in _LOWER_RATIOS:
        clipped_NE = (size_NE - cap_NE * (guess_N1 * ratio)).clamp_(min=0)
        lost_N1 = clipped_NE.square_().mul_(importance_NE).sum(1, keepdim=True)
        low_N1 = torch.where(lost_N1 > error_N1, guess_N1 * ratio, low_N1)
    energy_NE = size_NE.square() * importance_NE
    high_N1 = torch.full_like(guess_N1, torch.inf)
    for ratio in _UPPER_RATIOS:
        lost_N1 = (energy_NE * (size_NE <= guess_N1 * (ratio / 2))).sum(1, keepdim=True)
        high_N1 = torch.where(lost_N1 > error_N1, guess_N1 * ratio, high_N1)
    return low_N1, high_N1


def descending_order(values_NW: Tensor) -> Tensor:
    """Indices that sort each row from large to small, equal ones by index; values are float32 and not below zero."""
    if values_NW.device.type != "cpu":
        return values_NW.sort(stable=True, dim=1, descending=True).indices
    # One integer holds value and index: the bits of floats above zero order as the floats do. Several times faster.
    key_NW = (~values_NW.view(torch.int32)).to(torch.int64).bitwise_left_shift_(32)
    key_NW.add_(torch.arange(values_NW.shape[1]))
    key_NW.numpy().sort(axis=1)
    return key_NW.bitwise_and_(0xFFFFFFFF)
