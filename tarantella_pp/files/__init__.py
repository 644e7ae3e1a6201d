"""Files that ranks write and read in parts: models, checkpoints, their manifest and checksums."""
