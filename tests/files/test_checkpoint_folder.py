"""Files must reach the disk; folders need not where the file system cannot sync them."""

from __future__ import annotations

import os

import pytest

from tarantella_pp.files.checkpoint_folder import sync


def test_a_folder_that_cannot_be_synced_is_no_error_and_a_file_is(tmp_path, monkeypatch):
    def refuse(descriptor: int) -> None:
        raise OSError(22, "Invalid argument")

    file = tmp_path / "file"
    file.write_text("x")
    sync(file)
    monkeypatch.setattr(os, "fsync", refuse)
    sync(tmp_path)
    with pytest.raises(OSError, match="Invalid argument"):
        sync(file)
