"""What the experts of a checkpoint are called: one tensor each, or all of a layer in one."""

from __future__ import annotations

from dataclasses import dataclass

from .checkpoint import Checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """One layout. Placeholders in names: {layer}, {expert}."""

    stacked: bool
    """Whether a layer's experts are one tensor with the expert as its first dimension."""
    parts: dict[str, str]
    """gate, up and down; or gate_up and down when stacked."""
    router: str
    """Inside its layer, without the suffix .weight."""

    def of(self, layer: int, number: int) -> dict[str, str]:
        """Names by part."""
        return {part: name.format(layer=layer, expert=number) for part, name in self.parts.items()}

    @classmethod
    def hub(cls, architecture: str) -> ExpertNames:
        """As checkpoints are published."""
        if architecture == "granitemoe":
            return cls(
                stacked=True,
                parts={
                    "gate_up": "model.layers.{layer}.block_sparse_moe.input_linear.weight",
                    "down": "model.layers.{layer}.block_sparse_moe.output_linear.weight",
                },
                router="block_sparse_moe.router.layer",
            )
        mixtral = architecture == "mixtral"
        block = "block_sparse_moe" if mixtral else "mlp"
        gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
        prefix = f"model.layers.{{layer}}.{block}.experts.{{expert}}"
        return cls(
            stacked=False,
            parts={
                "gate": f"{prefix}.{gate}.weight",
                "up": f"{prefix}.{up}.weight",
                "down": f"{prefix}.{down}.weight",
            },
            router=f"{block}.gate",
        )

    @classmethod
    def stacked_names(cls, architecture: str) -> ExpertNames:
        """As transformers 5 names them in memory, and writes them."""
        granite = architecture == "granitemoe"
        block = "block_sparse_moe" if granite else "mlp"
        prefix = f"model.layers.{{layer}}.{block}.experts"
        return cls(
            stacked=True,
            parts={"gate_up": f"{prefix}.gate_up_proj", "down": f"{prefix}.down_proj"},
            router=f"{block}.{'router' if granite else 'gate'}",
        )

    @classmethod
    def find(cls, checkpoint: Checkpoint, architecture: str, layer: int) -> ExpertNames:
        """The layout whose names `layer` has: transformers 5 stacks them, else the hub's."""
        stacked = cls.stacked_names(architecture)
        found = stacked.of(layer, 0)["gate_up"] in checkpoint
        return stacked if found else cls.hub(architecture)
