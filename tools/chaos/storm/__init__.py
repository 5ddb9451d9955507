"""One storm: its requests, their readers, how one request is run and checked, the report."""
