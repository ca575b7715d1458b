"""Floor 5: the service that runs for years: volumes, users and their turns, what is told of them."""
