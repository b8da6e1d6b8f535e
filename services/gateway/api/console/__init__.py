"""Pages for people: the console at /, the API's description at /docs; and the cluster's state as JSON."""
