"""The errors a user can cause. Each says what is wrong, where, and what to do about it."""


class ModelslimError(Exception):
    """A user's mistake or a limit of the environment; shown as one message without a traceback.

    Args:
        message: what is wrong and where: the place (file, field, module) and the value found there.
        action: what to do about it, an imperative without a final full stop.
    """

    code = 0

    def __init__(self, message: str, action: str = "") -> None:
        super().__init__(message, action)
        self.message = message
        self.action = action

    def __str__(self) -> str:
        return f"{self.message}; {self.action}" if self.action else self.message


class EnvError(ModelslimError):
    """The machine lacks something: a device, disk space, a port, a package."""

    code = 100


class InvalidModelError(ModelslimError):
    """The source checkpoint is incomplete, damaged, or not what its config says."""

    code = 201


class BadSampleError(InvalidModelError):
    """A calibration sample that the model answers with infinity or NaN.

    All ranks agree on it, so each raises this; it is told of the rank that forwarded the sample.

    Args:
        sample: its global number.
    """

    #: the rank that forwarded the sample; None in a run of one rank, and until the runner has noted it
    rank: int | None = None

    def __init__(self, message: str, action: str = "", *, sample: int) -> None:
        super().__init__(message, action)
        self.sample = sample

    @classmethod
    def of_input(cls, linear: str, sample: int) -> "BadSampleError":
        """What flows into a linear is not finite."""
        return cls(
            f"{linear}: its input is not finite in calibration sample {sample}",
            "take that sample out, or serve the model in a wider type (a float16 overflow is the usual cause)",
            sample=sample,
        )


class InvalidDatasetError(ModelslimError):
    """Calibration data that cannot be used; names file, sample and field."""

    code = 202


class SchemaValidateError(ModelslimError):
    """A recipe or a command line that breaks its schema; lists every mistake found."""

    code = 203


class SecurityError(ModelslimError):
    """A path that would endanger the user's files, or code that was not allowed to run."""

    code = 204


class UnsupportedError(ModelslimError):
    """A combination that is well formed but that the model, format or engine has no support for."""

    code = 301
