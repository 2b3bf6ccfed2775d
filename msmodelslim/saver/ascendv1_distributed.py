"""ascendV1 written by several ranks together: the same files as from one."""

from msmodelslim.registry import register
from msmodelslim.saver.ascendv1 import AscendV1Saver


@register("ascendv1_saver_distributed")
class DistributedAscendV1Saver(AscendV1Saver):
    """What `ascendv1_saver` becomes by itself in a run on several devices; options and files are the same."""

    def support_distributed(self) -> bool:
        return True
