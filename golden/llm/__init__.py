"""The language model: checkpoints, tokenizers, the float reference decoder and captured activations."""
