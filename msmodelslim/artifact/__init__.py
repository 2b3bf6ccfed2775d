"""What a written directory holds, and whether its loaders will read what was meant."""

from msmodelslim.artifact.inspection import inspect_directory
from msmodelslim.artifact.verification import verify_directory, verify_main

__all__ = ["inspect_directory", "verify_directory", "verify_main"]
