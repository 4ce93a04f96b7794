"""The orchestrator: life cycle, pools, queue, jobs, volumes, tenancy, quotas, the reconciler.

Belongs here: what may happen when, decided on the store and done through a placement; every deadline is in
the store. Does not belong here: HTTP (``ringfence.api``), where and how walls stand (``placement``,
``runtimes``).
"""
