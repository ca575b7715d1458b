"""Generates files of the documentation.

python -m build_docs man DIRECTORY writes manual pages to DIRECTORY/man1 and man5; schema FILE writes the JSON schema,
and modules FILE the index of modules.
"""

from __future__ import annotations

import sys
from pathlib import Path

from build_docs import json_schema, man_pages, module_index


def main(arguments: list[str]) -> int:
    """Run one of the subcommands. Returns  the exit code, which is 2 for a wrong command line"""
    match arguments:
        case ["man", directory]:
            man_pages.write_all(Path(directory))
        case ["schema", file]:
            Path(file).write_text(json_schema.text(), encoding="utf-8")
        case ["modules", file]:
            Path(file).write_text(module_index.text(), encoding="utf-8")
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


sys.exit(main(sys.argv[1:]))
