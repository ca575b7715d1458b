"""What a step that renames, moves and merges is held against; in the tree for the time of that step."""
