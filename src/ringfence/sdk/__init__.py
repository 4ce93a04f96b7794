"""The Python SDK: ``Sandbox``, ``AsyncSandbox``, ``Job``, ``Volume``, ``Template``, ``Policy``, ``Pool``.

Speaks HTTP and WebSocket to a service and imports only ``ringfence.model``; ``sdk.embedded`` alone starts a
service where none runs.
"""
