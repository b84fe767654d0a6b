"""Triton kernels. Importing a module of this package imports triton; the package itself does not."""
