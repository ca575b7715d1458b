"""The native core: the commonest requests in C, on the tables of the Python code, which is the reference."""
