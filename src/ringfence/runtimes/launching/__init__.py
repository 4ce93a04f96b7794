"""Speaking to the native launcher, and what every local driver needs of processes and sockets.

Belongs here: plans, the launcher's client, naming a process for ever, the agent's socket. Does not belong
here: what a wall consists of (each driver's own module).
"""
