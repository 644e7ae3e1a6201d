"""`tarantella plan` on Keras models, from wherever they come."""

import json
import sys

import pytest
from msgspec import to_builtins

from tarantella_pp import machines

pytestmark = pytest.mark.keras

SCRIPT = """
import keras

print("a script may print what it likes")
WIDTH = 8

def small(depth=4):
    print("so may a function")
    layers = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(depth)]
    return keras.Sequential([keras.Input((WIDTH,)), *layers])

def compiled():
    model = small()
    model.compile("sgd", "mse")
    return model

def subclassed():
    class Own(keras.Model):
        def call(self, x):
            return x
    return Own()

def needs(width, depth):
    raise AssertionError

def raises():
    raise ValueError("no such\\nluck")

def leaves():
    raise SystemExit(7)

def text():
    return "a model"

ready = small()

if __name__ == "__main__":
    raise AssertionError("run as a program")
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    (tmp_path / "planned_models.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "planned_models.py"
    sys.modules.pop("planned_models", None)


def make(command, source, *options):
    """Makes a plan of two stages; a model's own code may write to stderr."""
    assert command("plan", "make", source, "--stages", 2, "--json", *options) == 0, command.stderr
    return json.loads(command.stdout)


@pytest.mark.parametrize(
    "source", ["planned_models.py:small", "planned_models:ready", "./planned_models.py:ready"]
)
def test_a_model_of_a_script(command, script, source) -> None:
    made = make(command, source, "--balance", "flops")
    assert made["assignment"] == [0, 0, 1, 1]
    assert made["certificate"]["optimal"]
    assert made["optimizer"] == "Adam (assumed)"
    assert "a script may print what it likes" in command.stderr


def test_a_script_that_trains_is_planned(command, script) -> None:
    with open("training.py", "w") as file:
        file.write(f"{SCRIPT}\nmodel = compiled()\nmodel.fit([[1.0] * 8], [[1.0] * 8])\n")
    assert make(command, "training.py:small")["assignment"] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("given", "in_flight"), [("interleaved", [2, 1]), ("zb-v", [2, 1]), ("zb-auto", [2, 2])]
)
def test_schedules_of_several_stages_on_a_rank(command, script, given, in_flight) -> None:
    options = ["--stages-per-rank", 2, "--micro-batches", 4, "-o", "plan.json"]
    made = make(command, f"{script}:small", "--schedule", given, *options)
    assert made["schedule"] == given
    assert [stage["in_flight"] for stage in made["stages"]] == in_flight
    assert command("simulate", "plan.json", "--ranks", 1) == 0
    assert given in command.stdout


def test_a_schedule_of_ones_own(command, script, tmp_path) -> None:
    text = "rank 0: 0F0 0F1 0BW0 0BW1\nrank 1: 1F0 1F1 1BW0 1BW1"
    (tmp_path / "mine").write_text(text)
    arguments = ["plan", "make", f"{script}:small", "--schedule", "mine", "-o", "plan.json"]
    assert command(*arguments, "--json") == 0
    made = json.loads(command.stdout)
    assert (made["num_stages"], made["num_micro_batches"]) == (2, 2)
    assert [stage["in_flight"] for stage in made["stages"]] == [2, 2]
    assert "rank 0: 0F0 0F1 0BW0 0BW1" in made["program"]
    assert command("simulate", "plan.json") == 0
    assert "2 stages on 2 ranks" in command.stdout


OPTIONS = [
    ("small", "--batch-size 48 --micro-batches 6", {"batch_size": 48, "num_micro_batches": 6}),
    ("small", "--ranks 4", {"num_stages": 2, "num_replicas": 2}),
    ("small", "--schedule gpipe --replicas 2", {"schedule": "gpipe", "num_replicas": 2}),
    ("small", "--memory-limit 1MB", {"memory_limit": 1_000_000}),
    ("small", "--memory-limit 1MB,2MB", {"memory_limit": [1_000_000, 2_000_000]}),
    ("small", "--wire-dtype bfloat16", {"wire_dtype": "bfloat16"}),
    ("small", "--recompute none", {"recompute": []}),
    ("small", "--machine v100", {"machine": to_builtins(machines["v100"])}),
    ("small", "--recompute all", {"recompute": [0, 1]}),
    ("small", "--recompute 1,0", {"recompute": [0, 1]}),
    ("compiled", "", {"optimizer": "SGD"}),
    ("compiled", "--optimizer adam", {"optimizer": "Adam"}),
]


@pytest.mark.parametrize(("source", "given", "fields"), OPTIONS)
def test_options_are_fields_of_the_plan(command, script, source, given, fields) -> None:
    made = make(command, f"{script}:{source}", *given.split())
    assert made | fields == made


def test_a_keras_file(command, script, tmp_path) -> None:
    import keras

    model = keras.Sequential([keras.Input((8,)), *(keras.layers.Dense(8) for _ in range(4))])
    # A loss that no other process knows must not be needed to read the optimizer.
    model.compile("sgd", lambda y, z: keras.ops.mean(y - z))
    model.save("saved.keras")
    made = make(command, "saved.keras")
    assert made["optimizer"] == "SGD"
    assert all(stage["optimizer_bytes"] <= 16 for stage in made["stages"])
    (tmp_path / "broken.keras").write_bytes(b"PK\5\6" + bytes(18))  # a zip file of nothing
    assert "is damaged" in command.fails(2, "plan", "make", "broken.keras", "--stages", 2)


def test_an_application(command, script, tmp_path) -> None:
    made = make(command, "mobilenet", "-o", "plan.json", "--html", "a.html")
    assert ">conv1</td>" in (tmp_path / "a.html").read_text()
    assert made["model"].startswith("mobilenet")
    message = command.fails(2, "plan", "make", "MobilNet", "--stages", 2)
    assert "keras.applications has no MobilNet" in message


@pytest.mark.parametrize(
    ("code", "source", "complaint"),
    [
        (2, "planned_models.py:smal", "There is no function 'smal' in planned_models.py."),
        (1, "no_such_module:small", "No module named 'no_such_module'"),
        (1, "planned_models.py:needs", "missing 2 required positional arguments: 'width' and"),
        (1, "planned_models.py:raises", "raised ValueError: no such (planned"),
        (1, "planned_models.py:leaves", "raised SystemExit: 7"),
        (1, "planned_models.py:text", "Received: a value of type str"),
        (1, "planned_models.py:subclassed", "is a subclassed model"),
        (1, "syntax.py:f", "SyntaxError"),
    ],
)
def test_mistakes_are_told_in_one_line(command, script, tmp_path, code, source, complaint) -> None:
    (tmp_path / "syntax.py").write_text("def f(:\n")
    assert command("plan", "make", source, "--stages", 2) == code
    assert command.stdout == ""
    last = command.stderr.splitlines()[-1]
    assert last.startswith("tarantella plan: ")
    assert complaint in last
    assert "Traceback" not in command.stderr


def test_a_script_does_not_see_the_options_of_the_command(command, tmp_path) -> None:
    (tmp_path / "arguments.py").write_text(
        "import argparse, keras, sys\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--width', type=int, default=3)\n"
        "options = parser.parse_args()\n"
        "def build():\n"
        "    assert parser.parse_args() == options\n"
        "    layers = map(keras.layers.Dense, [options.width] * 3)\n"
        "    return keras.Sequential([keras.Input((2,)), *layers])\n"
    )
    before = [*sys.argv]
    assert command("plan", "make", f"{tmp_path}/arguments.py:build", "--stages", 2) == 0
    assert sys.argv == before
