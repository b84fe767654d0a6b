"""Pre-RL adaptation: the MTP layer of a frozen model learns to draft for it, measured in real generation."""
