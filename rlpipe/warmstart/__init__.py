"""Warm start: makes the shipped tiny model, from generated instances to a checkpoint with its MTP layer."""
