"""compressed-tensors written by several ranks together: the same files as from one."""

from msmodelslim.registry import register
from msmodelslim.saver.compressed_tensors import CompressedTensorsSaver


@register("compressed_tensors_distributed")
class DistributedCompressedTensorsSaver(CompressedTensorsSaver):
    """What `compressed_tensors` becomes by itself in a run on several devices; options and files are the same."""

    def support_distributed(self) -> bool:
        return True
