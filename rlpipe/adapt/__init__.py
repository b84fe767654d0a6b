"""Pre-RL adaptation: trains a frozen model's draft to predict the model, and measures its acceptance."""
