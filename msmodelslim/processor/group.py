"""Several steps that share one calibration forward: different schemes for different modules of the same layer."""

from typing import Any, ClassVar

from pydantic import BaseModel, Field

from msmodelslim.errors import UnsupportedError
from msmodelslim.processor.base import BaseSessionProcessor, BatchProcessRequest, RunContext
from msmodelslim.registry import lookup, register


@register("group")
class GroupProcessor(BaseSessionProcessor):
    """All children observe the same forward; then each finishes in the order of the list."""

    nested_field: ClassVar[str] = "configs"

    class Config(BaseModel, frozen=True, extra="forbid"):
        configs: tuple[Any, ...] = Field(min_length=1, description="steps, as in spec.process")

    def __init__(self, config: "GroupProcessor.Config", context: RunContext) -> None:
        super().__init__(config, context)
        self._children = [lookup("processor", step.type)(step.config, context) for step in config.configs]
        self._refuse_mixed()

    @classmethod
    def examples(cls) -> list[dict[str, Any]]:
        weight = {"dtype": "int8", "scope": "per_channel"}
        static = {"dtype": "int8", "scope": "per_tensor", "symmetric": False, "method": "minmax"}
        attention = {"type": "linear_quant", "include": ["*self_attn*"], "qconfig": {"act": static, "weight": weight}}
        mlp = {"type": "linear_quant", "include": ["*mlp*"], "qconfig": {"weight": weight}}
        return [{"configs": [attention, mlp]}]

    @property
    def children(self) -> list[BaseSessionProcessor]:
        """The steps of the group, in order."""
        return self._children

    def _refuse_mixed(self) -> None:
        """Raise where a child would see a sample twice because another one communicates in the forward."""
        observing = [child for child in self._children if not child.is_data_free()]
        syncing = [child.registered_name for child in observing if child.syncs_in_forward()]
        if syncing and len(syncing) < len(observing):
            others = [child.registered_name for child in observing if not child.syncs_in_forward()]
            raise UnsupportedError(
                f"group: {syncing} communicate while samples flow and {others} do not, so they cannot share a forward",
                "take one kind out of the group",
            )
        for at, child in enumerate(self._children):
            after = [other for other in self._children[at + 1 :] if not other.is_data_free()]
            lost = [
                p for p in after if child.shifts_inputs() or (child.rescales_inputs() and not p.follows_rescaling())
            ]
            if lost:
                raise UnsupportedError(
                    f"group: {child.registered_name} changes what {lost[0].registered_name} observes in the same "
                    "forward, and it cannot make up for that",
                    "take one of them out of the group",
                )

    def pre_run(self) -> None:
        for child in self._children:
            child.pre_run()

    def rehearse(self, request: BatchProcessRequest) -> None:
        for child in self._children:
            child.rehearse(request)

    def preprocess(self, request: BatchProcessRequest) -> None:
        for child in self._children:
            child.preprocess(request)

    def postprocess(self, request: BatchProcessRequest) -> None:
        for child in self._children:
            child.postprocess(request)

    def post_run(self) -> None:
        for child in self._children:
            child.post_run()

    def abort(self) -> None:
        for child in self._children:
            child.abort()

    def is_data_free(self) -> bool:
        return all(child.is_data_free() for child in self._children)

    def shares_forward(self) -> bool:
        return all(child.shares_forward() for child in self._children)

    def rescales_inputs(self) -> bool:
        return all(child.rescales_inputs() for child in self._children)

    def follows_rescaling(self) -> bool:
        return all(child.follows_rescaling() or child.is_data_free() for child in self._children)

    def shifts_inputs(self) -> bool:
        return any(child.shifts_inputs() for child in self._children)

    def propagates_error(self) -> bool:
        return any(child.propagates_error() for child in self._children)

    def need_kv_cache(self) -> bool:
        return any(child.need_kv_cache() for child in self._children)

    def syncs_in_forward(self) -> bool:
        return any(child.syncs_in_forward() for child in self._children)

    def sums_matrices(self) -> bool:
        return any(child.sums_matrices() for child in self._children)

    def support_distributed(self) -> bool:
        return all(child.support_distributed() for child in self._children)
