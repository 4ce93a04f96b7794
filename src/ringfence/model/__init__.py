"""Frozen values, the error tree, ids and the policy.

Belongs here: plain values that every layer speaks of, and the rules that make them valid.
Does not belong here: anything that touches a file, a socket, a clock or a process. The command
line imports this package on its hot path, so modules here import nothing heavy at the top.
"""
