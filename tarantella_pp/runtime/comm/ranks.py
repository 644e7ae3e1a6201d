"""Who am I: the rank of this process in its job."""

from __future__ import annotations

from tarantella_pp.runtime.comm.communicator import world


def init() -> None:
    """Joins the other ranks of the job.

    Optional: whatever needs the ranks joins them first. Called at the top of a script, it
    reports a job that was started wrongly before any work is done.

    Raises:
        LaunchError: Several processes were started, but they do not find each other.
    """
    world()


def get_rank() -> int:
    """Returns the number of this process in the job, from 0; 0 if it is the only one."""
    return world().rank


def get_size() -> int:
    """Returns the number of ranks of the job; 1 for a script under plain `python`."""
    return world().size


def get_master_rank() -> int:
    """Returns the rank that prints and saves: the last one.

    It owns the last stage of the pipeline, where the loss and the metrics are computed.
    """
    return world().size - 1


def is_master_rank() -> bool:
    """Returns whether this process is the one that prints and saves; true without other ranks."""
    return world().prints


def barrier() -> None:
    """Waits until every rank of the job has come here; returns at once if there is only one.

    Raises:
        ConfigurationError: On all ranks, if one makes another call instead, or ends.
    """
    with world().call("tnt.barrier"):
        pass
