"""What the matrix finds, as a table in the docs.

python -m tests.exactness.table                # tries everything on two ranks, some minutes
python -m tests.exactness.table losses layers  # only these; the other rows stay
"""

import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence

from tests.exactness import expected
from tests.exactness.expected import BY_MICRO_BATCH, DIFFERS, EXACT, NOT_IN_KERAS, REFUSED, Verdict
from tests.helpers.mpi import ROOT

PAGE = ROOT / "docs" / "exactness.md"
BEGIN, END = "<!-- matrix: begin -->\n", "<!-- matrix: end -->"
HEAD = "| | tried | exact | refused | differs |\n| --- | --: | --: | --- | --- |\n"
TITLES = {
    "losses": "Losses, each with all reductions, with and without sample weights and masks",
    "metrics": "Metrics, with and without sample weights, some in layers",
    "layers": "Layers",
    "optimizers": "Optimizers, their options and schedules",
    "callbacks": "Callbacks",
}


def row(kind: str, verdicts: Sequence[Verdict]) -> str:
    """The line of the table for trials of a kind; what plain Keras does not train is left out."""
    tried = [verdict for verdict in verdicts if verdict.outcome != NOT_IN_KERAS]
    exact = sum(verdict.outcome == EXACT for verdict in tried)
    refused, differs = (
        _reasons(kind, [verdict for verdict in tried if verdict.outcome in outcomes])
        for outcomes in ((REFUSED,), (BY_MICRO_BATCH, DIFFERS))
    )
    return f"| {TITLES[kind]} | {len(tried)} | {exact} | {refused} | {differs} |\n"


def page(text: str, rows: Mapping[str, str]) -> str:
    before, rest = text.split(BEGIN)
    table, after = rest.split(END)
    lines = {line.split(" | ")[0]: line for line in table.splitlines(keepends=True)[2:]}
    lines |= {f"| {TITLES[kind]}": line for kind, line in rows.items()}
    found = (lines[name] for title in TITLES.values() if (name := f"| {title}") in lines)
    return before + BEGIN + HEAD + "".join(found) + END + after


def _reasons(kind: str, verdicts: Sequence[Verdict]) -> str:
    counts = Counter(expected.reason(kind, verdict.name, verdict.outcome) for verdict in verdicts)
    return "; ".join(f"{number}: {reason}" for reason, number in counts.most_common())


def main(kinds: Sequence[str]) -> None:
    from tests.exactness.test_matrix import judge_on_two_ranks

    os.environ["TNT_TEST_EXAMPLES"] = "1"
    for kind in kinds or TITLES:
        verdicts = judge_on_two_ranks([kind])[kind]
        if wrong := expected.unexpected(kind, verdicts):
            sys.exit("\n".join(wrong))
        PAGE.write_text(page(PAGE.read_text(), {kind: row(kind, verdicts)}))


if __name__ == "__main__":
    main(sys.argv[1:])
