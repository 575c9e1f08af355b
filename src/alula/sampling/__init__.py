"""From logits to tokens: the target distribution of a node, the noise that picks from it, and log probabilities."""
