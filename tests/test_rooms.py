"""The rooms of the package: what `docs/architecture.md` draws is what the imports say."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "tarantella_pp"
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
GROUND = ("cause", "errors", "files")
"""Files of no room, which every room may import."""
MOST_FILES = 12
WITHOUT_TENSORFLOW = ("schedule", "launch", "partition/graph", "partition/plan")
READS_KERAS = (
    "calls", "keras_reader", "layer_inside", "layer_trace", "optimizer_slots",
    "placeholders", "traced_costs",
)  # fmt: skip
"""Files in these rooms that read a Keras model, and are loaded for nothing else."""
ACROSS_ROOMS = ("", "face", "face/files", "face/fit", "face/numbers", "exactness")
"""Folders of tests that look at several rooms at once."""


@functools.cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def name_of(file: Path) -> str:
    return file.relative_to(PACKAGE).with_suffix("").as_posix().removesuffix("/__init__")


def room_of(file: Path) -> str:
    return file.parent.relative_to(PACKAGE).as_posix()


FILES = sorted(PACKAGE.rglob("*.py"))
ROOMS = {room_of(file) for file in FILES} - {"."}
NAMES = {name_of(file): file for file in FILES if file != PACKAGE / "__init__.py"}


def drawn() -> list[str]:
    """The rooms as the architecture draws them, from top to bottom."""
    block = re.search(r"```text\n(.*?)```", ARCHITECTURE, re.DOTALL)
    assert block is not None
    path: list[str] = []
    found = []
    for line in block[1].splitlines():
        room = re.match(r"( *)([a-z_]+)/", line)
        if room is not None:
            path = [*path[: len(room[1]) // 4], room[2]]
            found.append("/".join(path))
    return found


def statements(node: ast.AST, at_once: bool) -> Iterator[ast.AST]:
    """The parts of a file; `at_once` without what runs later, or never."""
    for child in ast.iter_child_nodes(node):
        later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
        never = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        if not (at_once and (later or never)):
            yield child
            yield from statements(child, at_once)


def imported(file: Path, at_once: bool = False) -> Iterator[str]:
    """The files of the package that a file imports, as in `NAMES`; `at_once`: when it is loaded."""
    for node in statements(tree(file), at_once):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")[1:] if name.startswith("tarantella_pp.") else []
            found = ["/".join(parts[:n]) for n in range(len(parts), 0, -1)]
            yield from [path for path in found if path in NAMES][:1]


def packages(file: Path) -> set[str]:
    """The top-level packages that a file imports, whenever."""
    nodes = list(ast.walk(tree(file)))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.split(".")[0] for name in names}


def test_the_drawing_has_every_room_once() -> None:
    assert sorted(drawn()) == sorted(ROOMS)


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_a_room_imports_only_rooms_below_it(room: str) -> None:
    order = drawn()
    below = {room, *order[order.index(room) + 1 :]}
    upward = [
        f"{name_of(file)} -> {name}"
        for file in FILES
        if room_of(file) == room
        for name in imported(file)
        if name not in GROUND and room_of(NAMES[name]) not in below
    ]
    assert upward == []


def test_files_do_not_import_each_other_in_a_circle() -> None:
    left = {name: set(imported(file, at_once=True)) - {name} for name, file in NAMES.items()}
    while free := [name for name, needs in left.items() if not needs & set(left)]:
        for name in free:
            del left[name]
    assert sorted(left) == []


def test_no_room_is_crowded() -> None:
    count = Counter(room_of(file) for file in FILES if file.name != "__init__.py")
    assert {room: n for room, n in count.items() if n > MOST_FILES} == {}


def test_no_two_files_and_no_two_classes_share_a_name() -> None:
    files = Counter(file.stem for file in FILES if file.name != "__init__.py")
    assert [name for name, n in files.items() if n > 1] == []
    classes = Counter(
        node.name
        for file in FILES
        for node in tree(file).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, n in classes.items() if n > 1] == []


def test_no_two_kinds_of_messages_share_a_tag() -> None:
    text = "\n".join(file.read_text(encoding="utf-8") for file in sorted(PACKAGE.rglob("*.py")))
    lines = re.findall(r"^((?:_\w*TAG(?:, )?)+) = ([\d, ]+)$", text, re.MULTILINE)
    tags = Counter(tag for _, numbers in lines for tag in numbers.split(", "))
    assert len(tags) > 10
    assert {tag: count for tag, count in tags.items() if count > 1} == {}


def test_one_file_imports_mpi4py() -> None:
    users = [name_of(file) for file in FILES if "mpi4py" in packages(file)]
    assert users == ["runtime/comm/communicator"]


def test_private_names_of_keras_are_in_one_room() -> None:
    users = {room_of(file) for file in FILES if "keras.src" in file.read_text(encoding="utf-8")}
    assert users == {"internals"}


OF_PYTHON = {"_asdict", "_replace", "_exit", "_current_frames"}
"""Documented in spite of their underscore."""


def test_private_names_of_others_are_in_one_room() -> None:
    """What begins with an underscore and is read of another object is a name of this package."""
    nodes = [(file, node) for file in FILES for node in ast.walk(tree(file))]
    ours = OF_PYTHON.union(
        node.name for _, node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef)
    )
    reads = []
    for file, node in nodes:
        if isinstance(node, ast.AnnAssign | ast.arg):
            target = node.target if isinstance(node, ast.AnnAssign) else node
            ours.add(getattr(target, "id", getattr(target, "arg", getattr(target, "attr", ""))))
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            if ast.unparse(node.value) in ("self", "cls"):
                ours.add(node.attr)
            elif not node.attr.endswith("__"):
                reads.append((room_of(file), name_of(file), node.attr))
    others = [read for read in reads if read[0] != "internals" and read[2] not in ours]
    assert others == []


def test_rooms_without_tensorflow_do_not_import_it() -> None:
    heavy = {
        name_of(file)
        for file in FILES
        if room_of(file) in WITHOUT_TENSORFLOW
        and file.stem not in READS_KERAS
        and packages(file) & {"tensorflow", "keras"}
    }
    assert heavy == set()


def test_tests_mirror_the_package() -> None:
    """A test of a room lies in the folder of that name, and is named for a file or a room."""
    strangers = []
    for file in (ROOT / "tests").rglob("test_*.py"):
        room = file.parent.relative_to(ROOT / "tests").as_posix().removeprefix(".")
        if room in ACROSS_ROOMS:
            continue
        names = {path.stem for path in (PACKAGE / room).glob("*")}
        subject = file.stem.removeprefix("test_")
        if not any(subject == name or subject.startswith(f"{name}_") for name in names):
            strangers.append(f"{room}/{file.name}")
    assert strangers == []


def test_the_files_that_documents_name_and_link_to_exist() -> None:
    found, missing = 0, []
    for document in (*ROOT.glob("*.md"), *ROOT.glob("examples/*.md"), *ROOT.glob("docs/*.md")):
        text = document.read_text(encoding="utf-8")
        links = [path for path in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if "://" not in path]
        named = re.findall(r"`([a-z_/]+/[a-z_]+\.py)`", text)
        found += len(links) + len(named)
        missing += [path for path in links if not (document.parent / path).exists()]
        missing += [path for path in named if not any((r / path).exists() for r in (ROOT, PACKAGE))]
    assert found > 25
    assert missing == []
