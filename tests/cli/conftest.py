import pytest

from tests.helpers.commands import Command


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    """Calls `tarantella` in this process."""
    return Command(capsys)
