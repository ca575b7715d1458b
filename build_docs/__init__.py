"""Generates manual pages and the JSON schema from the commands and their types when trashd is built."""
