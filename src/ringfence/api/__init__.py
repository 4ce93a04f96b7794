"""HTTP and WebSocket: routes, authentication, wire types, the proxy to ports inside.

Belongs here: turning requests into calls of ``ringfence.control`` and answers into the documented JSON. Does
not belong here: decisions about life cycle or quotas, anything that needs privileges.
"""
