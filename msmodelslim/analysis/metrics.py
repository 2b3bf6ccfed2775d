"""The metrics of `msmodelslim analyze`, by scope; the first of a scope is its default. Imports nothing slow."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """One way to say how sensitive a module is; a higher score is more sensitive.

    Args:
        meaning: what the score is.
        label: the same, short, for an axis.
        quantizes: a quantization is tried out, so that its scheme may be chosen.
        is_error: the score is a share of squares lost, from which decibels follow.
    """

    meaning: str
    label: str
    quantizes: bool = False
    is_error: bool = False


METRICS: dict[str, dict[str, Metric]] = {
    "linear": {
        "kurtosis": Metric("excess kurtosis of the input; 0 for a normal distribution", "excess kurtosis"),
        "std": Metric("largest |x| of the input over its standard deviation", "max |x| / σ"),
        "quantile": Metric("int8 step of the input over its interquartile range", "int8 step / (Q3 − Q1)"),
        "mse": Metric(
            "square error of the linear's output over the square of the output, weights and inputs quantized",
            "‖y − ŷ‖² / ‖y‖²",
            quantizes=True,
            is_error=True,
        ),
    },
    "layer": {
        "mse_layer_wise": Metric(
            "square error of the block's output over the square of the output, for inputs from a float model",
            "‖y − ŷ‖² / ‖y‖²",
            quantizes=True,
            is_error=True,
        ),
        "mse_model_wise": Metric(
            "square error of the model's logits over their square, with this one block quantized",
            "‖z − ẑ‖² / ‖z‖²",
            quantizes=True,
            is_error=True,
        ),
        "kl_model_wise": Metric(
            "KL(float ‖ quantized) of the predicted distribution in nats a token, with this one block quantized",
            "nats a token",
            quantizes=True,
        ),
    },
}


def default_metric(scope: str) -> str:
    """The metric that a scope takes when none is asked for."""
    return next(iter(METRICS[scope]))
