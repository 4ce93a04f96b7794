"""Programs that run inside a sandbox, sent in as text: one file a language, standard library only.

Nothing here is imported by the host; the host reads these files and sends them. They must run with what a
template has: ``python.py`` with CPython 3.8 or newer, ``node.js`` with Node 14 or newer, ``bash.sh`` with
Bash 4 or newer.
"""
