"""Why acceptance moved: the probe set, decomposition, attribution and regression. No torch."""
