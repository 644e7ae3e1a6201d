"""What a host says of itself before a job starts on it, as JSON in one line.

Called with the addresses and the port of the launcher, it tries to reach that, too.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Sequence

from tarantella_pp.launch.channel.joining import CONNECT_SECONDS, Whereabouts


def main(arguments: Sequence[str]) -> None:
    """Prints the answer."""
    launcher = Whereabouts.parse(arguments[0], "")
    answer = {"name": socket.gethostname(), "reasons": _obstacles(launcher)}
    sys.stdout.write(f"{json.dumps(answer)}\n")


def _obstacles(launcher: Whereabouts) -> list[str]:
    """Returns why the launcher cannot be reached from here; nothing if it can."""
    reasons = []
    for address in launcher.addresses:
        try:
            socket.create_connection((address, launcher.port), CONNECT_SECONDS).close()
        except OSError as error:
            reasons.append(f"{address} port {launcher.port}: {error.strerror or error}")
        else:
            return []
    return reasons


if __name__ == "__main__":
    main(sys.argv[1:])
