"""The command line: one module a command, imported only when that command is called.

Belongs here: reading arguments, passing streams, signals and terminals through, printing tables and JSON.
Does not belong here: anything a program would want without a terminal (that is ``ringfence.node`` and below).

Why argparse and a static top-level help: measured on one machine, starting Python takes 20 ms, argparse adds
10 to 20, click 80, rich 110, cyclopts 165. ``ringfence run`` starts once a command of an agent, so those
would be most of its time. Rich is imported for tables on a terminal only, shtab for completions only.
"""
