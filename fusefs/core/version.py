"""The version of trashd. Reading it from the metadata of the installed package would take 20 ms and 3 MB."""

VERSION = "0.3.0"
