"""One rank of a job, from inside: who started it, how it ends, where it waits."""
