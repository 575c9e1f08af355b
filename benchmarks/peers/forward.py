"""An EAGLE-3 head's first pass in alula and in the speculators library: the same logits from the same features.

Run once in each environment, on the same head in the speculators layout, whose config names its target:

    python forward.py alula --head HEAD --output ours.safetensors
    python forward.py speculators --head HEAD --like ours.safetensors

Features and tokens are random. The second run also checks that every tensor of the file is in the library's model, to
the bit, and that the model has no parameter of its own making.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

ROWS = 24


def main() -> None:
    arguments = _arguments()
    if arguments.engine == "alula":
        run_alula(arguments.head, arguments.output)
    else:
        run_speculators(arguments.head, arguments.like)


def run_alula(folder: Path, output: Path) -> None:
    """Writes features [S, F], tokens [S], the embedding used [V, D] and logits [S, C], all but the tokens in fp32."""
    import numpy as np

    from alula.cache import KVShape, PagedCache
    from alula.draft.build import TargetParts, build_head
    from alula.draft.dialects import read_head
    from alula.draft.policy import TreePolicy
    from alula.draft.rows import Lanes
    from alula.kernels.select import load_kernels

    head, kernels = read_head(folder), load_kernels("torch")
    config, generator = head.config, torch.Generator().manual_seed(0)
    taps = 3 if config.taps is None else len(config.taps)
    embedding_VD = torch.randn(config.vocab_size, config.target_hidden_size, generator=generator)
    features_SF = torch.randn(ROWS, taps * config.target_hidden_size, generator=generator)
    tokens_S = torch.randint(config.vocab_size, (ROWS,), generator=generator)
    parts = TargetParts(embedding_VD, lambda x_RD: x_RD, layers=64, positions=ROWS + 1, kernels=kernels)
    model = build_head(head, parts, TreePolicy()).model
    cache = PagedCache(
        pages=4,
        page_size=16,
        target=[KVShape(1, 2)],
        drafter=model.kv_shapes,
        feature_size=features_SF.shape[1],
        dtype=torch.float32,
        drafter_first=1,
        drafter_name="eagle3",
    )
    cache.add(0, [0] * (ROWS + 1))
    with cache.begin({0: ROWS + 1}) as txn:
        lanes, slots = Lanes(txn.page_table([0]), np.array([1]), 16), np.arange(1, ROWS + 1)
        where = lanes.committed(np.zeros(ROWS, np.int64), slots, txn.slots(0, slots), 1)
        hidden_SD = model.step(tokens_S, model.fuse(features_SF), where, txn.drafter_layers)
    logits_SC = model.logits(hidden_SD)
    found = {"features": features_SF, "tokens": tokens_S, "embedding": embedding_VD, "logits": logits_SC}
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, output)
    print(f"alula: {ROWS} rows, {config.draft_vocab_size} draft tokens")


@torch.inference_mode()
def run_speculators(folder: Path, like: Path) -> None:
    """Raises SystemExit where anything differs."""
    from speculators import SpeculatorModel, SpeculatorModelConfig

    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"  # the one that runs on any device
    model = SpeculatorModel.from_pretrained(folder, config=config).float().eval()
    stored, state, ours = load_file(folder / "model.safetensors"), model.state_dict(), load_file(like)
    for name, tensor in stored.items():
        if name not in state or not torch.equal(state[name], tensor.float() if tensor.is_floating_point() else tensor):
            raise SystemExit(f"speculators does not have {name} as stored")
    made = sorted(set(state) - set(stored) - {"embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight"})
    if made:
        raise SystemExit(f"speculators made up {made}")
    model.embed_tokens.weight.data = ours["embedding"]
    seen: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output))
    model(ours["features"][None], ours["tokens"][None], torch.zeros(1, ROWS, dtype=torch.long), ttt_steps=1)
    difference = (seen[0][0] - ours["logits"]).abs().max().item()
    print(f"taps {config.eagle_aux_hidden_state_layer_ids}, target {config.speculators_config.verifier.name_or_path}")
    print(
        f"speculators: {len(stored)} tensors as stored, largest difference of logits {difference:.2g} of "
        f"{ours['logits'].abs().max():.2g}"
    )
    if difference > 1e-3 * ours["logits"].abs().max():
        raise SystemExit("the logits differ")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=("alula", "speculators"))
    parser.add_argument("--head", required=True, type=Path, help="folder of the head")
    parser.add_argument("--output", type=Path, help="file to write (alula)")
    parser.add_argument("--like", type=Path, help="the first run's file (speculators)")
    arguments = parser.parse_args()
    if (arguments.engine == "alula") != (arguments.output is not None) or (arguments.output is None) == (
        arguments.like is None
    ):
        parser.error("give --output to alula, and --like to speculators")
    return arguments


if __name__ == "__main__":
    main()
