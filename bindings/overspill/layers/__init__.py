"""What stands in the forward of a layer or a block: compiled code, tiles of a weight, tiles of logits."""
