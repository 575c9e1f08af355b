"""What proposes tokens: heads on the target's features, a smaller model, prompt lookup, or nothing."""
