"""How ranks and the launcher tell each other what becomes of a job: lines of JSON over TCP."""
