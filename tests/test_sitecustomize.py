"""What Python runs first in processes of tests."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.jobs import PYTHONPATH, PYTHONS, Job

KERAS = """
try:
    import sklearn
except ImportError:
    sklearn = None
"""
SCRIPT = "import keras; print(keras.sklearn); import sklearn; print(sklearn.found)"


def test_keras_does_without_what_a_script_gets(tmp_path: Path) -> None:
    (tmp_path / "keras.py").write_text(KERAS)
    (tmp_path / "sklearn.py").write_text("found = 'found'")
    for path, seen in ((PYTHONPATH, "None"), ("", f"<module 'sklearn' from '{tmp_path}")):
        with Job(PYTHONS[0], "-c", SCRIPT, PYTHONPATH=f"{tmp_path}:{path}") as job:
            result = job.result()
        without, within = result.stdout.splitlines()
        assert without.startswith(seen)
        assert within == "found"
