"""One module for each kind of thing; a module with ``routes = Routes(…)`` is served (``api.app.tables``)."""
