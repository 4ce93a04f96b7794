"""The host's side of the link to the guest agent.

Belongs here: frames, channels, flow control, and the calls a host process makes over a link
(processes, files, ports, binding, stats). Does not belong here: starting walls, policy, limits.
Everything that arrives here was written by hostile code; nothing is trusted for cause or limits.
"""
