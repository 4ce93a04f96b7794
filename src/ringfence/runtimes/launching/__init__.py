"""Speaking to the native launcher, and the small facts about processes and sockets that every local driver needs.

Belongs here: plans, the launcher's client, naming a process for ever, the agent's socket. Does not belong
here: what a wall consists of (each driver's own module).
"""
