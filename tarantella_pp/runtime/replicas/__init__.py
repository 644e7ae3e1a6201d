"""Several pipelines that train one model: their ranks, and what they add up or tell each other."""
