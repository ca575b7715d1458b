"""Generates files from the commands and their types when trashd is built: manual pages and the JSON schema."""
