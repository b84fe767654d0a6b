"""GPU tests are skipped, and say so, only where there is no CUDA device."""

import pytest
import torch


def pytest_collection_modifyitems(items):
    """Mark every test of this folder where it cannot run."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="this machine has no CUDA device"))
