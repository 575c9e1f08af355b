"""What `alula ablate` is told. Imports nothing heavy: `alula ablate --help` must be quick."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from alula.config import AlulaError
from alula.train.config import Recipe
from alula.train.methods.options import Eagle1Options


@dataclass(frozen=True)
class AblationConfig:
    """A table of EAGLE-1 heads that differ in one thing. Given again, the command goes on with what is missing."""

    output: Path
    """Folder of the results: inputs.json or losses.json, the picture beside it, and features/."""
    data: tuple[Path, ...] = ()
    """JSON-lines files of conversations, such as `alula synth` writes."""
    model: str = "smollm2"
    """The target: a built-in name, a Hugging Face folder or hub id, or a GGUF file."""
    seeds: tuple[int, ...] = (0, 1)
    """Each head is trained once per seed, which draws its start values, data order and noise."""
    max_tokens: int = 1024
    """Longer conversations are cut here."""
    held_out_one_in: int = 24
    """One conversation in so many is kept for evaluation."""
    evaluated: int = 48
    """Held-out conversations looked at, at most."""
    dtype: str = "bfloat16"
    """Numeric format in which the target runs and features are kept."""
    device: str = "cpu"
    """Where target and heads lie, as torch names it."""
    threads: int | None = None
    """torch's thread count."""
    recipe: Recipe = field(default_factory=lambda: Recipe(total_tokens=200_000))
    """Optimiser and schedule of every head; total_tokens is what each learns."""
    head: Eagle1Options = field(default_factory=Eagle1Options)
    """What the heads have in common; the ablation of losses sets regression, classification and noise itself."""

    def __post_init__(self) -> None:
        if not self.data:
            raise AlulaError("data is empty: give a file of conversations, which `alula synth` writes")
        if not self.seeds or len(set(self.seeds)) != len(self.seeds):
            raise AlulaError(f"seeds is {self.seeds}: give one or more, each once")
        for name, least in (("max_tokens", 4), ("held_out_one_in", 2), ("evaluated", 1)):
            if getattr(self, name) < least:
                raise AlulaError(f"{name} is {getattr(self, name)}: give a whole number of at least {least}")
