"""The one door: the proxy that sandboxes' connections go through, and the guard that decides.

Belongs here: the policy engine, protocols (HTTP proxy, CONNECT, SOCKS5, DNS), TLS, credential injection,
budgets, recording, approvals. Does not belong here: how a link reaches a sandbox (``runtimes``,
``placement``), walls.
"""
