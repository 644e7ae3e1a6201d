"""`tarantella plan` on graphs that are not Keras' own, and on plans that are there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.commands import GRAPH, HEAVY, ROOT, all_loaded_by
from tests.helpers.plans import chain_graph, plan_of


@pytest.fixture
def plan_file(tmp_path):
    def write(assignment, name="plan.json", **changes):
        path = tmp_path / name
        plan_of(chain_graph(len(assignment)), assignment, **changes).save(path)
        return path

    return write


def test_make_writes_what_show_reads(command, tmp_path) -> None:
    path = tmp_path / "plan.json"
    assert command("plan", "make", GRAPH, "--stages", 3, "--balance", "time", "-o", path) == 0
    table, plan = command.stdout, command.json("plan", "show", path)
    nodes = {node["id"]: node for node in json.loads(Path(GRAPH).read_text())["nodes"]}
    sums = [0.0] * 3
    for name, stage in zip(plan["node_names"], plan["assignment"], strict=True):
        sums[stage] += 32 * (nodes[name]["forward_seconds"] + nodes[name]["backward_seconds"])
    largest = plan["certificate"]["value"] * plan["num_micro_batches"]
    assert max(sums) == pytest.approx(largest)
    assert "'diamonds': 14 operations on 3 stages" in table
    assert "optimal" in table
    assert command("plan", "show", path) == 0
    assert command.stdout == table
    assert plan["balance"] == "time"


def test_show_writes_the_page(command, plan_file, tmp_path) -> None:
    path, page = plan_file([0, 0, 1, 1]), tmp_path / "a.html"
    assert command("plan", "show", path, "--html", page) == 0
    assert f"Wrote {page}." in command.stdout
    assert "dense_3" in page.read_text()
    assert "Timeline of 2 ranks" in page.read_text()
    assert command.json("plan", "show", path, "--html", page)["num_stages"] == 2
    (tmp_path / "b.html").symlink_to(tmp_path / "none" / "b.html")
    told = command.fails(2, "plan", "show", path, "--html", tmp_path / "b.html")
    assert f"Cannot write '{tmp_path}/b.html'" in told
    for arguments in (["show", path, "--html", path], ["make", path, "--stages", 2, "-o", path]):
        assert "does not read or write already" in command.fails(2, "plan", *arguments)


EDGE = {"source": "a", "target": "b"}


def graph_text(**changes):
    nodes = [{"id": "a", "flops": 1, "parameters": 4}, {"id": "b", "flops": 1}]
    return json.dumps({"directed": True, "nodes": nodes, "edges": [EDGE], **changes})


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "node-link JSON"),
        ("", "node_link_data"),
        (graph_text(edges=[EDGE, {"source": "b", "target": "a"}]), "cycle"),
        (graph_text(edges=[{"source": "a"}]), "target"),
        (graph_text(nodes=[], edges=[]), "at least one node"),
        (graph_text(nodes=[{"id": "a", "flops": -1}, {"id": "b"}]), "node a: expected flops"),
        ('{"nodes": [{"id": 0, "flops": NaN}], "edges": []}', "expected flops"),
        (graph_text(nodes=[{"id": "a"}, {"id": "b", "flops": 10**400}]), "node b: expected flops"),
        (graph_text(edges=[EDGE, {"source": "a", "target": "bb"}]), "Received: ['bb']"),
        (graph_text(directed=False), 'must have "directed": true'),
        (graph_text(multigraph=True), 'must have "multigraph": false'),
        (graph_text(edges=[], links=[EDGE]), 'must have "edges" or "links". Received: both'),
        (graph_text(nodes=[{"id": "b"}] * 2, edges=[]), "ids of nodes must differ"),
        (graph_text(edges=[EDGE, EDGE]), "no two edges may have the same ends"),
        (b"\xff\xfe\x00", "node_link_data"),
        (graph_text(nodes=[7]), "lists of nodes"),
    ],
)
def test_broken_graphs_are_refused_in_one_line(command, tmp_path, text, complaint) -> None:
    path = tmp_path / "graph.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    assert complaint in command.fails(2, "plan", "make", path, "--stages", 2)


def test_names_cannot_steer_a_terminal(command, plan_file, tmp_path) -> None:
    path = tmp_path / "graph.json"
    path.write_text(graph_text(graph={"name": "\x1b[31mred"}))
    assert command("plan", "make", path, "--stages", 2) == 0
    assert "\\x1b[31mred" in command.stdout
    assert "\x1b" not in command.stdout
    path.write_text(graph_text(nodes=[{"id": "\x1b[2J", "flops": -1}], edges=[]))
    complaint = command.fails(2, "plan", "make", path, "--stages", 2)
    assert "\\x1b[2J" in complaint
    assert "\x1b" not in complaint
    plan = plan_file([0, 1], model="\x1b[31mred")  # a file from a stranger
    for arguments in (("plan", "show", plan), ("simulate", plan, "--machine", "v100")):
        assert command(*arguments) == 0
        assert "'\\x1b[31mred'" in command.stdout
        assert "\x1b" not in command.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["make", "missing.json", "--stages", "2"], "There is no file 'missing.json'"),
        (["make", "train.py", "--stages", "2"], "script.py:function"),
        (["make", "ResNet50"], "--stages, or --ranks"),
        (["make", GRAPH, "--stages", "0"], "positive integer. Received: '0'"),
        (["make", GRAPH, "--stages", "9" * 30], "at most num_stages=14"),
        (["make", GRAPH, "--stages", "2", "--memory-limit", "1,2,3"], "2 stages"),
        (["make", GRAPH, "--stages", "2", "-o", "/no/such/p.json"], "in a folder that exists"),
        (["make", GRAPH, "--stages", "2", "--html", "/no/such/a.html"], "in a folder that exists"),
        (["make", GRAPH, "--stages", "2", "--unknown"], "--unknown"),
        (["show", "/dev/null"], "no valid plan"),
        ([], "required: COMMAND"),
    ],
)
def test_wrong_usage_is_told_in_one_line(command, arguments, complaint) -> None:
    assert complaint in command.fails(2, "plan", *arguments)


@pytest.mark.parametrize("before", [["plan", "show", "--json"], ["simulate"]])
def test_nothing_heavy_is_loaded_where_it_is_not_needed(plan_file, before) -> None:
    command = [*before, str(plan_file([0, 0, 1, 1]))]
    loaded = all_loaded_by(f"from tarantella_pp.cli.main import main; main({command})")
    assert "tarantella_pp.cli.output" in loaded
    assert not loaded & HEAVY
    assert "tarantella_pp.partition.cut" not in loaded
    assert "numpy" not in loaded
    assert ("rich" in loaded) == ("--json" not in command)


def test_output_that_nobody_reads_or_that_has_no_room(plan_file) -> None:
    path = plan_file([0] * 3000 + [1])
    reader, writer = os.pipe()
    os.close(reader)
    full = b"tarantella plan: [Errno 28] No space left on device\n"
    for file, code, said in ((writer, 141, b""), (os.open("/dev/full", os.O_WRONLY), 1, full)):
        command = [sys.executable, "-m", "tarantella_pp", "plan", "show", path, "--json"]
        done = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.PIPE, timeout=30)
        os.close(file)
        assert (done.returncode, done.stderr) == (code, said)


RANKS = {"gpipe": 4, "1f1b": 4, "interleaved": 2, "zb-h1": 4}


@pytest.fixture
def exported(command, plan_file):
    """The rows of a schedule for torchtitan, and the modules of each stage."""

    def export(schedule):
        ranks = tuple(stage % RANKS[schedule] for stage in range(4))
        path = plan_file([0, 0, 1, 2, 2, 3], schedule=schedule, num_replicas=2, ranks=ranks)
        assert command("plan", "export", "--to", "torchtitan", path) == 0
        rows = path.with_suffix(".schedule.csv").read_text().splitlines()
        modules = json.loads(path.with_suffix(".modules.json").read_text())
        return [row.split(",") for row in rows], modules

    return export


@pytest.mark.parametrize("schedule", RANKS)
def test_export_gives_torchtitan_the_schedule_and_the_split(command, exported, schedule) -> None:
    rows, modules = exported(schedule)
    assert f"pipeline_parallel_degree = {RANKS[schedule]}\n" in command.stdout
    assert "pipeline_parallel_microbatch_size = 4\n" in command.stdout
    assert [len(names) for names in modules] == [2, 1, 2, 1]
    assert len(rows) == RANKS[schedule]
    for rank, row in enumerate(rows):
        found = set(row)
        for action in [action for action in found if "B" in action and schedule == "zb-h1"]:
            found = found - {action} | {action.replace("B", "I"), action.replace("B", "W")}
        kinds = "FIW" if schedule == "zb-h1" else "FB"
        stages = range(rank, 4, len(rows))
        assert found == {f"{s}{kind}{i}" for s in stages for kind in kinds for i in range(4)}


@pytest.mark.parametrize("schedule", RANKS)
def test_torch_reads_an_exported_schedule(exported, schedule) -> None:
    torch = pytest.importorskip("torch.distributed.pipelining.schedules")
    rows, _ = exported(schedule)
    read = {rank: [torch._Action.from_str(a) for a in row] for rank, row in enumerate(rows)}
    assert [[str(action) for action in row] for row in read.values()] == rows
    # It adds the messages, or finds that ranks would wait for each other.
    whole = torch._add_send_recv(read, lambda stage: stage % RANKS[schedule], num_stages=4)
    assert sum("SEND" in str(action) for row in whole.values() for action in row) == 2 * 3 * 4


def test_export_refuses_what_torchtitan_has_no_words_for(command, plan_file) -> None:
    for assignment, options, words in (
        ([0, 1, 2, 3], {"schedule": "zb-v"}, "schedule zb-v has stage 2 on rank 1, not on rank 0"),
        ([0, 1], {"recompute": (0,)}, "--recompute none"),
        ([0, 1], {"batch_size": 30}, "batch_size=30 makes 4 micro-batches on 1 replicas"),
    ):
        path = plan_file(assignment, num_micro_batches=4, **options)
        told = command.fails(2, "plan", "export", "--to", "torchtitan", path)
        assert "torchtitan has no words for this plan" in told
        assert words in told
        assert not path.with_suffix(".schedule.csv").exists()
    assert "invalid choice: 'jax'" in command.fails(2, "plan", "export", "--to", "jax", path)
