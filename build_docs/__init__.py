"""Generates files from the code: manual pages, the JSON schema, and the index of modules."""
