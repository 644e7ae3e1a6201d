"""The state of a run as files: tensors, manifest, checksums, the newest whole one."""
