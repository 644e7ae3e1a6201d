"""The processes of a job, from outside: MPI launchers, environment, supervisor, worker."""
