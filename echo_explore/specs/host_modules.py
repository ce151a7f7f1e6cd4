"""Host time of modules whose Python does more than dispatch the operators that a trace counts."""

from pydantic import Field

from echo_explore.specs.base import Seconds, StrictModel


class ModuleHostSpec(StrictModel):
    """Host time of one module's forward, and of its backward: both products of a linear layer.

    Attributes:
        linear_s, linear_backward_s: a linear layer, its casts included.
        grouped_s, grouped_backward_s: the linear layers of experts, with one expert.
        expert_s, expert_backward_s: each further expert.
        attention_s, attention_backward_s: fused attention.
    """

    linear_s: Seconds = Field(default=0.0, alias="linear")
    linear_backward_s: Seconds = Field(default=0.0, alias="linear_backward")
    grouped_s: Seconds = Field(default=0.0, alias="grouped")
    grouped_backward_s: Seconds = Field(default=0.0, alias="grouped_backward")
    expert_s: Seconds = Field(default=0.0, alias="expert")
    expert_backward_s: Seconds = Field(default=0.0, alias="expert_backward")
    attention_s: Seconds = Field(default=0.0, alias="attention")
    attention_backward_s: Seconds = Field(default=0.0, alias="attention_backward")

    def times(self, factor: float) -> "ModuleHostSpec":
        """All of them times a factor."""
        return self.model_copy(update={name: value * factor for name, value in self})


class HostModulesSpec(StrictModel):
    """By the data type of products: `wide` of 16 bits and more, `narrow` of less."""

    wide: ModuleHostSpec = Field(default_factory=ModuleHostSpec)
    narrow: ModuleHostSpec = Field(default_factory=ModuleHostSpec)

    def times(self, factor: float) -> "HostModulesSpec":
        """All of them times a factor."""
        return HostModulesSpec(wide=self.wide.times(factor), narrow=self.narrow.times(factor))
