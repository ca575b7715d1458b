"""`trashd browse`: lists orphans on the whole terminal and runs the other commands on them."""
