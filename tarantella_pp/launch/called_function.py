"""What each rank of `tnt.run` runs: reads a function, calls it, and hands its result back."""

from __future__ import annotations

import os
import pickle
import sys

from tarantella_pp.errors import LaunchError
from tarantella_pp.launch.records import RANK_VARIABLE, SIZE_VARIABLE, number_from


def main() -> None:
    """Calls the function in the first of two files; the last rank writes into the second."""
    given, found = sys.argv[1:]
    try:
        with open(given, "rb") as file:
            function, args = pickle.load(file)  # noqa: S301 - `tnt.run` has written it
    except FileNotFoundError as error:
        raise LaunchError(
            "tnt.run calls a function on ranks of this host only. Start a script on several hosts "
            "with `tarantella`."
        ) from error
    result = function(*args)
    size = int(os.environ[SIZE_VARIABLE])
    if size == 1 or number_from(RANK_VARIABLE) == size - 1:
        import cloudpickle

        try:
            text = cloudpickle.dumps(result)
            pickle.loads(text)  # noqa: S301 - as the caller will
        except Exception as error:
            raise LaunchError(
                f"What the function returns cannot be sent back ({type(error).__name__}: {error}). "
                "Return arrays, numbers, texts, lists and dicts of them."
            ) from error
        with open(found, "wb") as file:
            file.write(text)


if __name__ == "__main__":
    main()
