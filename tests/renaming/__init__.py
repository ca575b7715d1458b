"""Renames and moves by a map, and the proof that nothing else changed; deleted when the step is over."""
