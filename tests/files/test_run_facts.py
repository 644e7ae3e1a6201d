"""What differs between two runs is named."""

from __future__ import annotations

from tarantella_pp.files.run_facts import differences, without_names


def test_differences_are_named_with_both_values():
    saved = {"a": 1, "b": {"c": [1, 2], "d": None}, "e": [1]}
    now = {"a": 1.0, "b": {"c": [1, 3], "f": "x"}, "e": [1, 2]}
    assert differences(saved, now, 5) == [
        "b.c[1]: 2 in the checkpoint, 3 now",
        "b.f: None in the checkpoint, 'x' now",
        "e[1]: None in the checkpoint, 2 now",
    ]
    assert differences(saved, saved, 5) == []
    assert differences(list(range(9)), list(range(1, 10)), 5)[-1] == "and 4 more"


def test_names_that_keras_has_counted_do_not_count():
    def config(first, second, units=3):
        layers = [{"name": first, "units": units}, {"name": second, "inbound_nodes": [first, 0]}]
        layers[0]["shared_object_id"] = hash(first)
        return {"name": "model", "layers": layers}

    one = without_names(config("dense", "dense_1"))
    assert one == without_names(config("dense_7", "dense_8"))
    assert one != without_names(config("dense_7", "dense_8", units=4))
    assert one != without_names({"name": "model", "layers": config("a", "b")["layers"][::-1]})
