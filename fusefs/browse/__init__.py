"""`trashd browse`: orphans on a whole terminal; what is done is done by the other commands."""
