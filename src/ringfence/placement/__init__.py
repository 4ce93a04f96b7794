"""Where sandboxes run: a contract, this machine (``local``), and a fake with scripted faults.

Belongs here: how a sandbox is started, found, reached and ended wherever it runs. Does not belong here: who
owns it, its life cycle and quotas (``ringfence.control``), what its wall is made of (``ringfence.runtimes``).
"""
