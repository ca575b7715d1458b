"""A reap on many machines by simulation: the engine's own plan, drive and pace on a model of a metadata server."""
