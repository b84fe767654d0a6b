"""Agents: programs that talk to the model by themselves. `suite` is the environment, `program` runs them."""
