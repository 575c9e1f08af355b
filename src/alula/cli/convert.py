"""`alula convert`: a head from one public layout into another."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

if TYPE_CHECKING:
    from alula.train.convert import Converted


@dataclass(frozen=True)
class Convert:
    """Write a head in another public layout: the same tensors, the same meaning, or a refusal that names the reason."""

    source: tyro.conf.Positional[Path]
    """Folder of a head, in any of the layouts."""
    dest: tyro.conf.Positional[Path]
    """Folder to write."""
    to: Literal["official", "specforge", "speculators"]
    """Layout to write: official EAGLE; SpecForge, for SGLang and vLLM; speculators, for vLLM."""
    norm_output: Literal["fed-back", "lm-head"] | None = None
    """What a true norm_output of a SpecForge config means: normed states are fed back (SGLang, vLLM, newer
    SpecForge), or only the LM head reads them (SpecForge up to 0.3). Asked for where nothing else says."""
    verifier: str | None = None
    """Folder or hub id of the target, which a speculators config names."""
    overwrite: bool = False
    """Replace the head that DEST holds."""

    def run(self) -> int:
        from alula.train.convert import convert

        done = convert(
            self.source.expanduser(),
            self.dest.expanduser(),
            self.to,
            norm_output=self.norm_output,
            verifier=self.verifier,
            overwrite=self.overwrite,
        )
        print(_told(done, self.dest))
        return 0


def _told(done: Converted, dest: Path) -> str:
    config = done.head.config
    taps = "the default ones" if config.taps is None else ", ".join(map(str, config.taps))
    lines = [f"{dest}: the {config.kind} head, from the {done.head.layout} to the {done.layout} layout"]
    if config.kind == "eagle3":
        lines.append(f"  features: inputs of layers {taps}; {config.draft_vocab_size} draft tokens")
    if done.head.left_out:
        lines.append(f"  left out, being the target's: {', '.join(done.head.left_out)}")
    if done.layout == "speculators" and done.verifier is None:
        lines.append("  no target is named, which the speculators library wants: give --verifier")
    return "\n".join(lines)
