"""Container engines that the user already has: Docker and Podman, by the engine's HTTP API.

Belongs here: finding an engine and speaking to it, a container made from a :class:`StartSpec`, templates as
images of the engine. Does not belong here: OCI runtimes that we call ourselves (``runtimes.oci``).
"""
