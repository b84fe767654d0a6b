"""verifiers 0.4 in process. `suite` is the environment, `agent` the model's side, `load` and `toolsets` the
library's."""
