"""Agents: programs that call the model themselves. `suite` is the environment; `program` runs the agents."""
