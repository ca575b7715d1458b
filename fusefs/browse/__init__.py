"""`trashd browse`: lists orphans in a full-screen view and runs other trashd commands on them."""
