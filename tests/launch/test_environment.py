"""What the ranks find in their environment."""

import pytest

from tarantella_pp.errors import ConfigurationError
from tarantella_pp.launch import environment


def variables(given: dict[str, str]) -> dict[str, str]:
    return environment.rank_environment("WARNING", False, given)


def test_what_is_set_leaves_what_the_user_has_set():
    found = variables({})
    assert found["TF_CPP_MIN_LOG_LEVEL"] == "1"  # warnings are shown
    assert found["TNT_OUTPUT_ON_ALL_DEVICES"] == "0"
    given = {"MALLOC_TRIM_THRESHOLD_": "1", "TF_CPP_MIN_LOG_LEVEL": "0"}
    assert not set(variables(given)) & set(given)


def test_what_other_hosts_need_is_the_users_own_and_no_secret():
    needed = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "UCX_TLS", "OMP_NUM_THREADS")
    needed += ("TNT_WARN", "TF_X", "KERAS_BACKEND")
    others = ("HOME", "HUB_TOKEN", "HOSTNAME", "TMPDIR")
    assert environment.needed_elsewhere(dict.fromkeys(needed + others, "")) == sorted(needed)


@pytest.mark.parametrize(("machine", "value"), [("x86_64", "1"), ("aarch64", None)])
def test_onednn_is_asked_for_where_tensorflow_has_it_for_all_processors(
    machine, value, monkeypatch
):
    monkeypatch.setattr(environment.platform, "machine", lambda: machine)
    for name in ("TF_ENABLE_ONEDNN_OPTS", "TF_ONEDNN_USE_SYSTEM_ALLOCATOR"):
        assert variables({}).get(name) == value
        assert name not in variables({name: "0"})


def test_exports_have_names_and_values():
    given = {"HOME": "/home/x"}
    found = environment.parse_exports(["A=1", "B=x=y", "C=", "HOME"], given)
    assert found == {"A": "1", "B": "x=y", "C": "", "HOME": "/home/x"}
    for wrong in ("=1", "A B=1", "1A=2", "UNSET"):
        with pytest.raises(ConfigurationError, match=wrong.partition("=")[0] or "=1"):
            environment.parse_exports([wrong], given)
