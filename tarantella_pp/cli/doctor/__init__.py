"""What `tarantella doctor` measures on ranks, and what it finds on the hosts of a job."""
