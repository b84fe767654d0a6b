"""The drafters, one file each; a file's name is a value of `spec.drafter` (`config.drafters`)."""
